"""The engine of a model whose sequence ranks share."""

import dataclasses

import torch
import torch.distributed as dist

from stof_tvm.engine import Engine
from stof_tvm.frontend.packing.batched import Batched
from stof_tvm.frontend.packing.dims import TOKEN
from stof_tvm.frontend.packing.program import OF_TOKENS, SHARED, Output, PackedProgram
from stof_tvm.frontend.packing.rewriter import PLACE
from stof_tvm.parallel.context.plan import ContextPlan
from stof_tvm.parallel.context.site_attentions import SiteAttentions
from stof_tvm.parallel.ranks import Peers
from stof_tvm.report import Report, Verification
from stof_tvm.running.states import Store
from stof_tvm.signature import wrong_tensor
from tir_kernels.errors import InputError, UnsupportedError


class ContextEngine(Engine):
    """A model whose sequence ranks share.  `build` returns one with `context_parallel`.

    Every rank calls it as the model is called, with the same whole inputs, of the example's shapes.  Each rank computes
    its own tokens, and receives from others the keys and values that its rows keep.

    Attributes
    ----------
    gather_outputs : bool
        True: every rank gets the whole outputs.  False: those of its own tokens, in the order of `plan.tokens(rank)`;
        nothing is sent but keys and values.
    plan : ContextPlan
        Who has which tokens.
    """

    def __init__(
        self,
        row: Engine,
        batched: Batched,
        packed: PackedProgram,
        attentions: SiteAttentions,
        peers: Peers,
    ):
        self._row, self._batched, self._packed, self._attentions = row, batched, packed, attentions
        self._ranks = self._peers = peers
        self._device_type, self._index = row.device.type, row.device.index or 0
        self._verification: Verification | None = None
        self._gather_outputs = True
        self._store = Store()
        roles, nodes = batched.roles(), batched.placeholders()
        self._values = {spec.name: nodes[spec.name].meta["val"] for spec in self.signature.inputs}
        self._of_tokens = {
            name for name, x in self._values.items() if any(roles.get(str(n)) == TOKEN for n in x.shape[1:2])
        }
        self._tokens = self.plan.tokens(peers.rank)
        self._counts = [len(self.plan.positions(rank)) for rank in range(peers.count)]
        self._places = self._tokens.repeat(attentions.batch).to(self.device)

    def __call__(self, *args, **kwargs):
        """Run the model on whole inputs, the same on every rank; all ranks call it together.

        `args` and `kwargs` are those of the model: tensors (batch, length, …) on the engine's device, of the example's
        sizes.

        Raises
        ------
        InputError
            Inputs that do not fit.
        ParallelError
            A rank is gone, or failed in its first call.
        """
        with self._ranks.in_step():
            return self.run(self.signature.arguments(args, kwargs))

    def run(self, values: list):
        """A call whose inputs are already in a list, `values`.  Returns and raises what a call does."""
        with self._ranks.in_step():
            return self._results(values)

    def _results(self, values: list):
        named = dict(zip(self._values, values, strict=True))
        given = [self._places if name == PLACE else self._own(name, named[name]) for name in self._packed.inputs]
        self.prepare()
        results = self._row.run(given)
        results = [results] if isinstance(results, torch.Tensor) else results
        with torch.no_grad():
            outputs = [self._output(*pair) for pair in zip(results, self._packed.outputs, strict=True)]
        return self.signature.unflatten(outputs)

    def _own(self, name: str, value) -> torch.Tensor:
        """The rank's part of an input, as the row's program takes it."""
        example, batch = self._values[name], self._attentions.batch
        of_tokens = name in self._of_tokens
        leading = (batch, self.plan.length) if of_tokens else (batch,)
        shape = (*leading, *example.shape[len(leading) :])
        if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape or value.dtype != example.dtype:
            raise wrong_tensor(name, str(example.dtype).removeprefix("torch."), shape, value)
        if value.device != self.device:
            raise InputError(
                f"{name} is on {value.device}; the engine of rank {self._ranks.rank} runs on {self.device}"
            )
        value = value.detach()
        return self.plan.shard(value, self._ranks.rank, 1).flatten(0, 1)[None] if of_tokens else value

    def _output(self, x: torch.Tensor, output: Output) -> torch.Tensor:
        """A result of the row's program as the model's, or as the rank's part of it."""
        batch = self._attentions.batch
        if output.kind == SHARED:
            return x.expand(*x.shape[: output.batch], batch, *x.shape[output.batch + 1 :]).clone()
        if output.kind != OF_TOKENS:
            return x
        token, is_joined = output.token, output.token == output.batch
        if not is_joined:
            x = x.squeeze(output.batch)
            token -= output.batch < token
        x = x.movedim(token, 0).unflatten(0, (batch, -1)).transpose(0, 1)  # (tokens of the rank, batch, …)
        if self._gather_outputs:
            x = self._gathered(x)
        x = x.transpose(0, 1)
        if is_joined:
            return x.flatten(0, 1).movedim(0, output.batch)
        return x.movedim((0, 1), (output.batch, output.token)).contiguous()

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """(length, …) of all ranks' (tokens, …)."""
        own = x.new_empty((max(self._counts), *x.shape[1:]))
        own[: len(x)] = x
        parts = [torch.empty_like(own) for _ in self._counts]
        # As bytes, for gloo moves no bfloat16.
        raw, group = [part.view(-1).view(torch.uint8) for part in parts], self._ranks.group
        self._ranks.collective(
            "the exchange of outputs",
            own.device.type == "cpu",
            lambda async_op: dist.all_gather(raw, own.view(-1).view(torch.uint8), group=group, async_op=async_op),
        )
        return self.plan.unshard([part[:count] for part, count in zip(parts, self._counts)], 0)

    # -- what a caller may set and see --------------------------------------------------------------------------------

    @property
    def signature(self):
        """The signature of the model's calls; its shapes are not to be used."""
        return self._batched.signature

    @property
    def plan(self) -> ContextPlan:
        """Who has which tokens."""
        return self._attentions.plan

    @property
    def gather_outputs(self) -> bool:
        """Whether every rank gets the whole outputs."""
        return self._gather_outputs

    @gather_outputs.setter
    def gather_outputs(self, is_on: bool) -> None:
        self._gather_outputs = bool(is_on)

    def report(self) -> Report:
        """The report of the rank's program, with what is said of the sequence in its notes."""
        report, sites = self._row.report(), tuple(self._attentions.sites.values())
        verification = self._verification or report.verification
        notes = (*report.notes, self._note())
        return dataclasses.replace(report, sites=sites, notes=notes, verification=verification)

    def _note(self) -> str:
        plan, few, many, sites = self.plan, min(self._counts), max(self._counts), self._attentions.sites
        tokens = str(few) if few == many else f"{few} to {many}"
        return (
            f"context parallel on {plan.ranks} ranks: {plan.length} tokens of {self._attentions.batch} sequence(s), "
            f"{tokens} a rank ({plan.way}, {plan.imbalance:.1%} off balance); {len(sites)} attention(s) exchange keys, "
            "all other operators compute each token by itself"
        )

    def set_verification(self, verification: Verification) -> None:
        """Set the `verification` in the report.  Raises nothing."""
        self._verification = verification

    def __repr__(self) -> str:
        where = f"rank {self._ranks.rank} of {self._ranks.count}, on {self.device}"
        return f"ContextEngine({', '.join(self._values)}; {self.plan.length} tokens; {where})"

    def prepare(self):
        """Load the rank's program now instead of at the first call; DeviceError without the device."""
        program = self._row.prepare()
        self._ranks.end_with(program)
        return program

    def cuda_source(self) -> str:
        """The CUDA C++ of the rank's program, without its attentions; CompileError where there is none."""
        return self._row.cuda_source()

    def found_blocks(self) -> dict:
        """Empty: rules of `masks.runtime` are refused."""
        return {}

    @property
    def state(self):
        """Empty: a model with states is refused."""
        return self._row.state

    def reset_state(self) -> None:
        """Nothing to do."""

    @property
    def reuse_outputs(self):
        """False: every call returns new tensors; UnsupportedError where it is set."""
        return False

    @reuse_outputs.setter
    def reuse_outputs(self, _is_on) -> None:
        raise self._has_no("reuse_outputs")

    @property
    def inputs_in_place(self):
        """None; UnsupportedError where it is set."""
        return ()

    @inputs_in_place.setter
    def inputs_in_place(self, _numbers) -> None:
        raise self._has_no("inputs_in_place")

    def share_state(self, other: Engine) -> None:
        """Refused, as neither has states to share with `other`: UnsupportedError."""
        raise self._has_no("share_state(other)")

    def with_mask(self, mask) -> Engine:
        """Refused, as tokens are shared out by the mask of the build and not by `mask`: UnsupportedError."""
        raise self._has_no("with_mask(mask)")

    def _has_no(self, name: str) -> UnsupportedError:
        return UnsupportedError(
            f"an engine whose sequence ranks share has no {name}: build it without context_parallel"
        )
