"""Every Relax pass of these tests runs under a check that its input and output are well formed."""

from dataclasses import dataclass, replace

import pytest
import torch
import tvm
from torch.utils import _pytree as pytree
from tvm.relax.ir.instrument import WellFormedInstrument

from relax_passes.attention_composite import AttentionCall, match_attention
from relax_passes.canonicalize_attention import CanonicalizeAttention
from relax_passes.fold_masks import FoldMasks
from stof_tvm.frontend import import_model
from tests.models.running import compile_imported
from tests.relax_passes.attention_spellings import AllSpellings, inputs


@pytest.fixture(autouse=True)
def well_formed():
    with tvm.transform.PassContext(instruments=[WellFormedInstrument()]):
        yield


@dataclass(frozen=True)
class Compiled:
    """A torch model after some passes, its attention calls by site, and what both compute."""

    mod: tvm.IRModule
    calls: dict[str, AttentionCall]
    outputs: list[torch.Tensor]
    expected: list[torch.Tensor]

    def error(self, index: int) -> float:
        """Largest difference to PyTorch of one output."""
        return float((self.outputs[index] - self.expected[index]).abs().max())


@pytest.fixture(scope="session")
def compile_model():
    """A function from a torch model, its inputs and passes to what they make of it."""

    def run(model, args=(), kwargs=None, passes=None) -> Compiled:
        kwargs = kwargs or {}
        passes = passes or [CanonicalizeAttention(), FoldMasks()]
        with tvm.transform.PassContext(instruments=[WellFormedInstrument()]):
            imported = import_model(model, args, kwargs)
            mod = tvm.transform.Sequential(passes)(imported.mod)
        with torch.no_grad():
            expected = model.eval()(*args, **kwargs)
        outputs = compile_imported(replace(imported, mod=mod))(*args, **kwargs)
        return Compiled(mod, attention_calls(mod), pytree.tree_leaves(outputs), pytree.tree_leaves(expected))

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
