"""The engines for rows of tokens: one for each length of rows, compiled when needed, with a mask for each batch."""

import contextlib
import functools
import logging
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from stof_tvm.engine import Engine
from stof_tvm.frontend.packing.batched import Batched
from stof_tvm.frontend.packing.program import PackedProgram, pack
from stof_tvm.frontend.snapshot import Snapshot
from stof_tvm.masks import Mask
from stof_tvm.packed.device_lists import DeviceLists, plans_of
from stof_tvm.packed.layout import Layout, most_sequences, row_length
from stof_tvm.running.bounded_cache import BoundedCache
from stof_tvm.running.gpus import on_gpu
from tir_kernels.compiling.one_at_a_time import one_at_a_time
from tir_kernels.errors import UnsupportedError

LOGGER = logging.getLogger("stof_tvm")
MOST_ENGINES = 64
MOST_LAYOUTS = {"cpu": 64, "cuda": 8}  # on a GPU each has memory of its own for what it computes


@dataclass(frozen=True)
class RowEngine:
    """The engine for rows of `row` tokens and up to `sequences` sequences, and the program it was compiled from.

    `lists` are what it reads of its sequences, if the GPU writes that.
    """

    engine: Engine
    packed: PackedProgram
    row: int
    sequences: int
    lists: DeviceLists | None = None


@dataclass(frozen=True)
class Plan:
    """What calls of one layout need.

    `engine` has the mask of its sequences; `vectors` are the integer inputs by name; `taken` are the places of the
    batch that fill the row, `places` those of real tokens, both int64.  All of it is only to be used in a `turn`.
    """

    compiled: RowEngine
    engine: Engine
    vectors: Mapping[str, torch.Tensor]
    taken: torch.Tensor
    places: torch.Tensor
    layout: Layout

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the engine, the vectors and the places are the layout's.

        Raises InputError where a caller captures a graph of its own before a call with these lengths.
        """
        lists = self.compiled.lists
        return contextlib.nullcontext() if lists is None else lists.turn(self.layout)


class RowEngines:
    """Makes and keeps engines.  Threads may share it.

    Parameters
    ----------
    batched : Batched
        The model.
    snapshot : Snapshot
        Of its program, which holds the weights of all engines.
    mask_for : callable
        Maps an attention's path and sizes (B, H, Sq, Skv) to the user's mask of positions in a sequence, or None.
    build_one : callable
        `build_one(program, (args, kwargs), masks by path, snapshot)` is an Engine whose masks may be replaced.
    device : torch.device
    """

    def __init__(self, batched: Batched, snapshot: Snapshot, mask_for: Callable, build_one: Callable, device):
        self.batched, self.snapshot, self.mask_for, self.build_one = batched, snapshot, mask_for, build_one
        self.device = device
        self.engines: BoundedCache[RowEngine] = BoundedCache(lambda entry: 0, 0, MOST_ENGINES)
        self.plans: BoundedCache[Plan] = BoundedCache(lambda entry: 0, 0, MOST_LAYOUTS[device.type])
        self._own = batched.own_masks()

    def plan(self, layout: Layout) -> Plan:
        """What a call needs; an engine is compiled where there is none for its length of rows."""
        if (known := self.plans.get(layout)) is not None:
            return known
        compiled = self.compiled(layout)
        if (lists := compiled.lists) is not None:
            places = lists.taken[: layout.tokens]
            return Plan(compiled, compiled.engine, lists.vectors, lists.taken, places, layout)
        engine = self._with_masks(compiled, layout)
        tensors = {
            name: torch.from_numpy(x).to(self.device)
            for name, x in layout.vectors(compiled.row, compiled.sequences or len(layout.lengths) + 1).items()
        }
        places = torch.from_numpy(layout.places()).to(self.device)
        rest = places[-1:].expand(compiled.row - len(places))
        return self.plans.put(layout, Plan(compiled, engine, tensors, torch.cat([places, rest]), places, layout))

    def engine(self, layout: Layout) -> Engine:
        """The engine for a layout's row, with the masks of its sequences and of no others."""
        return self._with_masks(self.compiled(layout), layout)

    def _with_masks(self, compiled: RowEngine, layout: Layout) -> Engine:
        if compiled.engine.mask_arrays is None:  # a model without attention
            return compiled.engine
        return compiled.engine.with_mask(self._masks(compiled.packed, layout, compiled.row))

    def compiled(self, layout: Layout) -> RowEngine:
        """The engine for rows as long as a layout needs."""
        row, sequences = row_length(layout.tokens), most_sequences(len(layout.lengths))
        for key in ((row, 0), (row, sequences)):
            if (known := self.engines.get(key)) is not None:
                return known
        return self._compile(layout, row, sequences)

    @one_at_a_time
    def _compile(self, layout: Layout, row: int, sequences: int) -> RowEngine:
        for key in ((row, 0), (row, sequences)):  # another thread may have compiled it meanwhile
            if (known := self.engines.get(key)) is not None:
                return known
        LOGGER.info(
            "a PackedEngine compiles the engine of rows of %d tokens, for a batch of %d real ones", row, layout.tokens
        )
        packed = pack(self.batched, self._own, row, sequences)
        nodes = packed.program.graph.find_nodes(op="placeholder")
        examples = {x.name: torch.zeros(x.meta["val"].shape, dtype=x.meta["val"].dtype) for x in nodes}
        call = tuple(examples[name] for name in packed.inputs), {}
        found = self._masks(packed, layout, row)
        with on_gpu(self.device.index):
            engine = self.build_one(packed.program, call, found or None, self.snapshot)
        dense = [site.site for site in engine.report().sites if not site.rewritten]
        missing = sorted({*packed.masks} - {site.site for site in engine.report().rewritten})
        if missing:
            raise UnsupportedError(
                f"the attention {missing[0] or '(the model)'} is not recognised, so sequences would not be apart in it "
                f"(dense: {', '.join(dense) or 'none'}); without_padding=False computes the padded batch"
            )
        if not packed.depends_on_sequences:
            sequences = 0
        lists = self._lists(engine, packed, row, sequences)
        return self.engines.put((row, sequences), RowEngine(engine, packed, row, sequences, lists))

    def _lists(self, engine: Engine, packed: PackedProgram, row: int, sequences: int) -> DeviceLists | None:
        """The lists that the GPU writes for an engine, which reads them from now on; None where the CPU plans."""
        masks = engine.mask_arrays
        if self.device.type != "cuda" or masks is None or not torch.cuda.is_available():
            return None
        inside = {path: self._inside(packed, path) for path in packed.masks}
        plans = plans_of(masks, inside, row, self.batched.longest)
        if plans is None:
            return None
        lists = DeviceLists(masks, plans, row, sequences, self.device)
        engine.read_arrays(lists.arrays)
        engine.inputs_in_place = [n for n, name in enumerate(packed.inputs) if name in lists.vectors]
        return lists

    def _masks(self, packed: PackedProgram, layout: Layout, row: int) -> dict:
        """The mask of each attention: documents, in which the model's own mask and the user's hold.

        Paths of submodules come after those of modules that they are in, since the last one that fits counts.
        """
        paths = sorted(packed.masks)
        return {path: layout.mask(row, self._inside(packed, path)) for path in paths}

    def _inside(self, packed: PackedProgram, path: str) -> Mask | None:
        """The mask of positions inside of each sequence, at one attention."""
        sizes = 1, packed.heads[path], self.batched.longest, self.batched.longest
        parts = [mask for mask in (packed.masks[path], self.mask_for(path, sizes)) if mask is not None]
        return functools.reduce(operator.and_, parts) if parts else None
