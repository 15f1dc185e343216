"""`sparse_attention`, engines and `masks.recall` in functions that PyTorch compiles, traces or transforms."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import stof_tvm
from stof_tvm import masks, sparse_attention
from stof_tvm.errors import ExportError, InputError, MaskError
from stof_tvm.launches import planned
from stof_tvm.running.bounded_cache import BoundedCache
from tests.models.quick_llvm import QUICK_LLVM

MASK = masks.sliding_window(3) & masks.causal()
RULE = masks.runtime.xattention(block=32, mass=0.5)
WITHOUT_DATA = "torch.export.*compiled kernel"


@pytest.fixture(autouse=True)
def quick_kernels(monkeypatch):
    """Kernels without LLVM's optimizer, and none that a call before has planned."""
    monkeypatch.setattr(planned, "target_of", lambda device: QUICK_LLVM)
    monkeypatch.setattr(planned, "plans", BoundedCache(lambda plan: 1, 64, 64))
    torch._dynamo.reset()


@pytest.fixture
def qkv():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 80, 16, generator=generator) for _ in range(3)]


@pytest.fixture(scope="module")
def engine():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return F.scaled_dot_product_attention(q, k, v)

    inputs = tuple(torch.randn(1, 2, 80, 16) for _ in range(3))
    return stof_tvm.build(Model(), QUICK_LLVM, inputs, mask=RULE)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("mask", [RULE, masks.sliding_window(7), None], ids=["rule", "mask", "none"])
def test_a_compiled_function(backend, mask, qkv):
    """The first call plans the kernel, the second one finds it."""
    q, k, v = qkv
    compiled = torch.compile(lambda q: sparse_attention(q * 2, k, v, mask) + 1, backend=backend)
    cold, warm = compiled(q), compiled(q)
    assert torch.equal(cold, sparse_attention(q * 2, k, v, mask) + 1)
    assert torch.equal(warm, cold)


def test_more_masks_and_shapes_than_a_graph_is_compiled_for():
    """TorchDynamo leaves a frame alone that it has compiled eight times, but not what the frame calls."""
    compiled = torch.compile(lambda x, mask: sparse_attention(x * 2, x, x, mask) + 1, backend="eager")
    for n in range(8, 20):
        x, mask = torch.randn(1, 1, n, 16), masks.sliding_window(n % 5) & masks.causal()
        assert torch.equal(compiled(x, mask), sparse_attention(x * 2, x, x, mask) + 1)


def test_torchdynamo_is_not_imported_with_it():
    script = "import sys, stof_tvm.attention, stof_tvm.engine; assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_one_whole_graph_is_refused_with_the_reason(qkv):
    q, k, v = qkv
    compiled = torch.compile(lambda q: sparse_attention(q, k, v), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="stof_tvm.build the model and the mask"):
        compiled(q)


@pytest.mark.parametrize("mask", [RULE, masks.sliding_window(7)], ids=["rule", "mask"])
@pytest.mark.parametrize("is_known", [False, True], ids=["cold", "warm"])
def test_tensors_without_data(mask, is_known, qkv):
    q, k, v = qkv
    if is_known:
        sparse_attention(q, k, v, mask)
    mode = FakeTensorMode()
    fake = [mode.from_tensor(x) for x in qkv]

    def under_the_mode():
        with mode:
            sparse_attention(*fake, mask)

    def beside_others():
        with FakeTensorMode(allow_non_fake_inputs=True):
            sparse_attention(q, k, v, mask)

    calls = {
        "fake": lambda: sparse_attention(*fake, mask),
        "a fake bias": lambda: sparse_attention(q, k, v, mask, bias=mode.from_tensor(torch.zeros(80, 80))),
        "a mode": under_the_mode,
        "a mode of other tensors": beside_others,
        "vmap": lambda: torch.vmap(lambda q: sparse_attention(q, k[0], v[0], mask))(q),
        "vmap of values": lambda: torch.vmap(lambda v: sparse_attention(q, k, v, mask))(v[None]),
        "jvp": lambda: torch.func.jvp(lambda q: sparse_attention(q, k, v, mask), (q,), (q,)),
        "torch.jit": lambda: torch.jit.trace(lambda q: sparse_attention(q, k, v, mask), (q,)),
        "make_fx": lambda: make_fx(lambda q: sparse_attention(q, k, v, mask))(q),
        "before dispatch": lambda: make_fx(lambda q: sparse_attention(q, k, v, mask), pre_dispatch=True)(q),
    }
    for call in calls.values():
        with pytest.raises(InputError, match=WITHOUT_DATA):
            call()
    assert sparse_attention(q, k, v, mask).isfinite().all()  # nothing of these calls is kept


@pytest.mark.parametrize(
    "function",
    [
        lambda q: q[..., :1] * MASK.dense(80)[0],
        lambda q: q * MASK.density(80),
        lambda q: q * MASK.compile(80, 80).density,
        lambda q: q * RULE.mask(q, q).dense(80)[..., :16],
        lambda q: q * masks.recall(MASK, q, q).mean,
        lambda q: q * masks.recall(RULE, q, q).mean,
    ],
    ids=["dense", "density", "compile", "rule.mask", "recall", "recall of a rule"],
)
def test_what_a_mask_keeps_in_a_compiled_function(qkv, function):
    q = qkv[0]
    assert torch.equal(torch.compile(function, backend="eager")(q), function(q))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="computed at once, with NumPy"):
        torch.compile(function, backend="eager", fullgraph=True)(q)


def test_a_model_that_calls_it_is_not_exported(qkv):
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return sparse_attention(q, k, v, RULE)

    with pytest.raises(InputError, match=WITHOUT_DATA):
        torch.export.export(Model(), tuple(qkv))
    with pytest.raises(ExportError, match=WITHOUT_DATA):
        stof_tvm.build(Model(), QUICK_LLVM, tuple(qkv))


@pytest.mark.parametrize(
    "trace",
    [
        lambda module, x: torch.export.export(module, (x,), strict=False),
        lambda module, x: make_fx(module)(x),
        lambda module, x: make_fx(module, pre_dispatch=True)(x),
        lambda module, x: torch.jit.trace(module, (x,)),
    ],
    ids=["export", "make_fx", "before dispatch", "jit"],
)
def test_while_another_thread_traces(qkv, engine, trace):
    outs: list[torch.Tensor] = []

    class Model(torch.nn.Module):
        def forward(self, x):
            if not outs:
                with ThreadPoolExecutor(1) as other:
                    outs.extend(
                        [
                            other.submit(sparse_attention, *qkv, masks.causal()).result(),
                            other.submit(engine, *qkv).result(),
                        ]
                    )
            return x + 1

    trace(Model(), torch.zeros(2))
    assert torch.equal(outs[0], sparse_attention(*qkv, masks.causal()))
    assert torch.equal(outs[1], engine(*qkv))


def test_a_mask_without_data(qkv):
    keep = torch.ones(2, 80, 80, dtype=torch.bool)
    for call in (
        lambda: torch.vmap(lambda keep: sparse_attention(*qkv, keep))(keep),
        lambda: sparse_attention(*qkv, FakeTensorMode().from_tensor(keep)),
        lambda: masks.from_tensor(keep.to("meta")),
    ):
        with pytest.raises(MaskError, match="without data|on meta"):
            call()


def test_recall_without_data(qkv):
    q, k, _ = qkv
    for mask in (RULE, masks.causal()):
        for call in (
            lambda mask=mask: masks.recall(mask, *(FakeTensorMode().from_tensor(x) for x in (q, k))),
            lambda mask=mask: masks.recall(mask, q.to("meta"), k.to("meta")),
            lambda mask=mask: torch.vmap(lambda q: masks.recall(mask, q, k).heads)(q[None]),
        ):
            with pytest.raises(InputError, match="without data|on meta"):
                call()


def test_an_engine_without_data(engine, qkv):
    expected = engine(*qkv)
    mode = FakeTensorMode()

    def under_the_mode():
        with mode:
            engine(*(mode.from_tensor(x) for x in qkv))

    calls = {
        "fake": lambda: engine(*(mode.from_tensor(x) for x in qkv)),
        "a mode": under_the_mode,
        "vmap": lambda: torch.vmap(engine)(*(x[None] for x in qkv)),
    }
    for call in calls.values():
        with pytest.raises(InputError, match="engine computes at once"):
            call()
    assert torch.equal(engine(*qkv), expected)


def test_an_engine_in_a_compiled_function(engine, qkv):
    q, k, v = qkv
    compiled = torch.compile(lambda q: engine(q * 2, k, v) + 1, backend="eager")
    assert torch.equal(compiled(q), engine(q * 2, k, v) + 1)
