"""Engines that generate: one for each length that prompts are padded to, one for tokens, over one cache."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import cast

import torch

from stof_tvm.engine import Engine
from stof_tvm.generation.buckets import bucket_of
from stof_tvm.generation.choosing.ahead import Ahead
from stof_tvm.generation.choosing.loop import generated
from stof_tvm.generation.decoder import Decoder
from stof_tvm.generation.parts import in_parts
from stof_tvm.generation.prompts import checked_ids, from_zero
from stof_tvm.generation.proof import STEPS, prove
from stof_tvm.range_engine import RangeEngine
from stof_tvm.report import RangeReport
from tir_kernels.errors import DeviceError, InputError, UnsupportedError


@dataclass(frozen=True)
class Sizes:
    """What the engines of a Generator were made for.

    Attributes
    ----------
    max_length : int
        Tokens of a prompt and of what is generated, together.
    batch : int
        Sequences.
    vocabulary : int
        Tokens that the model knows.
    buckets : tuple of int
        Lengths that prompts are padded to, in order.
    is_of_one_length : bool
        Whether the prompts of a batch must have as many tokens as each other.
    most_tokens : int or None
        Of the prompts that are computed at once; those of more sequences follow.  None where all are computed at once.
    """

    max_length: int
    batch: int
    vocabulary: int
    buckets: tuple[int, ...]
    is_of_one_length: bool
    most_tokens: int | None = None

    def part_of(self, room: int) -> int:
        """How many sequences' prompts, padded to `room` tokens, are computed at once, 1 to `batch`.  Raises nothing."""
        return self.batch if self.most_tokens is None else max(1, min(self.batch, self.most_tokens // room))

    @property
    def has_parts(self) -> bool:
        """Whether there are prompts of which not all are computed at once."""
        return any(self.part_of(room) < self.batch for room in self.buckets)


class Generator:
    """Engines of a causal language model: `stof_tvm.generation.engines` makes it.

    An engine for prompts reads all of them at once, or as many as `sizes.part_of` says, and then the next ones; the
    engine for tokens computes one for each sequence, and reads from the device which position it is at.  Their caches
    are the same tensors, and weights of equal content are held once.  Engines for prompts are built at the first prompt
    of their length, unless `engines` was asked to.  Threads may share a Generator: their calls of `generate` follow one
    another.

    Attributes
    ----------
    sizes : Sizes
    device : torch.device
        Where ids must be and tokens are.
    runs_beside : bool
        Whether engines run beside the host, which may wait for them.
    """

    def __init__(
        self,
        engines: RangeEngine,
        sizes: Sizes,
        compares: bool = True,
        prepared: Iterable[int] = (),
    ):
        self._engines = engines  # of a Decoder
        decoder = cast(Decoder, engines.copied_model)
        self._model, self._has_windows = decoder.model, any(n is not None for n in decoder.windows)
        self._compares = compares  # new engines with the model
        self._prompts: dict[int, Engine] = {}
        self._filled = 0  # tokens of the longest sequence
        self.sizes = sizes
        one = torch.ones(sizes.batch, dtype=torch.int64)
        self._step = engines.engine_for(one[:, None], one, one[:1])
        self._step.reuse_outputs = True
        self.device = self._step.device
        self.runs_beside = self.device.type == "cuda"
        self._lock = threading.Lock()
        self._turn_of: int | None = None  # the thread that has it
        for length in prepared:
            self._prompt_engine(length)

    def __repr__(self) -> str:
        s = self.sizes
        return f"Generator({s.batch} sequences of up to {s.max_length} tokens; on {self.device})"

    def generate(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None, **options) -> torch.Tensor:
        """Prompts and what follows them; see `stof_tvm.generate`.

        Parameters
        ----------
        ids : torch.Tensor
            int64 (batch, tokens).
        attention_mask : torch.Tensor, optional
            (batch, tokens), 0 at padding, which is on the left.
        **options
            Those of transformers' `generate`.

        Raises
        ------
        InputError
            Ids that do not fit, prompt and new tokens that are more than `sizes.max_length`.
        """
        checked_ids(ids, self.sizes.vocabulary, self.device)
        arguments = ids, attention_mask, self._model.generation_config, self.sizes.vocabulary
        if not self._may_begin(ids):
            return generated(*arguments, self.checked, options)
        with self.turn():
            ahead = Ahead(self, ids, attention_mask)
            try:
                return generated(*arguments, ahead.checked, options)
            finally:
                ahead.end()

    def _may_begin(self, ids: torch.Tensor) -> bool:
        """Whether a prompt can be computed before anything else is known of a call; on a CPU that gains nothing."""
        batch, tokens = ids.shape
        fits = batch == self.sizes.batch and tokens < self.sizes.max_length
        return fits and self.runs_beside and bucket_of(tokens, self.sizes.buckets) in self._prompts

    def checked(self, batch: int, length: int) -> "Generator":
        """This Generator; InputError where it does not hold `batch` sequences of `length` tokens."""
        if batch != self.sizes.batch:
            raise InputError(f"the engines are for {self.sizes.batch} sequences, and there are {batch}")
        if length > self.sizes.max_length:
            raise InputError(
                f"prompt and new tokens are {length}, and the engines hold max_length={self.sizes.max_length}"
            )
        return self

    def prompt(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Begin anew with prompts: logits (batch, vocabulary), of the model's dtype, of the tokens after them.

        They hold until the next call.  `ids` and `attention_mask` are those of `generate`.  Raises InputError for ids
        that do not fit, DeviceError without the device.
        """
        return self.begin(*self.placed(checked_ids(ids, self.sizes.vocabulary, self.device), attention_mask))

    def placed(self, ids: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Prompts from position 0 on, int64 (batch, tokens), and int64 (batch,): how many tokens each has.

        The longest has as many as there are columns.

        Parameters
        ----------
        ids : torch.Tensor
            int64 (batch, tokens).
        attention_mask : torch.Tensor or None
            (batch, tokens), 0 at padding, which is on the left.

        Raises
        ------
        InputError
            A mask that does not fit.
        """
        ids, lengths = from_zero(ids, attention_mask)
        if attention_mask is None:
            return ids, lengths
        if self.sizes.is_of_one_length and bool((lengths != lengths[0]).any()):
            found = sorted(set(lengths.tolist()))
            raise InputError(f"with a mask, the prompts of a batch must have one length, and there are {found}")
        return ids[:, : int(lengths.max())], lengths

    def begin(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """As `prompt`, but of what `placed` gives; waits for no GPU.

        Parameters
        ----------
        ids : torch.Tensor
            int64 (batch, tokens): sequences from position 0 on.
        lengths : torch.Tensor
            int64 (batch,): how many tokens each has, the longest as many as there are columns: rows of a window are
            counted from there.

        Raises
        ------
        DeviceError
            There is no such device.
        """
        count = ids.shape[1]
        self._filled = count
        padded = ids.new_zeros(len(ids), bucket_of(count, self.sizes.buckets))
        padded[:, :count] = ids
        return self._in_parts(self._prompt_engine(count), padded, lengths)

    def _in_parts(self, call: Callable, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """What `call(ids, lengths, first)` computes of all sequences' prompts, or of a token of each."""
        tokens = ids.shape[1]
        return in_parts(call, ids, lengths, self.sizes.batch if tokens == 1 else self.sizes.part_of(tokens))

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append `tokens`, int64 (batch, 1): logits (batch, vocabulary) of the next, as those of `prompt`.

        Tokens are not compared with the vocabulary, which would wait for a GPU: one outside of it makes NaN.  Raises
        InputError for another dtype or shape, before the first prompt, and where the longest sequence has
        `sizes.max_length` tokens already; DeviceError without the device.
        """
        self._check_step(tokens)
        if self._filled >= self.sizes.max_length:
            raise InputError(f"the engines hold max_length={self.sizes.max_length} tokens, and there are as many")
        self._filled += 1
        self._step_inputs[0].copy_(tokens)
        return self._step.run(self._step_inputs)

    def take_back(self) -> None:
        """Forget the last step: the next one takes its place.  Only after a step.  Raises nothing."""
        self._filled -= 1
        self._step.add_to_state("positions", -1)

    def _check_step(self, tokens: torch.Tensor) -> None:
        """InputError for what is no token for each sequence: copied into the inputs, it would be cast and broadcast."""
        if self._filled == 0:
            raise InputError("a text begins with its prompt: call prompt(ids) before step(tokens)")
        shape = (self.sizes.batch, 1)
        if not isinstance(tokens, torch.Tensor) or tokens.dtype != torch.int64 or tokens.shape != shape:
            is_tensor = isinstance(tokens, torch.Tensor)
            found = f"{tokens.dtype} {tuple(tokens.shape)}" if is_tensor else type(tokens).__name__
            raise InputError(
                f"tokens must be an int64 tensor of shape {shape}, as logits.argmax(-1, keepdim=True) is, got {found}"
            )

    @functools.cached_property
    def _step_inputs(self) -> list[torch.Tensor]:
        """The tokens last chosen, and what a step does not read, lengths and a number; always the same tensors."""
        tokens = torch.zeros(self.sizes.batch, 1, dtype=torch.int64, device=self.device)
        return [tokens, torch.ones_like(tokens[:, 0]), torch.zeros_like(tokens[0])]

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """A context for a text, from its prompt to its last token: other threads wait.

        Raises InputError in a turn of the same thread, as `generate` does there: both texts would be in one cache.
        """
        if self._turn_of == threading.get_ident():
            raise InputError(
                "this thread has a turn of the Generator already: call generate, and begin another turn, outside of "
                "`with generator.turn():`, and not in a streamer"
            )
        with self._lock:
            self._turn_of = threading.get_ident()
            try:
                yield
            finally:
                self._turn_of = None

    def report(self) -> RangeReport:
        """The reports of the engines so far: of tokens, and of each length of prompts."""
        return self._engines.report()

    def save(self, path) -> None:
        """Refused, because a file at `path` would hold no model to build engines of: UnsupportedError."""
        raise UnsupportedError(
            f"a Generator cannot be saved as {path}: it builds engines of its model as prompts come. "
            "stof_tvm.generation.engines makes it again; engines of a module that keeps its cache in buffers can be "
            "saved (docs/states.md)"
        )

    def _prompt_engine(self, length: int) -> Engine:
        """The engine for prompts of `length` tokens, built if there is none."""
        room = bucket_of(length, self.sizes.buckets)
        if room not in self._prompts:
            # The build compares on them: of equal tokens all values are alike, and a wrong mask would not be seen.
            numbers = torch.Generator().manual_seed(room)
            part = self.sizes.part_of(room)
            ids = torch.randint(self.sizes.vocabulary, (part, room), generator=numbers)
            first = torch.tensor([self.sizes.batch - part])
            engine = self._engines.engine_for(ids, torch.full((part,), room), first)
            engine.reuse_outputs = True
            if self._compares:
                with contextlib.suppress(DeviceError):  # they are for another machine
                    engine.prepare()
                    # Steps after longer prompts read what their engines wrote: not all, where layers have windows.
                    steps = STEPS if not self._prompts or self._has_windows else 0
                    prove(self._on_device, self._model, self.sizes, room, steps)
            self._prompts[room] = engine
        return self._prompts[room]

    def _on_device(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self._in_parts(self._engines, ids.to(self.device), lengths.to(self.device))
