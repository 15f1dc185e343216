"""`build(…, lazy=True)`: at every shape of a range, what `build` makes for that shape, and what PyTorch computes."""

import copy
import gc
import io
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import ExportError, InputError, MaskError, UnsupportedError
from stof_tvm.range_engine import RangeEngine
from tests.models.quick_llvm import QUICK_LLVM

LENGTH = Dim("length", min=2, max=64)
BATCH = Dim("batch", min=1, max=4)
WINDOW = masks.sliding_window(3)


class Attention(nn.Module):
    """Packed projections, and as many sizes in a reshape as there can be."""

    def __init__(self, causal: bool):
        super().__init__()
        self.qkv, self.causal = nn.Linear(16, 48), causal

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return out.transpose(1, 2).reshape(batch, length, width)


class Language(nn.Module):
    """Its table of positions, read in several ways, has as many rows as the longest input has tokens."""

    def __init__(self, positions: str, causal: bool, layers: int = 2):
        super().__init__()
        self.words, self.table = nn.Embedding(50, 16), nn.Embedding(64, 16)
        self.layers = nn.ModuleList(Attention(causal) for _ in range(layers))
        self.register_buffer("ids", torch.arange(64)[None])
        self.positions = positions

    def forward(self, ids):
        length = ids.shape[1]
        if self.positions == "slice":
            x = self.words(ids) + self.table.weight[:length]
        elif self.positions == "buffer":
            x = self.words(ids) + self.table(self.ids[:, :length])
        else:
            x = self.words(ids) + self.table(torch.arange(length))
        for layer in self.layers:
            x = x + layer(x)
        return x


class Along(nn.Module):
    """What a model may do along the axis of tokens besides attention."""

    def __init__(self, what: str):
        super().__init__()
        self.what, self.conv = what, nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x):
        y = x.transpose(1, 2)
        if self.what == "adaptive pool":
            y = F.adaptive_avg_pool1d(y, 2)
        elif self.what == "pool":
            y = F.avg_pool1d(y, 2)
        elif self.what == "conv":
            y = self.conv(y)
        elif self.what == "cumsum":
            y = y.cumsum(-1) / torch.arange(1, x.shape[1] + 1)
        elif self.what == "branch":  # torch.export would fix the side that the example takes
            y = y.mean(-1, keepdim=True) if x.shape[1] > 8 else y.amax(-1, keepdim=True)
        elif self.what == "batch of one":
            y = y.squeeze() if x.shape[0] == 1 else y
        return x.sum(1), y, x.shape[1]


def seeded(make, *args):
    torch.manual_seed(0)
    return make(*args).eval()


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(length))


def tokens(batch: int, length: int, width: int = 16) -> torch.Tensor:
    return torch.randn(batch, length, width, generator=torch.Generator().manual_seed(length))


def lazily(model, inputs, dynamic_shapes, mask=None, target=QUICK_LLVM, **options) -> RangeEngine:
    return stof_tvm.build(model, target, inputs, mask, dynamic_shapes=dynamic_shapes, lazy=True, **options)


def fixed(model, inputs, mask=None):
    return stof_tvm.build(model, QUICK_LLVM, inputs, mask, verify=False)


def sites(engine) -> list[tuple]:
    return [(site.site, site.kernel, site.mask, site.mask_digest) for site in engine.report().sites]


def leaves(result) -> list:
    return torch.utils._pytree.tree_leaves(result)


def assert_is_fixed_engine(engine, model, inputs, mask=None):
    """The same sites, kernels, masks and numbers as of an engine for this shape, and PyTorch's numbers."""
    alone = fixed(model, inputs, mask)
    assert sites(engine.engine_for(*inputs)) == sites(alone)
    found, expected = leaves(engine(*inputs)), leaves(alone(*inputs))
    assert len(found) == len(expected)
    assert all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(found, expected))
    return found


@pytest.fixture(scope="module")
def model():
    return seeded(Language, "slice", True)


@pytest.fixture(scope="module")
def engine(model):
    """Batch and length together; masked in one of two layers."""
    return lazily(model, ids(2, 8), {"ids": {0: BATCH, 1: LENGTH}}, {"layers.1": WINDOW})


@torch.no_grad()
@pytest.mark.parametrize("shape", [(2, 8), (1, 2), (4, 64)])
def test_batch_and_length_with_a_mask_by_module_path(engine, model, shape):
    x = ids(*shape)
    (found,) = assert_is_fixed_engine(engine, model, (x,), {"layers.1": WINDOW})
    h = model.words(x) + model.table.weight[: shape[1]]
    h = h + model.layers[0](h)
    layer = model.layers[1]
    q, k, v = layer.qkv(h).reshape(*shape, 3, 2, 8).permute(2, 0, 3, 1, 4)
    keep = (WINDOW & masks.causal()).dense(shape[1])
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep).transpose(1, 2).reshape(*shape, 16)
    torch.testing.assert_close(found, h + out, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:the engine was not verified")
@pytest.mark.parametrize("positions", ["buffer", "arange"])
def test_length_alone_up_to_the_last_position(positions):
    model = seeded(Language, positions, False, 0)
    engine = lazily(model, ids(2, 8), ({1: Dim.AUTO},))
    (found,) = assert_is_fixed_engine(engine, model, (ids(2, 64),))
    torch.testing.assert_close(found, model(ids(2, 64)), atol=1e-5, rtol=1e-5)
    with pytest.raises(InputError, match=r"inputs of ids \(2, 65\)"):
        engine(ids(2, 65))


@torch.no_grad()
@pytest.mark.parametrize("what", ["adaptive pool", "pool", "conv", "cumsum", "branch", "batch of one"])
def test_whatever_a_model_does_along_the_axis(what):
    model = seeded(Along, what)
    engine = lazily(model, tokens(2, 6), {"x": {0: Dim.DYNAMIC, 1: LENGTH}}, verify=False)
    assert engine.report().engines == {}
    for shape in ((1, 9), (2, 5)):
        *found, length = assert_is_fixed_engine(engine, model, (tokens(*shape),))
        assert length == shape[1]
        torch.testing.assert_close(tuple(found), model(tokens(*shape))[:2], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_batch_alone_from_an_example_of_one():
    model = seeded(Attention, False)
    engine = lazily(model, tokens(1, 5), {"x": {0: BATCH}})
    for batch in (1, 3):
        torch.testing.assert_close(engine(tokens(batch, 5)), model(tokens(batch, 5)), atol=1e-5, rtol=1e-5)
    with pytest.raises(InputError, match=r"x dimension 0 is 5; it must be 1 to 4"):
        engine(tokens(5, 5))
    with pytest.raises(InputError, match=r"x dimension 1 is 6; it must be 5"):
        engine(tokens(1, 6))


class Nested(nn.Module):
    def forward(self, parts, *, twice, scale: int = 2):
        return (parts["x"] * scale).cumsum(0) + parts["y"][0] + twice.reshape(-1, 2).sum(1)


@torch.no_grad()
def test_nested_inputs_by_keyword_a_derived_dim_and_a_shared_one():
    model = Nested()

    def call(n: int, twice: int | None = None, y: int | None = None) -> dict:
        parts = {"x": torch.arange(float(n)), "y": [torch.ones(n if y is None else y)]}
        return {"parts": parts, "twice": torch.arange(2.0 * (twice or n))}

    n = Dim("n", min=2, max=9)
    dynamic = {"parts": {"x": {0: n}, "y": [{0: n}]}, "twice": {0: 2 * n}}
    engine = lazily(model, call(3), dynamic)
    torch.testing.assert_close(engine(**call(7)), model(**call(7)))
    torch.testing.assert_close(engine(**call(5), scale=2), model(**call(5)))
    for wrong, message in (
        (call(10), "parts_x dimension 0 is 10; it must be 2 to 9"),
        (call(4, y=5), r"parts_y_0 dimension 0 is 5; it must be parts_x\[0\] = 4"),
        (call(4, twice=5), r"twice dimension 0 is 10; it must be 2\*parts_x\[0\] = 8"),
        ({**call(4), "scale": 3}, "'scale' was not part of the export"),
        ({**call(4), "parts": (1, 2)}, "not nested as in the export"),
        (
            {**call(4), "twice": torch.ones(8).double()},
            r"twice must be a float32 tensor of shape \(2\*parts_x\[0\],\), ",
        ),
        ({**call(4), "twice": torch.ones(4, 2)}, "twice must be a float32 tensor of shape"),
        ({**call(4), "twice": [1]}, "not nested|twice must be"),
        ({"parts": call(4)["parts"]}, "argument 'twice' is missing"),
    ):
        with pytest.raises(InputError, match=message):
            engine(**wrong)
    assert list(engine.report().engines) == [f"parts_x ({n},), parts_y_0 ({n},), twice ({2 * n},)" for n in (3, 7, 5)]


@torch.no_grad()
def test_inputs_that_are_named_as_parameters_keep_their_places():
    class Confusing(nn.Module):
        def __init__(self):
            super().__init__()
            self.x = nn.Linear(4, 4)

        def forward(self, p_x_weight, x_weight, *rest, p_x_bias, a):
            return self.x(p_x_weight) + 2 * x_weight + 3 * rest[0] + 4 * p_x_bias + 5 * a

    def call(n: int) -> tuple[tuple, dict]:
        first, second, third, fourth, fifth = (torch.full((n, 4), 10.0**i) for i in range(5))
        return (first, second, third), {"a": fourth, "p_x_bias": fifth}

    model, size = Confusing(), {0: Dim("n", min=1)}
    dynamic = {"p_x_weight": size, "x_weight": size, "rest": (size,), "p_x_bias": size, "a": size}
    args, kwargs = call(2)
    engine = lazily(model, args, dynamic, example_kwargs=kwargs)
    args, kwargs = call(3)
    torch.testing.assert_close(engine(*args, **dict(reversed(kwargs.items()))), model(*args, **kwargs))


def test_sizes_that_the_model_refuses_are_an_error_of_the_input():
    class Blocks(nn.Module):
        def forward(self, x):
            return x.reshape(-1, 4, x.shape[1]).sum(1)

    engine = lazily(Blocks(), torch.ones(8, 3), {"x": {0: Dim.DYNAMIC}})
    torch.testing.assert_close(engine(torch.ones(12, 3)), torch.full((3, 3), 4.0))
    with pytest.raises(InputError, match=r"(?s)does not take inputs of x \(10, 3\): .*invalid for input of size 30"):
        engine(torch.ones(10, 3))
    assert len(engine.report().engines) == 2


class Scaled(nn.Module):
    """Quick to build."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.arange(512.0))

    def forward(self, x):
        return x * self.scale


def scaled(**options) -> tuple[Scaled, RangeEngine]:
    model = Scaled()
    return model, lazily(model, torch.ones(2, 512), {"x": {0: Dim("n", min=1, max=99)}}, **options)


@torch.no_grad()
def test_later_training_and_masks_do_not_change_it(model):
    original = copy.deepcopy(model)
    tensor = WINDOW.dense(8)
    engine = lazily(original, ids(2, 8), {"ids": {0: BATCH, 1: LENGTH}}, tensor, verify=False)
    expected = fixed(model, (ids(2, 8),), WINDOW)(ids(2, 8))
    for parameter in original.parameters():
        parameter.add_(1)
    original.layers[0].causal = False
    tensor.fill_(True)
    assert torch.equal(engine(ids(2, 8)), expected)


def test_a_model_that_its_copy_would_refer_to_is_refused():
    class Closure(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.function = lambda x: self.linear(x)

        def forward(self, x):
            return self.function(x)

    class NoCopy(Scaled):
        def __deepcopy__(self, memo):
            raise RuntimeError("there is one of me")

    with pytest.raises(UnsupportedError, match="reads weights of the model itself"):
        lazily(Closure(), torch.ones(2, 4), {"x": {0: Dim("n")}})
    with pytest.raises(UnsupportedError, match="NoCopy cannot be copied.*there is one of me"):
        lazily(NoCopy(), torch.ones(2, 512), {"x": {0: Dim("n")}})


@torch.no_grad()
def test_weights_are_held_once():
    model = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 64))
    engine = lazily(model, ids(2, 8), ({1: LENGTH},), verify=False)
    engines = [engine.engine_for(ids(2, n)) for n in (3, 5, 8, 30)]
    weights = [x for one in engines for x in one._weights.tensors]
    held = {x.data_ptr(): x.nbytes for x in weights}
    snapshot = {x.data_ptr(): x.nbytes for x in engine._snapshot.model.parameters()}
    of_one = sum(x.nbytes for x in engines[0]._weights.tensors)
    assert of_one >= (50 + 64) * 64 * 4 and len(weights) == 4 * len(engines[0]._weights.tensors)
    assert sum(held.values()) <= 1.1 * of_one
    assert held.keys() & snapshot.keys()  # the table of words, which reaches the kernel as it is
    for n in (3, 8):
        torch.testing.assert_close(engine(ids(2, n)), model(ids(2, n)), atol=1e-5, rtol=1e-5)


def test_engines_are_bounded_and_those_dropped_are_freed():
    _, engine = scaled(verify=False)
    assert engine.most_engines == 64
    engine.most_engines = 4
    dropped = []
    for n in torch.randperm(98, generator=torch.Generator().manual_seed(0))[:30].tolist():
        x = torch.ones(n + 1, 512)
        assert torch.equal(engine(x)[0], torch.arange(512.0))
        dropped.append(weakref.ref(engine.engine_for(x)))
        assert len(engine.report().engines) <= 4
    gc.collect()
    assert [ref() is not None for ref in dropped] == [False] * 26 + [True] * 4
    oldest = dropped[26]()
    engine.run([torch.ones(oldest.signature.inputs[0].shape)])  # now it is the last one
    engine.most_engines = 1
    assert engine.engine_for(torch.ones(oldest.signature.inputs[0].shape)) is oldest
    for wrong in (0, True, 2.5):
        with pytest.raises(InputError, match="whole number"):
            engine.most_engines = wrong


def test_threads_build_a_shape_once_and_do_not_wait_for_others(monkeypatch):
    _, engine = scaled()
    build, building, go_on, built = engine._build_one, threading.Event(), threading.Event(), []

    def slow(model, call, snapshot):
        built.append(tuple(call[0][0].shape))
        building.set()
        assert go_on.wait(60)
        return build(model, call, snapshot)

    monkeypatch.setattr(engine, "_build_one", slow)
    results = []
    threads = [threading.Thread(target=lambda: results.append(engine(torch.ones(5, 512)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert building.wait(60)
    assert engine(torch.ones(2, 512)).shape == (2, 512)  # while the others build or wait
    with pytest.raises(InputError, match="x dimension 0 is 100; it must be 1 to 99"):
        engine(torch.ones(100, 512))
    assert results == []
    go_on.set()
    for thread in threads:
        thread.join()
    assert built == [(5, 512)] and len(results) == 3 and torch.equal(results[0], results[2])


def test_a_mask_of_fixed_size_fits_one_length(model):
    engine = lazily(model, ids(2, 8), {"ids": {1: LENGTH}}, WINDOW.dense(8), verify=False)
    assert torch.equal(engine(ids(2, 8)), fixed(model, (ids(2, 8),), WINDOW)(ids(2, 8)))
    message = r"inputs of ids \(2, 9\): .* does not broadcast .*\(a mask of fixed size, such as a tensor, fits only"
    with pytest.raises(MaskError, match=message):
        engine(ids(2, 9))


@pytest.mark.parametrize("verify", [True, False])
def test_verification_of_each_engine(verify):
    _, engine = scaled(verify=verify)
    results = {shapes: report.verification.result for shapes, report in engine.report().engines.items()}
    assert results == ({"x (2, 512)": "passed"} if verify else {})
    engine(torch.ones(3, 512))
    last = list(engine.report().engines.values())[-1]
    assert last.verification.result == ("passed" if verify else "skipped")


def test_report_and_what_only_an_engine_of_one_shape_has(engine, tmp_path):
    report = engine.report()
    text = str(report)
    assert "ids (1 to 4, 2 to 64)" in text and "ids (2, 8): 2 of 2 attentions on kernels" in text and "layers.1" in text
    assert report.to_dict()["engines"]["ids (2, 8)"]["sites"]
    assert repr(engine).startswith("RangeEngine(ids (1 to 4, 2 to 64); on cpu, ")
    properties = [lambda: engine.signature, lambda: engine.inputs_in_place]
    for use in (lambda: engine.save("x"), engine.cuda_source, engine.found_blocks, *properties):
        with pytest.raises(InputError, match=r"engine.engine_for\(\*inputs\)\."):
            use()
    with pytest.raises(InputError, match="inputs_in_place"):
        engine.inputs_in_place = (0,)
    with pytest.raises(AttributeError, match="no option 'reuse_output'"):
        engine.reuse_output = True
    with pytest.raises(TypeError, match="cannot be pickled"):
        copy.copy(engine)
    x = ids(2, 8)
    one = engine.engine_for(x)
    engine.reuse_outputs = True
    assert engine.reuse_outputs and one.reuse_outputs
    engine.reuse_outputs = False
    one.save(tmp_path / "one.stof")
    assert torch.equal(stof_tvm.load(tmp_path / "one.stof")(x), engine(x))
    assert engine.prepare(x) is one.prepare()


@torch.no_grad()
def test_the_modes_of_callers_do_not_matter():
    model = Scaled()
    with torch.inference_mode():
        engine = lazily(model, torch.ones(2, 512), {"x": {0: Dim("n", min=1, max=99)}})
        inference = torch.ones(7, 512)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(UnsupportedError, match="build the engine outside of autocast"):
            lazily(model, torch.ones(2, 512), {"x": {0: Dim("n")}})
        assert engine(torch.ones(3, 512)).dtype == torch.float32
    with torch.inference_mode():
        engine(torch.ones(4, 512))
    for x in (torch.ones(5, 512), torch.ones(6, 512).requires_grad_(), inference, torch.ones(512, 8).T):
        assert torch.equal(engine(x), model(x))


def test_switches():
    model, x, n = Scaled(), torch.ones(2, 512), Dim("n", min=1, max=99)
    with pytest.raises(InputError, match="give dynamic_shapes"):
        stof_tvm.build(model, QUICK_LLVM, x, lazy=True)
    with pytest.raises(InputError, match="lazy must be True or False, got int 1"):
        stof_tvm.build(model, QUICK_LLVM, x, lazy=1)
    for nothing in ({}, {"x": None}, {"x": {0: None}}, {"x": {0: Dim.STATIC}}):
        with pytest.raises(InputError, match="makes no dimension dynamic"):
            lazily(model, x, nothing)
    for wrong, message in (
        ({"y": {0: n}}, "top-level keys must be the arg names"),
        ("x", "expected dynamic_shapes to be dict, tuple, or list"),
        ({"x": {0: Dim("n", min=5)}}, "not in range"),
    ):
        with pytest.raises(InputError, match=f"(?s)dynamic_shapes does not fit the example inputs: .*{message}"):
            lazily(model, x, wrong)
    with pytest.raises(InputError, match="got str"):
        lazily("model", x, {"x": {0: n}})
    with pytest.raises(InputError, match="needs example inputs"):
        lazily(model, None, {"x": {0: n}})


def test_what_a_model_raises_at_the_example_shape_is_not_the_fault_of_its_shapes():
    class Branch(nn.Module):
        def forward(self, x):
            return x * 2 if x.sum() > 0 else x

    for verify in (True, False):
        with pytest.raises(ExportError, match="The model decides by a tensor's values"):
            lazily(Branch(), torch.ones(2, 4), {"x": {0: Dim("n")}}, verify=verify)(torch.ones(3, 4))


@pytest.mark.slow
def test_for_a_gpu_that_is_not_here():
    model = seeded(Attention, True).half()
    x = tokens(2, 64).half()
    engine = lazily(model, x, {"x": {0: BATCH, 1: Dim("length", max=512)}}, WINDOW, target="cuda -arch=sm_80")
    lengths = [engine.engine_for(tokens(1, n).half()) for n in (64, 128)]
    alone = stof_tvm.build(model, "cuda -arch=sm_80", tokens(1, 128).half(), WINDOW)
    assert sites(lengths[1]) == sites(alone) and lengths[1].cuda_source() == alone.cuda_source()
    assert engine.device == alone.device == torch.device("cuda:0") and "on cuda:0, 3 engines" in repr(engine)
    shared = [{w.data_ptr() for w in one._weights.tensors if w.shape in ((48, 16), (16, 48))} for one in lengths]
    assert shared[0] and shared[0] == shared[1]


class TestExportedProgram:
    """The program's own range, and the numbers of its module."""

    @pytest.fixture(scope="class")
    def program(self):
        # torch.export fixes a table that is sliced to the longest input, so the longest is one shorter.
        dynamic = {"ids": {0: BATCH, 1: Dim("length", min=2, max=63)}}
        return torch.export.export(seeded(Language, "buffer", True), (ids(2, 8),), dynamic_shapes=dynamic)

    @pytest.fixture(scope="class")
    def engine(self, program):
        return stof_tvm.build(program, QUICK_LLVM, mask={"layers.0": WINDOW}, lazy=True)

    @pytest.mark.parametrize("shape", [(1, 2), (4, 63), (3, 12)])
    def test_is_what_a_fixed_program_gives(self, engine, shape):
        model = seeded(Language, "buffer", True)
        alone = fixed(torch.export.export(model, (ids(*shape),)), (ids(*shape),), {"layers.0": WINDOW})
        assert sites(engine.engine_for(ids(*shape))) == sites(alone)
        assert torch.equal(engine(ids(*shape)), alone(ids(*shape)))

    def test_a_file_without_a_mask_is_the_programs_module(self, program):
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        engine = stof_tvm.build(torch.export.load(file), QUICK_LLVM, lazy=True, verify=False)
        torch.testing.assert_close(engine(ids(1, 33)), program.module()(ids(1, 33)), atol=1e-5, rtol=1e-5)

    def test_shapes_outside(self, engine):
        for shape, message in (((5, 8), "ids dimension 0 is 5; it must be 1 to 4"), ((2, 64), "it must be 2 to 63")):
            with pytest.raises(InputError, match=message):
                engine(ids(*shape))

    def test_later_training_does_not_change_it(self, program):
        program = copy.deepcopy(program)
        engine = stof_tvm.build(program, QUICK_LLVM, lazy=True, verify=False)
        expected = program.module()(ids(2, 9))
        for tensor in program.state_dict.values():
            tensor.detach().zero_()
        torch.testing.assert_close(engine(ids(2, 9)), expected, atol=1e-5, rtol=1e-5)

    def test_what_does_not_fit(self, program):
        with pytest.raises(UnsupportedError, match=r"dynamic shape \(s.*which only build takes"):
            stof_tvm.frontend.import_model(program)
        with pytest.raises(InputError, match="leave dynamic_shapes out"):
            lazily(program, None, {"ids": {1: LENGTH}})
        with pytest.raises(InputError, match="fixed ones"):
            stof_tvm.build(torch.export.export(Scaled(), (torch.ones(2, 512),)), QUICK_LLVM, lazy=True)
        with pytest.raises(InputError, match="ids dimension 1 is 70"):
            stof_tvm.build(program, QUICK_LLVM, ids(2, 70), lazy=True)
