"""`build` end to end: numbers against PyTorch, the report, calling conventions, errors."""

import copy
import pickle
import traceback

import pytest
import torch
import torch.nn.functional as F

import stof_tvm
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme
from relax_passes.pipeline import PHASES
from stof_tvm import masks
from stof_tvm.errors import (
    CompileError,
    DeviceError,
    ExportError,
    InputError,
    MaskError,
    NotRewrittenError,
    SchemeError,
    StofError,
    TargetError,
    UnsupportedError,
)
from tests.models.quick_llvm import QUICK_LLVM
from tir_kernels.target import parse_target

WIDTH, HEADS, LENGTH = 32, 2, 40


class Attention(torch.nn.Module):
    """Self-attention by SDPA; `keep` is the model's own mask, a buffer."""

    def __init__(self, keep=None, causal=False, width=WIDTH):
        super().__init__()
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.causal = causal
        self.register_buffer("keep", keep, persistent=False)

    def forward(self, x, padding=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        keep = self.keep if padding is None else padding[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, is_causal=self.causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Encoder(torch.nn.Module):
    """Layers with the paths layers.0.attention, layers.1.attention; returns a dict."""

    def __init__(self, keeps=(None, None), causal=False):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({"attention": Attention(keep, causal), "norm": torch.nn.LayerNorm(WIDTH)})
            for keep in keeps
        )

    def forward(self, x, scale: float = 1.0):
        for layer in self.layers:
            x = layer["norm"](x + layer["attention"](x))
        return {"hidden": x * scale, "first": x[:, 0]}


@pytest.fixture(scope="module")
def x():
    return torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Encoder().eval()


@pytest.fixture(scope="module")
def engine(model, x):
    return stof_tvm.build(model, "llvm", (x,), mask=masks.sliding_window(4))


def masked(model, mask_by_layer):
    """The same weights with dense masks in the layers' own buffers."""
    dense = [None if mask is None else mask.dense(LENGTH) for mask in mask_by_layer]
    copy = Encoder(dense, causal=model.layers[0]["attention"].causal).eval()
    copy.load_state_dict(model.state_dict(), strict=False)
    return copy


def assert_close(actual, expected, tolerance=1e-5):
    assert actual.keys() == expected.keys()
    for name in actual:
        torch.testing.assert_close(actual[name], expected[name], atol=tolerance, rtol=tolerance)


@torch.no_grad()
def test_one_mask_for_all(engine, model, x):
    assert_close(engine(x), masked(model, [masks.sliding_window(4)] * 2)(x))


def test_report_names_every_site_with_kernel_density_tile_and_reason(engine):
    report = engine.report()
    assert [site.site for site in report.sites] == ["layers.0.attention", "layers.1.attention"]
    text = str(report)
    for site in report.sites:
        assert site.rewritten and site.density == pytest.approx(masks.sliding_window(4).density(LENGTH))
        for told in (site.site, site.kernel, site.config, site.mask, site.reason):
            assert told in text
    assert report.to_dict()["sites"] == [site.to_dict() for site in report.sites]
    assert "2 of 2 sites" in text


def test_equal_masks_are_stored_once(engine):
    assert len({site.mask_digest for site in engine.report().sites}) == 1


@torch.no_grad()
def test_called_like_the_model(engine, x):
    expected = engine(x)
    assert_close(engine(x=x), expected, 0)
    assert_close(engine(x, 1.0), expected, 0)
    assert_close(engine(x, scale=1.0), expected, 0)


@torch.no_grad()
def test_calls_do_not_disturb_earlier_outputs(engine, x):
    first = engine(x)
    kept = {name: value.clone() for name, value in first.items()}
    engine(torch.randn_like(x))
    assert_close(first, kept, 0)


@torch.no_grad()
def test_inputs_need_not_be_contiguous(engine, x):
    assert_close(engine(x.transpose(1, 2).contiguous().transpose(1, 2)), engine(x), 0)


@torch.no_grad()
@pytest.mark.parametrize("offset", [4, 16, 32])
def test_inputs_need_not_be_aligned(engine, x, offset):
    """TVM's code loads 64 bytes at once and checks nothing; NumPy aligns to 16."""
    storage = torch.empty(x.numel() + 64)
    start = (offset - storage.data_ptr()) % 64 // 4
    moved = storage[start : start + x.numel()].view(x.shape).copy_(x)
    assert moved.data_ptr() % 64 == offset
    assert_close(engine(moved), engine(x), 0)


@pytest.mark.parametrize(
    "call, rule",
    [
        (lambda e, x: e(), "'x' is missing"),
        (lambda e, x: e(x, 2.0), "positional argument 2 is 'scale', which the example inputs did not have"),
        (lambda e, x: e(x, 1.0, 1.0), "3 positional arguments"),
        (lambda e, x: e(x, y=x), "'y' was not part"),
        (lambda e, x: e(x, x=x), "by position and by keyword"),
        (lambda e, x: e(x[:, :39]), r"shape \(1, 40, 32\), got .*39"),
        (lambda e, x: e(x.double()), "float32.*float64"),
        (lambda e, x: e(x.numpy()), "got"),
        (lambda e, x: e(x.to("meta")), "runs on cpu"),
    ],
)
def test_a_call_that_does_not_fit(engine, x, call, rule):
    with pytest.raises(InputError, match=rule):
        call(engine, x)


@torch.no_grad()
def test_masks_by_path(model, x):
    first, second = masks.sliding_window(3), masks.causal()
    engine = stof_tvm.build(model, QUICK_LLVM, (x,), mask={"layers.*": first, "layers.1.attention": second})
    assert_close(engine(x), masked(model, [first, second])(x))
    assert [site.mask for site in engine.report().sites] == [repr(first), repr(second)]


@torch.no_grad()
def test_the_models_own_masks_need_nothing_and_hold_beside_the_users(x):
    torch.manual_seed(0)
    keep = torch.rand(LENGTH, LENGTH) < 0.4
    own = Encoder((keep, None)).eval()
    assert_close(stof_tvm.build(own, QUICK_LLVM, (x,))(x), own(x))
    both = masked(own, [masks.from_tensor(keep) & masks.sliding_window(9), masks.sliding_window(9)])
    assert_close(stof_tvm.build(own, QUICK_LLVM, (x,), mask=masks.sliding_window(9))(x), both(x))


@torch.no_grad()
def test_causal_models(x):
    torch.manual_seed(0)
    causal = Encoder(causal=True).eval()
    engine = stof_tvm.build(causal, QUICK_LLVM, (x,))
    assert_close(engine(x), causal(x))
    assert {site.mask for site in engine.report().sites} == {repr(masks.causal())}


@torch.no_grad()
def test_padding_given_at_run_time_is_combined_with_the_static_mask(x):
    torch.manual_seed(0)
    attention = Attention().eval()
    padding = torch.ones(1, LENGTH, dtype=torch.bool)
    engine = stof_tvm.build(attention, QUICK_LLVM, (x, padding), mask=masks.sliding_window(9))
    (site,) = engine.report().sites
    assert site.rewritten and any("run time" in note for note in site.notes)
    for kept in (LENGTH, 31, 1):
        padding = (torch.arange(LENGTH) < kept)[None]
        dense = Attention(masks.sliding_window(9).dense(LENGTH) & padding).eval()
        dense.load_state_dict(attention.state_dict(), strict=False)
        torch.testing.assert_close(engine(x, padding), dense(x), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(model, x, dtype):
    import copy

    half = copy.deepcopy(model).to(dtype)
    engine = stof_tvm.build(half, QUICK_LLVM, (x.to(dtype),), mask=masks.sliding_window(4))
    expected = masked(model, [masks.sliding_window(4)] * 2)(x)
    actual = engine(x.to(dtype))
    assert actual["hidden"].dtype == dtype
    assert (actual["hidden"].float() - expected["hidden"]).abs().max() < (2e-2 if dtype == torch.float16 else 1e-1)


@torch.no_grad()
def test_exported_program_needs_no_example_inputs(model, x):
    program = torch.export.export(model, (x,))
    assert_close(stof_tvm.build(program, QUICK_LLVM, mask=masks.causal())(x), masked(model, [masks.causal()] * 2)(x))


@torch.no_grad()
def test_example_inputs_by_keyword_or_carried_by_the_model(x):
    attention = Attention().eval()
    attention.example_inputs = (x,)
    expected = attention(x)
    torch.testing.assert_close(stof_tvm.build(attention, QUICK_LLVM)(x), expected)
    torch.testing.assert_close(stof_tvm.build(attention, QUICK_LLVM, {"x": x})(x=x), expected)


def test_dump_of_every_phase(model, x, tmp_path, monkeypatch):
    monkeypatch.setenv("STOF_DUMP_DIR", str(tmp_path / "dump"))
    stof_tvm.build(model, QUICK_LLVM, (x,))
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert names == [f"{number:02d}_{phase}.py" for number, phase in enumerate(PHASES)]
    after_attention = names[list(PHASES).index("rewrite_masked_attention")]
    assert "sparse_attention_" in (tmp_path / "dump" / after_attention).read_text()


def test_an_engine_for_the_cpu_has_no_cuda_source(engine):
    with pytest.raises(CompileError, match="for the CPU has no CUDA source: build it for a GPU"):
        engine.cuda_source()


def test_cross_compiling_for_cuda_without_a_gpu(model, x):
    import tvm

    if tvm.cuda(0).exist:
        pytest.skip("says what happens without a GPU")
    import copy

    engine = stof_tvm.build(copy.deepcopy(model).half(), "cuda -arch=sm_80", (x.half(),), mask=masks.sliding_window(4))
    assert all(site.rewritten for site in engine.report().sites)
    assert "__global__" in engine.cuda_source() and "mma" in engine.cuda_source()
    with pytest.raises(DeviceError, match="runs on cuda:0, and there is no CUDA GPU here"):
        engine(x.half())
    with pytest.raises(DeviceError, match="no such device"):
        engine.prepare()


class Branching(torch.nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class NotAMask:
    pass


BAD_BUILDS = {
    "target": (lambda m, x: stof_tvm.build(m, "tpu", (x,)), TargetError, "tpu"),
    "model that does not export": (
        lambda m, x: stof_tvm.build(Branching(), QUICK_LLVM, (x,)),
        ExportError,
        "data-dependent|guard",
    ),
    "not a model": (lambda m, x: stof_tvm.build(lambda y: y, QUICK_LLVM, (x,)), InputError, "function"),
    "no example inputs": (lambda m, x: stof_tvm.build(m, QUICK_LLVM), InputError, "example"),
    "path that matches nothing": (
        lambda m, x: stof_tvm.build(m, QUICK_LLVM, (x,), mask={"decoder.*": masks.causal()}),
        MaskError,
        "'decoder.*' matches no attention.*'layers.0.attention', 'layers.1.attention'",
    ),
    "mask type": (lambda m, x: stof_tvm.build(m, QUICK_LLVM, (x,), mask=NotAMask()), MaskError, "NotAMask"),
    "mask value type": (lambda m, x: stof_tvm.build(m, QUICK_LLVM, (x,), mask={"*": "causal"}), MaskError, "'causal'"),
    "mask of another shape": (
        lambda m, x: stof_tvm.build(m, "llvm", (x,), mask=masks.from_tensor(torch.ones(7, 7, dtype=torch.bool).tril())),
        MaskError,
        "layers.0.attention.*7",
    ),
    "mask that keeps nothing": (
        lambda m, x: stof_tvm.build(m, QUICK_LLVM, (x,), mask=masks.causal() & ~masks.causal()),
        MaskError,
        "keeps nothing",
    ),
    "own mask that keeps nothing": (
        lambda m, x: stof_tvm.build(Attention(torch.zeros(LENGTH, LENGTH, dtype=torch.bool)), QUICK_LLVM, (x,)),
        MaskError,
        "keeps nothing",
    ),
    "NaN in a float mask": (
        lambda m, x: stof_tvm.build(Attention(torch.full((LENGTH, LENGTH), torch.nan)), QUICK_LLVM, (x,)),
        MaskError,
        "NaN",
    ),
    "strict with a head too large": (
        lambda m, x: stof_tvm.build(Attention(width=1200), QUICK_LLVM, (torch.randn(1, 8, 1200),), strict=True),
        NotRewrittenError,
        "head_dim=600",
    ),
}


@pytest.mark.parametrize("case", BAD_BUILDS)
def test_bad_input_is_one_clear_error(model, x, case):
    call, kind, rule = BAD_BUILDS[case]
    with pytest.raises(kind, match=rule) as raised:
        call(model, x)
    assert isinstance(raised.value, StofError)
    assert "Traceback" not in str(raised.value)


def test_a_mask_given_for_an_attention_that_stays_dense_is_not_dropped():
    attention = Attention(width=1200)
    with pytest.raises(NotRewrittenError, match="mask cannot be applied: .*head_dim=600"):
        stof_tvm.build(attention, QUICK_LLVM, (torch.randn(1, 8, 1200),), mask=masks.causal())


@torch.no_grad()
def test_what_no_kernel_covers_stays_dense_right_and_reported():
    attention = Attention(torch.rand(8, 8) < 0.7, width=1200).eval()
    x = torch.randn(1, 8, 1200)
    engine = stof_tvm.build(attention, QUICK_LLVM, (x,))
    (site,) = engine.report().not_rewritten
    assert "head_dim=600" in site.reason and site.reason in str(engine.report())
    torch.testing.assert_close(engine(x), attention(x), atol=1e-4, rtol=1e-4)


def test_errors_form_one_family():
    for kind in (CompileError, ExportError, UnsupportedError):
        assert issubclass(kind, StofError)


@torch.no_grad()
def test_a_fusion_scheme_can_be_given(model, x, engine):
    """The finest one, as text, as hexadecimal and as it is; every segment is then one operator."""
    count = sum(len(segment.operators) for segment in engine.report().segments)
    finest = FusionScheme.from_lengths([1] * count)
    engines = [
        stof_tvm.build(model, QUICK_LLVM, (x,), mask=masks.sliding_window(4), fusion_scheme=scheme)
        for scheme in (str(finest), finest.hex, finest)
    ]
    for built in engines:
        assert built.report().fusion_scheme == finest.hex and len(built.report().segments) == count
        assert_close(built(x), engine(x))


def test_the_report_has_every_segment(engine):
    report = engine.report()
    operators = [name for segment in report.segments for name in segment.operators]
    assert operators.count("layer_norm") == 2 and operators.count("matmul") == 4
    assert FusionScheme.parse(report.fusion_scheme).segments[-1].stop == len(operators)
    text = str(report)
    assert f"{len(operators)} operators in {len(report.segments)} segments, scheme {report.fusion_scheme}" in text
    for segment in report.segments:
        operators = " ".join(segment.operators).replace("sparse_attention", "attention")
        assert operators in text and segment.reason in text


@pytest.mark.parametrize(
    "scheme, error, rule",
    [
        ("0101", SchemeError, "4 digits for .* operators"),
        ("0x", SchemeError, "not a hexadecimal scheme"),
        (7, InputError, "fusion_scheme is a FusionScheme or a str, got int"),
    ],
)
def test_a_fusion_scheme_that_does_not_fit(model, x, scheme, error, rule):
    with pytest.raises(error, match=rule):
        stof_tvm.build(model, QUICK_LLVM, (x,), fusion_scheme=scheme)


class Wrong(torch.nn.Module):
    def forward(self, x):
        return x @ x  # shapes that do not fit


def test_a_bug_of_the_model_is_not_buried_in_our_lines(x):
    with pytest.raises(ExportError, match="return x @ x") as error:
        stof_tvm.build(Wrong(), QUICK_LLVM, (x,))
    text = "".join(traceback.format_exception(error.value))
    assert text.count("  File ") < 8 and text.index("shapes that do not fit") < text.index("ExportError")


def test_an_engine_says_what_it_is(engine):
    assert repr(engine) == f"Engine(x: float32[1, {LENGTH}, {WIDTH}]; on cpu, 2 of 2 attentions on kernels)"
    assert engine.device == torch.device("cpu")
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="engine.save") as refusal:
            copied(engine)
        assert "\n" not in str(refusal.value)


def test_cpu_is_a_target():
    assert parse_target("cpu") is parse_target("llvm")
    assert parse_target("cpu -mcpu=skylake-avx512") is parse_target("llvm -mcpu=skylake-avx512")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("mask", "named"), [(masks.causal(), "the mask reaches"), ({"0": masks.causal()}, "for '0' reaches")]
)
def test_a_mask_that_reaches_no_attention_is_an_error(mask, named, strict):
    with pytest.raises(MaskError, match=f"{named} no attention.*scaled_dot_product_attention"):
        stof_tvm.build(torch.nn.Sequential(torch.nn.Linear(4, 4)), "cpu", (torch.ones(2, 4),), mask, strict=strict)


def test_a_site_that_keeps_everything_is_not_called_sparse(model, x):
    text = str(stof_tvm.build(model, QUICK_LLVM, (x,), verify=False).report())
    assert "2 of 2 sites on attention kernels, 0 with something to skip" in text and "sparse" not in text
