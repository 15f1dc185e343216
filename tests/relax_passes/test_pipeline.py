"""The phases together: what one layer of a model becomes on a GPU."""

import json
from collections import Counter

import pytest
import torch
import tvm
from tvm import relax

from relax_passes.fusion.partition_segments import SEGMENTS
from relax_passes.pipeline import PHASES, run_pipeline
from stof_tvm import masks
from stof_tvm.frontend import import_model
from stof_tvm.site_masks import SiteMasks
from tests.models.families import BertLike
from tir_kernels.errors import InputError
from tir_kernels.target import parse_target


def lowered(model, inputs, target):
    """The module whose reshapes are views, and what it calls: kernels without views."""
    mod = import_model(model, inputs).mod
    mod = run_pipeline(mod, target, SiteMasks(masks.sliding_window(16)), until="rewrite_reshapes")
    values = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    calls = [v for v in values if isinstance(v, relax.Call) and v.op == tvm.ir.Op.get("relax.call_tir")]
    return mod, [call.args[0].name_hint for call in calls]


@pytest.fixture
def linear():
    return import_model(torch.nn.Linear(8, 8), (torch.zeros(2, 8),)).mod


def test_a_part_of_the_phases_runs_by_name(linear, tmp_path, monkeypatch):
    """Whole and in two parts it is the same; every part tells its phases, and dumps them under their numbers."""
    target, masked, names = parse_target("llvm"), SiteMasks(None), list(PHASES)
    whole = run_pipeline(linear, target, masked)
    monkeypatch.setenv("STOF_DUMP_DIR", str(tmp_path))
    told = []
    first = run_pipeline(linear, target, masked, progress=told.append, until="partition_segments")
    assert told == names[: names.index("partition_segments") + 1]
    dumps = sorted(path.name for path in tmp_path.iterdir())
    assert dumps == [f"{number:02d}_{name}.py" for number, name in enumerate(told)]
    second = run_pipeline(first, target, masked, progress=told.append, after="partition_segments")
    assert told == names and len(list(tmp_path.iterdir())) == len(names)
    tvm.ir.assert_structural_equal(second, whole, map_free_vars=True)


@pytest.mark.parametrize(
    "cut, said",
    [
        ({"until": "fuse"}, "'fuse' is no phase: they are canonicalize_attention, fold_masks, "),
        ({"after": "fuse"}, "'fuse' is no phase"),
        ({"after": "lower_runtime"}, "there is no phase after 'lower_runtime'"),
        ({"after": "fold_masks", "until": "fold_masks"}, "there is no phase after 'fold_masks' until 'fold_masks'"),
    ],
)
def test_a_cut_that_names_no_phases(linear, cut, said):
    with pytest.raises(InputError, match=said):
        run_pipeline(linear, parse_target("llvm"), SiteMasks(None), **cut)


def test_code_is_generated_only_for_what_is_called():
    """A reshape costs nothing at run time, so its PrimFunc must not be there either."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    imported = import_model(layer, (torch.randn(1, 16, 16),))
    mod = run_pipeline(imported.mod, parse_target("llvm"), SiteMasks(masks.sliding_window(4)))
    called = set()

    def visit(expr):
        if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.GlobalVar):
            called.add(expr.op.name_hint)

    relax.analysis.post_order_visit(mod["main"], visit)
    kernels = {name.name_hint for name, f in mod.functions_items() if isinstance(f, tvm.tirx.PrimFunc)}
    assert called >= kernels > set(), kernels - called


class Adapter(torch.nn.Module):
    """x + up(relu(down(x)))."""

    def __init__(self, width, inner):
        super().__init__()
        self.down, self.up = torch.nn.Linear(width, inner), torch.nn.Linear(inner, width)

    def forward(self, x):
        return x + self.up(torch.relu(self.down(x)))


@pytest.mark.parametrize("inner, expected", [(64, ["fused_mlp"]), (1024, ["fused_gemm", "fused_gemm1"])])
def test_an_adapter_is_one_kernel_on_a_gpu_where_it_is_narrow(inner, expected):
    model = Adapter(768, inner).eval().half()
    mod, kernels = lowered(model, (torch.zeros(2, 128, 768).half(),), parse_target("cuda -arch=sm_80"))
    assert kernels == expected
    (row, *others) = json.loads(str(mod.attrs[SEGMENTS]))
    assert row["kernel"] == kernels[0].removeprefix("fused_") and bool(others) == (len(kernels) > 1)


@pytest.mark.slow
@pytest.mark.parametrize("arch, most", [("sm_80", 7), ("sm_90a", 5)])
def test_kernels_of_a_bert_layer_on_a_gpu(arch, most):
    """BERT-base at (1, 128): each layer more adds a packed projection, attention, three fused products and two norms.

    On sm_90a the products take the norms over; on sm_80 they would take longer than with kernels of their own.
    """
    target = parse_target(f"cuda -arch={arch}")
    ids = torch.zeros(1, 128, dtype=torch.int64)
    counts = {}
    for layers in (1, 2):
        torch.manual_seed(0)
        model = BertLike(dim=768, heads=12, layers=layers, length=128).eval().half()
        mod, kernels = lowered(model, (ids,), target)
        counts[layers] = len(kernels)
    assert counts[2] - counts[1] == most
    rows = json.loads(str(mod.attrs[SEGMENTS]))
    of_layers = [row for row in rows if "matmul" in row["operators"]]
    assert all(row["kernel"] != "default" for row in of_layers), Counter(row["reason"] for row in of_layers)


class GatedHalves(torch.nn.Module):
    """One product, cut into a gate and what it gates."""

    def __init__(self):
        super().__init__()
        self.wide, self.down = torch.nn.Linear(32, 128, bias=False), torch.nn.Linear(64, 32, bias=False)

    def forward(self, x):
        gate, value = self.wide(x).chunk(2, -1)
        return self.down(torch.nn.functional.silu(gate) * value)


def test_halves_of_one_product_are_its_epilogue():
    """Two kernels are called, and nothing is left of which a kernel of TVM's own would be made."""
    torch.manual_seed(0)
    imported = import_model(GatedHalves().half().eval(), (torch.randn(2, 24, 32).half(),))
    target = parse_target("cuda -arch=sm_90a")
    mod = run_pipeline(imported.mod, target, SiteMasks(None), until="lower_segments")
    rows = json.loads(str(mod.attrs[SEGMENTS]))
    assert [row["kernel"] for row in rows if "silu" in row["operators"]] == ["gemm"]
    values = [binding.value for block in mod["main"].body.blocks for binding in block.bindings]
    operators = [v.op.name for v in values if isinstance(v, relax.Call) and isinstance(v.op, tvm.ir.Op)]
    assert operators.count("relax.call_tir") == len(rows) == 2
    assert set(operators) <= {"relax.call_tir", "relax.reshape"}
