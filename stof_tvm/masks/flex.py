"""Masks written for PyTorch's FlexAttention: a `mask_mod` function or a `BlockMask`, used unchanged."""

import contextlib
import pickle
import re

import numpy as np
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import BlockMask, create_mask

from stof_tvm.masks import pattern
from stof_tvm.masks.arguments import FixedArray, check_int
from stof_tvm.masks.formulas.captured import device_of, identity_of
from stof_tvm.masks.formulas.device_bitmap import packed
from stof_tvm.masks.formulas.formula import formula_pattern
from stof_tvm.masks.mask import Grid, Leaf, Mask
from stof_tvm.masks.tensors import block_layout
from stof_tvm.running.bounded_cache import BoundedCache
from tir_kernels.errors import MaskError

# Where PyTorch's messages ask for a bug report: the rest is cut off, because the failing code is the user's.
ASKS_FOR_A_REPORT = re.compile(r"\s*If error is occurring somewhere inside|,?\s*please file an? ", re.IGNORECASE)


def from_mask_mod(mask_mod, batch: int | None = None, heads: int | None = None, device=None) -> Mask:
    """The mask that a FlexAttention `mask_mod(b, h, q_idx, kv_idx)` computes.

    It is called under vmap, on 0-dimensional tensors on `device`, by default the device of the tensors that it
    captured.  So it may index these tensors.  A mask_mod that depends on b or h needs `batch` or `heads`; without
    these, b and h are 0.

    Arithmetic, comparisons, logic and lookups are read as a formula, by which most blocks are decided without a look at
    their elements (formulas/formula.py): a window of 65,536 tokens compiles in a fraction of a second.  A function that
    does something else, such as `table[q_idx][kv_idx]` in two steps or `torch.isin`, is evaluated for all elements, in
    chunks as `create_mask` evaluates it.

    Everything that the function reads besides its arguments is part of the mask: closures, globals, default arguments
    and attributes of objects, down to values, containers and the elements of tensors.  It is read at each use.  So
    masks of functions that read the same values are equal, and a mask changes if such a tensor is written to or such a
    variable is assigned anew; `from_tensor(mask.dense(…))` does not change.  What the function reads in other ways
    (files, `globals()[name]`, attributes by computed names) is not noticed.

    MaskError where the function fails or returns something other than a boolean.
    """
    if not callable(mask_mod):
        raise MaskError(f"mask_mod must be a function of (b, h, q_idx, kv_idx), got {type(mask_mod).__name__}")
    n_batch = 1 if batch is None else check_int("batch", batch, least=1)
    n_heads = 1 if heads is None else check_int("heads", heads, least=1)
    device = None if device is None else str(torch.device(device))
    entries = [[_MaskModAt(mask_mod, b, h, device) for h in range(n_heads)] for b in range(n_batch)]
    if batch is None and heads is None:
        return entries[0][0]
    sizes = "".join(f", {name}={size}" for name, size in (("batch", batch), ("heads", heads)) if size is not None)
    return _FunctionGrid(entries, f"from_mask_mod({_name(mask_mod)}{sizes})", mask_mod, (from_mask_mod, device))


def taken_directly(mask_mod, batch: int, heads: int) -> Mask:
    """`from_mask_mod` for an attention's sizes; the mask depends on b or h only if the function reads b or h."""
    n_batch, n_heads = (n if n > 1 and read else None for n, read in zip((batch, heads), _reads(mask_mod), strict=True))
    return from_mask_mod(mask_mod, batch=n_batch, heads=n_heads)


def of_one_pattern(mask_mod) -> Mask:
    """`from_mask_mod` where sizes are not known; MaskError for a function that reads b or h."""
    for name, size, read in zip("bh", ("batch", "heads"), _reads(mask_mod), strict=True):
        if read:
            from_mask_mod(mask_mod).dense(1)  # if the function fails, this says why
            raise MaskError(
                f"mask_mod {_name(mask_mod)} depends on {name}; as an operand of & and | it needs a size: "
                f"masks.from_mask_mod({_name(mask_mod)}, {size}=…)"
            )
    return from_mask_mod(mask_mod)


def _reads(mask_mod) -> tuple[bool, bool]:
    identity = identity_of(mask_mod)
    return _reads_known.get(identity) or _reads_known.put(identity, _traced_reads(mask_mod))


def _traced_reads(mask_mod) -> tuple[bool, bool]:
    """Whether the function's result depends on b and on h; True where that cannot be found out."""
    arguments = [torch.zeros(1, dtype=torch.int64, device=device_of(mask_mod)) for _ in range(4)]
    try:
        # Under vmap, as in evaluation: indexing a captured tensor by a plain tensor would read the index's value.
        graph = make_fx(torch.vmap(lambda *x: mask_mod(*x)))(*arguments).graph
    except Exception:  # whatever the function raises is reported when the mask is evaluated
        return True, True
    b, h, *_ = (node for node in graph.nodes if node.op == "placeholder")
    return bool(b.users), bool(h.users)


_reads_known: BoundedCache[tuple[bool, bool]] = BoundedCache(lambda _: 0, 0, 1024)


def is_by_offset(mask: Mask, length: int) -> bool:
    """Whether a mask is a function of one batch entry and head that is known to read kv_idx - q_idx alone.

    `length` is that of some queries and keys.
    """
    if not isinstance(mask, _MaskModAt):
        return False
    found = mask.bind(length, length)
    return pattern.is_by_offset(found.formula if isinstance(found, _Formula) else found)


def from_block_mask(block_mask: BlockMask) -> Mask:
    """The mask of a FlexAttention `BlockMask`: its full blocks whole, its partial blocks through its mask_mod.

    Its blocks are read once; what its mask_mod reads is read at each use (see `from_mask_mod`).  The mask fits the
    lengths of `block_mask` only.  MaskError for another type and, at evaluation, for a sliced BlockMask, which has lost
    its mask_mod.
    """
    if not isinstance(block_mask, BlockMask):
        raise MaskError(f"from_block_mask needs a BlockMask, got {type(block_mask).__name__}")
    partial = _listed(block_mask, block_mask.kv_num_blocks, block_mask.kv_indices)
    full = np.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _listed(block_mask, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    shape = np.broadcast_shapes(partial.shape[:2], full.shape[:2])
    partial, full = (np.broadcast_to(listed, shape + listed.shape[2:]) for listed in (partial, full))
    mask_mod, device = block_mask.mask_mod, str(block_mask.kv_indices.device)

    def entry(b, h):
        partial_blocks, full_blocks = (_exactly(block_mask, listed[b, h]) for listed in (partial, full))
        return full_blocks | (partial_blocks & _MaskModAt(mask_mod, b, h, device))

    entries = [[entry(b, h) for h in range(shape[1])] for b in range(shape[0])]
    blocks = FixedArray(np.stack([partial, full])).key
    text = f"from_block_mask(<BlockMask {tuple(block_mask.shape)} of {_name(mask_mod)}>)"
    about = from_block_mask, device, blocks, tuple(block_mask.BLOCK_SIZE), tuple(block_mask.seq_lengths)
    return _FunctionGrid(entries, text, mask_mod, about)


@contextlib.contextmanager
def _named_failures(mask_mod):
    """A context that turns what a mask_mod raises into a MaskError with its name."""
    try:
        yield
    except Exception as error:
        # A warning that is an error inside of torch arrives as a SystemError without a reason.
        shown = error.__cause__ if isinstance(error, SystemError) and error.__cause__ is not None else error
        why = ASKS_FOR_A_REPORT.split(str(shown))[0]
        raise MaskError(f"mask_mod {_name(mask_mod)} failed: {type(shown).__name__}: {why}") from error


class _Formula(pattern.Pattern):
    """The pattern of a mask_mod's formula; the function's failures are MaskErrors."""

    def __init__(self, mask_mod, formula: pattern.Pattern):
        self.mask_mod, self.formula = mask_mod, formula
        self.elements_at_once = formula.elements_at_once

    def blocks(self, *bounds):
        with _named_failures(self.mask_mod):
            return self.formula.blocks(*bounds)

    def keep(self, i, j):
        with _named_failures(self.mask_mod):
            return self.formula.keep(i, j)

    def bits(self, i, j, stride):
        with _named_failures(self.mask_mod):
            return self.formula.bits(i, j, stride)


class _MaskModPattern(pattern.Opaque):
    """A mask_mod for one batch entry and head."""

    def __init__(self, mask_mod, b, h, device):
        self.mask_mod, self.device = mask_mod, device
        if device != "cpu":
            self.elements_at_once = pattern.ON_DEVICE_AT_ONCE
        self.b, self.h = (torch.tensor(n, device=device) for n in (b, h))

    def keep(self, i, j):
        return self._kept(i, j).cpu().numpy()

    def bits(self, i, j, stride):
        return super().bits(i, j, stride) if self.device == "cpu" else packed(self._kept(i, j))

    def _kept(self, i, j) -> torch.Tensor:
        i, j = torch.from_numpy(i).to(self.device), torch.from_numpy(j).to(self.device)

        def of_rectangle(n, _, row, column):
            return self.mask_mod(self.b, self.h, i[n, row], j[n, column])

        with _named_failures(self.mask_mod):
            kept = create_mask(of_rectangle, len(i), 1, i.shape[1], j.shape[1], device=self.device)
        if kept.dtype != torch.bool:
            raise MaskError(f"mask_mod {_name(self.mask_mod)} must return a boolean, returned {kept.dtype}")
        return kept[:, 0]


class _MaskModAt(Leaf):
    """A mask_mod for one batch entry and head; `device` None stands for that of the tensors it captured."""

    _is_fixed = False

    def __init__(self, mask_mod, b: int, h: int, device: str | None):
        def bind(q_len, kv_len):
            where = device or device_of(mask_mod)
            formula = formula_pattern(mask_mod, b, h, q_len, kv_len, where)
            if formula is None:
                return _MaskModPattern(mask_mod, b, h, where)
            # Patterns of vectors are computed; they join those of other masks (`pattern.union`).
            computed = isinstance(formula, pattern.Offsets | pattern.Rows | pattern.Columns)
            return formula if computed else _Formula(mask_mod, formula)

        arguments = {"mask_mod": mask_mod, "batch": b or None, "heads": h or None, "device": device}
        super().__init__(from_mask_mod, arguments, bind, has_fixed_places=True)  # it is given places, no lengths

    def __reduce__(self):
        raise pickle.PicklingError(f"{self!r} cannot be pickled: what its function reads is not a part of it")

    @property
    def _parts(self):
        mask_mod, *others = self.arguments.values()
        return from_mask_mod, identity_of(mask_mod), tuple(others)


class _FunctionGrid(Grid):
    """A grid of masks of one function; what the function reads is read once for all of them."""

    def __init__(self, entries, text: str, mask_mod, about: tuple):
        super().__init__(entries, text)
        self.mask_mod, self.about = mask_mod, about

    @property
    def _parts(self):
        return self.about, len(self.entries), len(self.entries[0]), identity_of(self.mask_mod)


def _listed(block_mask: BlockMask, counts: torch.Tensor, columns: torch.Tensor) -> np.ndarray:
    """Boolean (batch, heads, block rows, block columns): the blocks that counts and columns list."""
    height, width = block_mask.BLOCK_SIZE
    rows, n_columns = (-(-length // size) for length, size in zip(block_mask.seq_lengths, (height, width), strict=True))
    indices = columns.cpu().numpy()
    indices = indices.reshape((1,) * (4 - indices.ndim) + indices.shape)
    valid = np.arange(indices.shape[-1]) < counts.cpu().numpy().reshape(indices.shape[:-1])[..., None]
    listed = np.zeros((*indices.shape[:2], rows, n_columns), np.bool_)
    b, h, r, k = np.nonzero(valid)
    listed[b, h, r, indices[b, h, r, k]] = True
    return listed


def _exactly(block_mask: BlockMask, cells: np.ndarray) -> Mask:
    """The blocks of one layout, at the lengths of the BlockMask and no others."""
    blocks = block_layout(FixedArray(cells), *block_mask.BLOCK_SIZE)
    lengths = tuple(block_mask.seq_lengths)

    def bind(q_len, kv_len):
        if (q_len, kv_len) != lengths:
            raise MaskError(f"a BlockMask for (q_len, kv_len) = {lengths} does not fit {(q_len, kv_len)}")
        return blocks.bind(q_len, kv_len)

    return Leaf(from_block_mask, {"block_mask": (*blocks.arguments.values(), lengths)}, bind)


def _name(function) -> str:
    return getattr(function, "__name__", type(function).__name__)
