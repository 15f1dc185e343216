"""Every Relax pass of these tests runs under a check that its input and output are well formed."""

import functools
from dataclasses import dataclass, replace

import pytest
import torch
import tvm
from torch.utils import _pytree as pytree
from tvm.relax.ir.instrument import WellFormedInstrument

from relax_passes.attention.canonicalize_attention import CanonicalizeAttention
from relax_passes.attention.composite import AttentionCall, match_attention
from relax_passes.attention.fold_masks import FoldMasks
from relax_passes.attention.layouts.upright_scores import UprightScores
from stof_tvm.frontend import ImportedModel, import_model
from tests.models.running import compile_imported
from tests.relax_passes.attention.spelled import AllSpellings, inputs


@tvm.instrument.pass_instrument
class WellFormed(WellFormedInstrument):
    """Skips a module whose functions are the very ones that it has just checked: what a pass returned is the input of
    the next, and most passes within passes change nothing.

    Functions that are kept here are not changed: whoever changes one that is shared makes a new one.
    """

    checked = ()

    def _check(self, mod, pass_name, name_prefix):
        if pass_name in self.skip_pass_name:
            return
        functions = tuple(mod.functions_items())
        same = len(functions) == len(self.checked) and all(
            x.same_as(y) and f.same_as(g) for (x, f), (y, g) in zip(functions, self.checked)
        )
        if not same:
            super()._check(mod, pass_name, name_prefix)
            self.checked = functions


@pytest.fixture(autouse=True)
def well_formed():
    with tvm.transform.PassContext(instruments=[WellFormed()]):
        yield


@dataclass(frozen=True)
class Compiled:
    """A torch model after some passes, its attention calls by site, and what both compute, once it is asked for."""

    imported: ImportedModel
    calls: dict[str, AttentionCall]
    model: torch.nn.Module
    args: tuple
    kwargs: dict

    @property
    def mod(self) -> tvm.IRModule:
        return self.imported.mod

    @functools.cached_property
    def outputs(self) -> list[torch.Tensor]:
        return pytree.tree_leaves(compile_imported(self.imported)(*self.args, **self.kwargs))

    @functools.cached_property
    def expected(self) -> list[torch.Tensor]:
        with torch.no_grad():
            return pytree.tree_leaves(self.model.eval()(*self.args, **self.kwargs))

    def error(self, index: int) -> float:
        """Largest difference to PyTorch of one output."""
        return float((self.outputs[index] - self.expected[index]).abs().max())


@pytest.fixture(scope="session")
def compile_model():
    """A function from a torch model, its inputs and passes to what they make of it."""

    def run(model, args=(), kwargs=None, passes=None) -> Compiled:
        kwargs = kwargs or {}
        passes = passes or [UprightScores(), CanonicalizeAttention(), FoldMasks()]
        with tvm.transform.PassContext(instruments=[WellFormed()]):
            imported = import_model(model, args, kwargs)
            mod = tvm.transform.Sequential(passes)(imported.mod)
        return Compiled(replace(imported, mod=mod), attention_calls(mod), model, args, kwargs)

    return run


def attention_calls(mod: tvm.IRModule) -> dict[str, AttentionCall]:
    """The composite calls of main, by site."""
    values = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    calls = [call for value in values if (call := match_attention(mod, value)) is not None]
    assert len({call.site for call in calls}) == len(calls)
    return {call.site: call for call in calls}


@pytest.fixture(scope="session")
def canonical_spellings(compile_model) -> Compiled:
    """The whole table of spellings after CanonicalizeAttention."""
    return compile_model(AllSpellings(), inputs(), passes=[CanonicalizeAttention()])


@pytest.fixture(scope="session")
def folded_spellings(compile_model) -> Compiled:
    """The same after FoldMasks."""
    return compile_model(AllSpellings(), inputs())
