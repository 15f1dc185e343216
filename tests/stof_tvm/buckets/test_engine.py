"""`build(…, dynamic_shapes=…)`: every shape of a range gives what an engine for that shape gives, and PyTorch."""

import gc
import re
import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import stof_tvm
from stof_tvm import compiler, masks
from stof_tvm.errors import ExportError, InputError, MaskError, UnsupportedError, VerificationError
from stof_tvm.frontend.padding.rules import table
from stof_tvm.range_engine import RangeEngine
from tests.models.quick_llvm import QUICK_LLVM

BATCH, LENGTH = Dim("batch", min=1, max=3), Dim("length", min=2, max=32)
BOTH = {"ids": {0: BATCH, 1: LENGTH}}
WINDOW = masks.sliding_window(3)


class Language(nn.Module):
    """A layer of attention, and what else goes along the axis of tokens."""

    def __init__(self):
        super().__init__()
        self.words, self.table = nn.Embedding(50, 16), nn.Embedding(32, 16)
        self.qkv, self.conv = nn.Linear(16, 48), nn.Conv1d(16, 16, 3, padding=1)

    def attend(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).reshape(batch, length, width)

    def forward(self, ids):
        x = self.words(ids) + self.table.weight[: ids.shape[1]]
        x = x + self.attend(x)
        x = x + self.conv(x.mT).mT
        mean = x.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        return {"rows": x, "pooled": x.mean(1), "last": mean[:, -1], "length": ids.shape[1]}


class Scaled(nn.Module):
    """Hardly anything to compile."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, x):
        return x * self.weight


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 50, (batch, length), generator=torch.Generator().manual_seed(length))


def ranged(model, inputs, dynamic_shapes=None, mask=None, **options):
    return stof_tvm.build(model, QUICK_LLVM, inputs, mask, dynamic_shapes=dynamic_shapes, **options)


def assert_close(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys() and found["length"] == expected["length"]
    for name in ("rows", "pooled", "last"):
        assert found[name].shape == expected[name].shape and found[name].is_contiguous()
        torch.testing.assert_close(found[name], expected[name], atol=2e-5, rtol=2e-5)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Language().eval()


@pytest.fixture(scope="module")
def engine(model):
    return ranged(model, (ids(2, 8),), BOTH, buckets={"ids[0]": [3], "ids[1]": [16]})


def test_sizes_are_named_by_their_dims_too():
    x = torch.ones(2, 5, 8)
    dims = {"x": {0: Dim("batch", min=2, max=4), 1: Dim("length", min=2, max=9)}}
    for own in (dims, [tuple(dims["x"].values()) + (None,)]):
        engine = ranged(Scaled(), x, own, buckets={"batch": [4], "length": [5]}, verify=False)
        assert set(engine._buckets[frozenset()]) == {(4, 5), (4, 9)}
    told = "buckets has 'long'; the sizes that may change are 'x[0]', 'batch', 'x[1]', 'length'"
    with pytest.raises(InputError, match=re.escape(told)):
        ranged(Scaled(), x, dims, buckets={"long": [4]})
    with pytest.raises(InputError, match="'x\\[1\\]' and 'length' are one size: give buckets of it once"):
        ranged(Scaled(), x, dims, buckets={"x[1]": [4], "length": [5]})


class Nested(nn.Module):
    """Tensors and numbers, some of them in lists and dicts."""

    def forward(self, x, scale=1.0, more=None, last=None):
        x = x * scale
        return x if more is None else x + more[0] + last["y"]


OF_BOTH = {0: Dim("batch", min=2, max=4), 1: Dim("length", min=2, max=9)}
OF_LENGTH = {0: None, 1: OF_BOTH[1]}


@pytest.mark.parametrize(
    ("inputs", "dynamic_shapes"),
    [
        ({"x": (2, 5, 8), "scale": 2.0}, {"x": OF_BOTH, "scale": None}),
        (((2, 5, 8), 2.0), (OF_BOTH, None)),
        (((2, 5, 8), 2.0), {"x": OF_BOTH, "scale": None}),
        (
            {"last": {"n": 3, "y": (1, 5, 8)}, "more": [(2, 5, 1), True], "x": (1, 1, 8)},
            {"more": [OF_BOTH, None], "x": None, "last": {"y": OF_LENGTH, "n": None}},
        ),
        (
            ((1, 1, 8), 2.0, [(2, 5, 1), (2, 2)], {"y": (1, 5, 8), "n": [(3,), 1]}),
            (None, None, [tuple(OF_BOTH.values()) + (None,), None], {"n": [None, None], "y": OF_LENGTH}),
        ),
    ],
)
def test_sizes_are_named_by_their_dims_beside_numbers(inputs, dynamic_shapes):
    def tensors(x):
        if isinstance(x, tuple) and all(type(n) is int for n in x):
            return torch.ones(x)
        if isinstance(x, dict):
            return {key: tensors(value) for key, value in x.items()}
        return type(x)(map(tensors, x)) if isinstance(x, list | tuple) else x

    more = {"buckets": {"batch": [4], "length": [9]}, "verify": False}
    if isinstance(dynamic_shapes, dict) and isinstance(inputs, dict):
        dynamic_shapes = {name: dynamic_shapes[name] for name in inputs}
    engine = ranged(Nested(), tensors(inputs), dynamic_shapes, **more)
    (sizes,) = engine._buckets[frozenset()]
    assert sorted(sizes) == [4, 9]  # in the order of the inputs


class Variadic(nn.Module):
    def forward(self, *given):
        return given[0].mean(1) + given[-1].sum()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("by_name", [True, False])
def test_sizes_of_any_number_of_arguments_are_named_by_their_dims(count, by_name):
    specs = (OF_BOTH, None)[:count]
    inputs = tuple(torch.ones(2, 5, 8) for _ in range(count))
    more = {"buckets": {"batch": [4], "length": [9]}, "verify": False}
    engine = ranged(Variadic(), inputs, {"given": specs} if by_name else (specs,), **more)
    (sizes,) = engine._buckets[frozenset()]
    assert sorted(sizes) == [4, 9]


@torch.no_grad()
@pytest.mark.parametrize("shape", [(2, 8), (1, 2), (3, 32), (3, 16), (2, 17), (1, 16)])
def test_every_shape_of_the_range(engine, model, shape):
    assert isinstance(engine, RangeEngine)
    assert_close(engine(ids(*shape)), model(ids(*shape)))


@torch.no_grad()
def test_it_is_an_engine_for_that_shape(engine, model):
    x = ids(2, 11)
    assert_close(engine(x), stof_tvm.build(model, QUICK_LLVM, (x,), verify=False)(x))


@torch.no_grad()
def test_nothing_compiles_after_the_build(engine, model, monkeypatch):
    monkeypatch.setattr(compiler, "_compiled", None)
    for length in range(2, 33):
        assert_close(engine(ids(2, length)), model(ids(2, length)))


def test_it_does_not_keep_the_model():
    model = Scaled()
    engine = ranged(model, torch.ones(3, 8), {"x": {0: Dim("n", min=2, max=4)}}, buckets=[4])
    kept = weakref.ref(model.weight)
    del model
    gc.collect()
    assert kept() is None and torch.equal(engine(torch.ones(2, 8)), 2 * torch.ones(2, 8))


def test_what_earlier_calls_left_reaches_no_result():
    class Padded(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x), x.mean(1)

    engine = ranged(Padded(), torch.randn(2, 5, 8), {"x": {1: Dim("n", min=2, max=12)}}, buckets=[12], verify=False)
    engine(torch.full((2, 11, 8), float("nan")))
    x = torch.randn(2, 5, 8)
    for found, expected in zip(engine(x), Padded()(x)):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_calls_of_a_buckets_sizes_are_not_padded(engine):
    bucket = engine._buckets[frozenset()][3, 16]
    bucket._buffers.clear()
    engine(ids(3, 16))
    assert not bucket._buffers
    engine(ids(3, 15))
    assert list(bucket._buffers) == [0]
    kept = bucket._buffers[0]
    engine(ids(2, 9))
    assert bucket._buffers[0] is kept


@torch.no_grad()
def test_results_are_the_callers(engine, model):
    first = engine(ids(2, 9))["rows"]
    copy = first.clone()
    engine(ids(2, 10))
    assert torch.equal(first, copy) and first._base is None


@torch.no_grad()
def test_threads_share_it(engine, model):
    wrong = []

    def call(length):
        for _ in range(5):
            try:
                assert_close(engine(ids(2, length)), model(ids(2, length)))
            except AssertionError as error:
                wrong.append(error)

    threads = [threading.Thread(target=call, args=(length,)) for length in (3, 9, 15, 31)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_shapes_outside_are_errors_that_name_the_range(engine):
    with pytest.raises(InputError, match=r"ids dimension 1 is 33; it must be 2 to 32"):
        engine(ids(2, 33))
    with pytest.raises(InputError, match=r"ids dimension 0 is 4; it must be 1 to 3"):
        engine(ids(4, 8))
    with pytest.raises(InputError, match="must be an int64 tensor"):
        engine(torch.ones(2, 8))


def test_the_report_lists_its_buckets(engine):
    text = str(engine.report())
    assert "engines: 4, inputs are padded to the next" in text and "the last one, of ids (3, 32):" in text
    assert list(engine.report().engines) == [f"ids {shape}" for shape in ((1, 16), (1, 32), (3, 16), (3, 32))]
    assert repr(engine) == "BucketEngine(ids (1 to 3, 2 to 32); on cpu, 4 engines)"
    assert engine.report().to_dict()["is_padded"] and engine.most_engines == 4
    checked = {shapes for shapes, report in engine.report().engines.items() if report.verification.result == "passed"}
    assert checked == {"ids (3, 32)", "ids (3, 16)"}  # the largest, and that of the example
    assert text.count("; not compared (other sizes of the same program were)") == 2 and "PyTorch: skipped" not in text


def test_what_only_engines_of_one_shape_have(engine):
    for refused in (
        lambda: engine.engine_for(ids(2, 8)),
        lambda: engine.signature,
        engine.cuda_source,
        lambda: setattr(engine, "most_engines", 2),
    ):
        with pytest.raises(InputError):
            refused()
    assert callable(engine.prepare(ids(2, 8)))


@pytest.mark.slow
@torch.no_grad()
def test_an_exported_program(model):
    dims = {"ids": {0: Dim("b", min=2, max=4), 1: Dim("n", min=2, max=32)}}
    program = torch.export.export(model, (ids(2, 8),), dynamic_shapes=dims, strict=False)
    engine = ranged(program, None, buckets={"ids[0]": [4], "ids[1]": [32]})
    for shape in ((2, 8), (4, 32), (3, 19)):
        assert_close(engine(ids(*shape)), model(ids(*shape)))


@pytest.mark.slow
@torch.no_grad()
def test_masks_of_places(model):
    mask = {"": masks.sliding_window(3) | masks.global_tokens([0])}
    engine = ranged(model, (ids(2, 8),), {"ids": {1: LENGTH}}, mask, buckets=[32])
    for length in (5, 32, 21):
        x = ids(2, length)
        assert_close(engine(x), stof_tvm.build(model, QUICK_LLVM, (x,), mask, verify=False)(x))


@pytest.mark.parametrize(
    "mask", [masks.bigbird(), masks.document([4, 28]), torch.ones(32, 32, dtype=torch.bool).tril()]
)
def test_masks_that_depend_on_lengths(model, mask):
    with pytest.raises(MaskError, match="depends on the lengths, or fits only one.*lazy=True"):
        ranged(model, (ids(2, 8),), {"ids": {1: LENGTH}}, mask, buckets=[32])


LOWEST = torch.finfo(torch.float32).min


def near(x):
    """A mask whose last row keeps nothing, and the last but one only the last key."""
    i = torch.arange(x.shape[1])
    return (i > i[:, None]) & (i < i[:, None] + 3)


EMPTIED = {
    "sdpa": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=near(x)),
    "fills of sdpa": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.where(near(x), 0.0, LOWEST)),
    "fills": lambda x: torch.softmax(torch.where(near(x), x @ x.mT, LOWEST), -1) @ x,
    "infinite fills": lambda x: torch.softmax(torch.where(near(x), x @ x.mT, -torch.inf), -1) @ x,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EMPTIED)
def test_rows_that_the_models_own_mask_empties(name):
    model = Model(EMPTIED[name])
    engine = ranged(model, torch.randn(2, 7, 16), {"x": {1: Dim("n", min=2, max=24)}}, buckets=[24], verify=False)
    for length in (9, 24):
        x = torch.randn(2, length, 16)
        torch.testing.assert_close(engine(x), model(x), atol=1e-5, rtol=1e-5, equal_nan=True)


def test_a_size_at_which_a_mask_keeps_nothing_is_named():
    told = r"its mask keeps nothing.*for inputs of x \(2, 1, 16\), .*a larger least size.*lazy=True"
    with pytest.raises(MaskError, match=told):
        ranged(Model(EMPTIED["sdpa"]), torch.randn(2, 7, 16), {"x": {1: Dim("n", min=1, max=8)}}, buckets=[8])


class Placed(nn.Module):
    """A table of positions of 9 rows, which PyTorch reads no row behind."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 8)

    def forward(self, x):
        return x + self.table(torch.arange(x.shape[1]))


@pytest.mark.parametrize("most, buckets", [(10, [10]), (20, [6, 20])])
def test_a_range_beyond_what_pytorch_computes_is_refused(most, buckets):
    """An engine gives NaN for positions behind a table."""
    told = rf"the model does not take inputs of x \(2, {most}, 8\), the largest of the range: IndexError: .*smaller max"
    for length in (5, 9):
        with pytest.raises(InputError, match=told):
            ranged(Placed(), torch.ones(2, length, 8), {"x": {1: Dim("n", min=2, max=most)}}, buckets=buckets)
    engine = ranged(Placed(), torch.ones(2, 5, 8), {"x": {1: Dim("n", min=2, max=9)}}, buckets=[9])
    assert not engine(torch.ones(2, 9, 8)).isnan().any()


def test_a_model_without_memory_for_the_largest_sizes_is_built():
    class Large(nn.Module):
        def forward(self, x):
            if not torch.compiler.is_compiling() and x.shape[1] == 12:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return x * 2

    engine = ranged(Large(), torch.ones(2, 5), {"x": {1: Dim("n", min=2, max=12)}}, buckets=[12])
    assert torch.equal(engine(torch.ones(2, 12)), torch.full((2, 12), 2.0))


def test_a_wrong_rule_is_found_by_verification(monkeypatch):
    class Mean(nn.Module):
        def forward(self, x):
            return x.exp().amax(1)

    monkeypatch.setitem(table.RULES, torch.ops.aten.amax.default, _unfilled)
    with pytest.raises(VerificationError, match="does not compute what the model does for inputs of"):
        ranged(Mean(), -torch.ones(2, 5, 8), {"x": {1: Dim("n", min=2, max=12)}}, buckets=[12])


def _unfilled(rewriter, node):
    value = rewriter.value(node.args[0])
    return type(value)((value.dims[0], value.dims[2]))


def test_what_is_refused(model):
    x = torch.randn(2, 8)
    n = Dim("n", max=99)
    with pytest.raises(UnsupportedError, match=r"aten.sort.default in the root module.*lazy=True compiles each shape"):
        ranged(Model(lambda x: x.sort(-1)[0]), x, {"x": {1: n}})
    with pytest.raises(InputError, match=r"x\[1\] has no largest size: give its Dim a max"):
        ranged(Scaled(), x, {"x": {1: Dim("n")}})
    with pytest.raises(UnsupportedError, match="the model updates 'calls', a state"):
        ranged(Counts(), x, {"x": {1: n}})
    with pytest.raises(ExportError, match=r"(?s)not exported for the whole range of shapes.*lazy=True"):
        ranged(Model(lambda x: x * 2 if x.shape[1] > 20 else x), x, {"x": {1: n}})
    with pytest.raises(InputError, match="buckets are sizes for dynamic_shapes without lazy=True"):
        ranged(Scaled(), x, buckets=[4])
    with pytest.raises(InputError, match=r"buckets\['x\[1\]'\] has 100; x\[1\] is 1 to 99"):
        ranged(Scaled(), x, {"x": {1: n}}, buckets=[100])
    with pytest.raises(InputError, match=r"buckets has 'y'; the sizes that may change are 'x\[1\]'"):
        ranged(Scaled(), x, {"x": {1: n}}, buckets={"y": [9]})


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return x * self.calls


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Numbers(nn.Module):
    """Results that are numbers of the shapes, and places that are no places where they are padding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(24, 8)
        self.register_buffer("few", torch.randn(24, 8))

    def forward(self, x):
        n = x.shape[1]
        back = n - 1 - torch.arange(n)
        y = x + self.table(back) + self.few[back] + self.few.index_select(0, back)
        return {"y": y, "half": n * 0.5, "root": n**0.5, "twice": 2 * n, "one": 1.0, "is": True}


@torch.no_grad()
def test_numbers_of_the_shapes_and_places_that_are_none():
    model = Numbers().eval()
    x = torch.randn(1, 9, 8)
    shapes = {"x": {1: Dim("n", min=2, max=24)}}
    engine = stof_tvm.build(model, QUICK_LLVM, (x,), dynamic_shapes=shapes, buckets=[12, 24])
    for n in (2, 7, 12, 23, 24):
        x = torch.randn(1, n, 8)
        found, expected = engine(x), model(x)
        torch.testing.assert_close(found.pop("y"), expected.pop("y"))
        assert found == expected and [type(v) for v in found.values()] == [type(v) for v in expected.values()]


class KeepsTable(nn.Module):
    """Computes its table in the first call, as rotary embeddings compute the frequencies of long inputs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x, refuses=False):
        table = getattr(self, "table", None)
        self.table = (torch.arange(8) * 2.0 if table is None else table).to(x.device)
        if refuses and x.sum() > 0:
            return x
        return self.linear(x) + self.table


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("least", [1, 2])
def test_a_model_that_keeps_a_table_is_left_right(verify, least):
    torch.manual_seed(0)
    model, x = KeepsTable().eval(), torch.randn(4, 8)
    expected = model.linear(x) + torch.arange(8) * 2.0
    more = {"dynamic_shapes": {"x": {0: Dim("n", min=least, max=8)}}, "buckets": [8], "verify": verify}
    for _ in range(2):
        engine = stof_tvm.build(model, QUICK_LLVM, (x,), tuning_logs=False, **more)
        torch.testing.assert_close(engine(x), expected)
        torch.testing.assert_close(model(x), expected)
        assert type(model.table) is torch.Tensor


def test_a_model_that_keeps_a_table_is_left_right_where_it_is_refused():
    torch.manual_seed(0)
    model, x = KeepsTable().eval(), torch.randn(4, 8)
    more = {"dynamic_shapes": {"x": {0: Dim("n", max=8)}, "refuses": None}, "buckets": [8]}
    with pytest.raises(ExportError, match="decides by a tensor's values"):
        stof_tvm.build(model, QUICK_LLVM, {"x": x, "refuses": True}, tuning_logs=False, **more)
    torch.testing.assert_close(model(x), model.linear(x) + torch.arange(8) * 2.0)


def test_a_table_in_a_global_that_the_export_left_without_values():
    tables: list[torch.Tensor] = []

    class KeepsOutside(KeepsTable):
        def forward(self, x):
            if not tables:
                tables.append(torch.arange(8) * 2.0)
            return self.linear(x) + tables[0]

    more = {"dynamic_shapes": {"x": {0: Dim("n", min=2, max=8)}}, "buckets": [8]}
    with pytest.raises(ExportError, match="without values.\nThe model keeps tensors outside of its modules"):
        stof_tvm.build(KeepsOutside().eval(), QUICK_LLVM, (torch.randn(4, 8),), tuning_logs=False, **more)


def test_each_size_is_told(caplog):
    length = {"x": {0: Dim("length", max=8)}}
    with caplog.at_level("INFO", "stof_tvm"):
        stof_tvm.build(Scaled(), QUICK_LLVM, (torch.ones(4, 8),), dynamic_shapes=length, buckets=[4, 8])
    told = [record.getMessage() for record in caplog.records if record.name == "stof_tvm"]
    assert told[0] == "a BucketEngine of x (1 to 8, 8) compiles 3 sizes"
    assert re.fullmatch(r"bucket 1 of 3 is compiled: x \(\d, 8\)", told[1]) and told[3].startswith("bucket 3 of 3")
