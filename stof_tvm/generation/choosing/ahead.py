"""A prompt that is computed while the host finds out what a call of `generate` asks for."""

import contextlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from stof_tvm.generation.generator import Generator


class Ahead:
    """A Generator in its turn that has begun with a prompt: to whom asks for that prompt, it gives what it has.

    transformers reads options, compares them and looks at the prompt for milliseconds before it asks for the first
    logits.  On a GPU the engine runs meanwhile, on a stream of its own, since what transformers looks at is waited for.

    Parameters
    ----------
    generator : Generator
        In a turn of this thread.
    ids, attention_mask : torch.Tensor
        As `Generator.generate` takes them; checked.

    Attributes
    ----------
    runs_beside : bool
        That of the Generator.
    """

    def __init__(self, generator: "Generator", ids: torch.Tensor, attention_mask: torch.Tensor | None):
        self._generator = generator
        self.runs_beside = generator.runs_beside
        self._stream = torch.cuda.Stream(generator.device) if generator.device.type == "cuda" else None
        self._begun: tuple[torch.Tensor, ...] | None = generator.placed(ids, attention_mask)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(generator.device))
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._logits = generator.begin(*self._begun)

    def checked(self, batch: int, length: int) -> "Ahead":
        """As `Generator.checked`."""
        self._generator.checked(batch, length)
        return self

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """As `Generator.turn`, which it is in."""
        return contextlib.nullcontext()

    def prompt(self, ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        """As `Generator.prompt`: of the prompt that it has begun with, or of another one.

        transformers takes tokens of padding for padding where no mask is given.
        """
        begun, self._begun = self._begun, None
        if begun is not None:
            asked = self._generator.placed(ids, attention_mask)
            is_same = all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(begun, asked, strict=True))
            self.end()
            if is_same:
                self._keep_for_caller()
                return self._logits
        return self._generator.prompt(ids, attention_mask)

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        """As `Generator.step`."""
        return self._generator.step(tokens)

    def take_back(self) -> None:
        """As `Generator.take_back`."""
        self._generator.take_back()

    def _keep_for_caller(self) -> None:
        """Let memory of the logits, which may be of the stream they were computed on, be used by the caller's."""
        if self._stream is not None:
            self._logits.record_stream(torch.cuda.current_stream(self._generator.device))

    def end(self) -> None:
        """Let the caller's stream wait for the prompt, which reads memory of that stream.  Raises nothing."""
        if self._stream is not None:
            torch.cuda.current_stream(self._generator.device).wait_stream(self._stream)
