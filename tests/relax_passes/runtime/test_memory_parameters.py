"""What "main" allocates becomes its parameters: structure, and the same numbers in memory that was full of NaNs."""

import json

import pytest
import torch
import tvm
from torch.utils import _pytree as pytree
from tvm import relax

from relax_passes.pipeline import run_pipeline
from relax_passes.runtime.memory_parameters import MEMORY, MemoryParameters
from stof_tvm.frontend import import_model
from stof_tvm.site_masks import SiteMasks
from tests.models.families import example_calls
from tests.models.quick_llvm import QUICK_LLVM as LLVM
from tests.models.quick_llvm import run_linked


def allocations(mod) -> list[str]:
    values = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    names = [v.op.name for v in values if isinstance(v, relax.Call) and isinstance(v.op, tvm.ir.Op)]
    return [name for name in names if "alloc" in name or "kill" in name]


@pytest.mark.parametrize("family", ["bert", "t5"])
def test_a_model_runs_in_the_callers_memory(family):
    model, inputs = example_calls()[family]
    torch.manual_seed(0)
    model = model().eval()
    imported = import_model(model, inputs)
    before = run_pipeline(imported.mod, LLVM, SiteMasks(None), until="plan_memory")
    after = MemoryParameters()(before)
    sizes = json.loads(str(after.attrs[MEMORY]))
    n_inputs = len(before["main"].params)
    assert "relax.memory.alloc_storage" in allocations(before) and allocations(after) == []
    assert [int(p.ty.shape[0]) for p in after["main"].params[n_inputs:]] == sizes

    with LLVM:
        lowered = run_pipeline(after, LLVM, SiteMasks(None), after="plan_memory")
        library = relax.build(lowered, LLVM, relax_pipeline=None)
    memory = [torch.full((size,), 255, dtype=torch.uint8) for size in sizes]
    outputs = run_linked(library)["main"](*imported.signature.flatten(inputs, {}), *memory)
    with torch.no_grad():
        expected = pytree.tree_leaves(model(*inputs))
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    blocks = {block.data_ptr() for block in memory}
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, wanted, atol=1e-5, rtol=1e-5)
        assert output.data_ptr() in blocks
    assert len({output.data_ptr() for output in outputs}) == len(outputs), "outputs overlap"
