"""What only a GPU can show: kernels and engines on CUDA tensors, streams, artifacts, code built for an older GPU."""

import gc
import time

import pytest
import torch
import torch.nn.functional as F

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import InputError
from stof_tvm.launches import planned
from stof_tvm.running.cuda_program import CudaProgram

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def qkv(batch=2, heads=4, q_len=257, kv_len=None, dim=64, kv_heads=None, dtype=torch.float16):
    kv_len, kv_heads = kv_len or q_len, kv_heads or heads
    shapes = (batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, dim)
    return [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]


def assert_like_torch(q, k, v, mask, bias=None, **kwargs):
    """Error at most twice that of PyTorch in the same precision, both against float32."""
    out = stof_tvm.sparse_attention(q, k, v, mask, bias=bias, **kwargs)
    dense = mask.dense(q.shape[2], k.shape[2]).cuda()
    if bias is not None:
        dense = bias.float().masked_fill(~dense, -torch.inf)
    gqa = {"enable_gqa": kwargs.get("enable_gqa", False)}
    exact = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=dense, **gqa)
    half_mask = dense if dense.dtype == torch.bool else dense.to(q.dtype)
    half = F.scaled_dot_product_attention(q, k, v, attn_mask=half_mask, **gqa).float()
    error, half_error = (out.float() - exact).abs().max(), (half - exact).abs().max()
    assert error <= 2 * half_error + 1e-5, f"{error} against {half_error}"
    return out


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sparse_attention(dtype):
    assert_like_torch(*qkv(dtype=dtype), masks.bigbird())
    assert_like_torch(*qkv(kv_heads=2, dtype=dtype), masks.causal(), enable_gqa=True)
    assert_like_torch(*qkv(q_len=113, kv_len=203, dtype=dtype), masks.longformer())


@pytest.mark.parametrize("q_len", [1, 7])
def test_decoding(q_len):
    """Few queries against a long cache go to the row-wise kernel, split over the cache."""
    q, k, v = qkv(heads=8, kv_heads=2, q_len=q_len, kv_len=5000)
    keep = torch.rand(q_len, 5000, generator=torch.Generator().manual_seed(3)) < 0.2
    for _ in range(2):  # the second finds the workspace as the first left it
        assert_like_torch(q, k, v, masks.from_tensor(keep), enable_gqa=True, kernel="row-wise")


def test_bias_and_padding():
    bias = torch.randn(1, 4, 257, 257, device="cuda", dtype=torch.float16)
    assert_like_torch(*qkv(), masks.sliding_window(20), bias=bias)
    assert_like_torch(*qkv(), masks.padding([257, 31]) & masks.causal())


def test_transposed_views_and_odd_strides():
    packed = torch.randn(2, 257, 3, 4, 64, device="cuda", dtype=torch.float16)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    assert_like_torch(q, k, v, masks.causal())
    assert_like_torch(*(x.contiguous() for x in (q, k, v)), masks.causal())
    shifted = torch.randn(2, 257, 3, 4 * 64 + 1, device="cuda", dtype=torch.float16)[..., 1:]  # copied: odd strides
    assert_like_torch(*(x.unflatten(2, (4, 64)).transpose(1, 2) for x in shifted.unbind(2)), masks.causal())


def test_on_the_callers_stream():
    """Behind a long-running kernel on the same side stream, the attention must wait for its input."""
    q, k, v = qkv()
    mask = masks.causal()
    expected = stof_tvm.sparse_attention(q, k, v, mask)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(q)
        torch.cuda._sleep(100_000_000)
        late.copy_(q)
        actual = stof_tvm.sparse_attention(late, k, v, mask)
    stream.synchronize()
    torch.testing.assert_close(actual, expected, atol=0, rtol=0)


def test_captured_in_a_cuda_graph():
    q, k, v = qkv()
    mask = masks.sliding_window(20)
    stof_tvm.sparse_attention(q, k, v, mask)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = stof_tvm.sparse_attention(q, k, v, mask)
    for x in (q, k, v):
        x.copy_(torch.randn_like(x))
    graph.replay()
    torch.testing.assert_close(captured, stof_tvm.sparse_attention(q, k, v, mask), atol=0, rtol=0)


def test_a_captured_call_outlives_the_cache_of_masks_and_clears_nothing():
    x = qkv(1, 64, 1024)
    expected = stof_tvm.sparse_attention(*x, masks.causal())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [stof_tvm.sparse_attention(*x, masks.causal()) for _ in range(8)]
    planned.plans.clear()
    gc.collect()
    # The lists' memory would be given to these.
    overwritten = [torch.full((n,), 2**30, device="cuda", dtype=torch.int32) for n in range(128, 60000, 128)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in captured) and overwritten
    names = [event.name for event in profile.events()]
    assert len([name for name in names if "sparse_attention" in name]) == 24
    assert not any("Fill" in name or "Memset" in name for name in names)


@pytest.mark.parametrize("heads, mask", [(64, None), (64, masks.causal()), (4, masks.longformer(32, 32))])
def test_calls_on_two_streams_do_not_meet(heads, mask):
    """More block rows than CTAs are taken from a counter; with global tokens, long rows are merged in a workspace."""
    inputs = [qkv(1, heads, 1024) for _ in range(2)]
    expected = [stof_tvm.sparse_attention(*x, mask) for x in inputs]
    streams = [torch.cuda.Stream() for _ in range(2)]
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    torch.cuda.synchronize()
    captured = []
    for graph, x in zip(graphs, inputs):
        with torch.cuda.graph(graph):
            captured.append([stof_tvm.sparse_attention(*x, mask) for _ in range(20)])
    for _ in range(10):
        eager = []
        for stream, graph, x in zip(streams, graphs, inputs):
            with torch.cuda.stream(stream):
                graph.replay()
                eager.append([stof_tvm.sparse_attention(*x, mask) for _ in range(5)])
        torch.cuda.synchronize()
        for outputs, once in zip([a + b for a, b in zip(captured, eager)], expected):
            assert all(torch.equal(out, once) for out in outputs)


@pytest.mark.parametrize("mode, tolerance", [("ieee", 1e-5), ("tf32", 5e-3)])
def test_float32(mode, tolerance):
    q, k, v = qkv(dtype=torch.float32)
    out = stof_tvm.sparse_attention(q, k, v, masks.causal(), float32=mode)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    assert (out - expected).abs().max() < tolerance


@pytest.fixture(scope="module")
def layer():
    torch.manual_seed(0)
    return torch.nn.TransformerEncoderLayer(128, 4, 256, batch_first=True).eval().half().cuda()


def expected_of(layer, x, mask):
    with torch.no_grad():
        return layer(x, src_mask=~mask.dense(x.shape[1]).cuda())


@pytest.mark.parametrize("target", [None, "cuda -arch=sm_80"], ids=["this GPU", "sm_80"])
def test_engine(layer, target, tmp_path):
    x = torch.randn(2, 200, 128, device="cuda", dtype=torch.float16)
    mask = masks.sliding_window(16)
    engine = stof_tvm.build(layer, target, (x,), mask=mask)
    assert all(site.rewritten for site in engine.report().sites)
    assert (engine(x) - expected_of(layer, x, mask)).abs().max() < 2e-2
    engine.save(tmp_path / "layer.stof")
    loaded = stof_tvm.load(tmp_path / "layer.stof")
    torch.testing.assert_close(loaded(x), engine(x), atol=0, rtol=0)
    with pytest.raises(InputError, match="runs on cuda"):
        engine(x.cpu())


def test_an_engine_captured_in_a_cuda_graph(layer):
    x, mask = torch.randn(2, 200, 128, device="cuda", dtype=torch.float16), masks.sliding_window(16)
    engine = stof_tvm.build(layer, None, (x,), mask=mask)
    engine(x)
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    captured = []
    for graph in graphs:
        with torch.cuda.graph(graph):
            captured.append(engine(x))
    x.copy_(torch.randn_like(x))
    expected = engine(x)
    for graph, out in zip(graphs, captured, strict=True):
        graph.replay()
        engine(torch.zeros_like(x))
        torch.testing.assert_close(out, expected, atol=0, rtol=0)


@pytest.fixture
def engine(layer):
    x = torch.zeros(2, 200, 128, device="cuda", dtype=torch.float16)
    return stof_tvm.build(layer, None, (x,), mask=masks.bigbird(), verify=False)  # which would capture the graph


def test_replays_equal_the_first_call(layer, engine):
    """Each call has inputs and outputs of its own; those of earlier calls stay as they were."""
    inputs = [torch.randn(2, 200, 128, device="cuda", dtype=torch.float16) for _ in range(3)]
    assert "captures" in engine.report().execution
    first, *later = [engine(x) for x in inputs]
    assert engine.report().execution == "replays of a CUDA graph"
    again = engine(inputs[0])
    torch.testing.assert_close(again, first, atol=0, rtol=0)
    for x, out in zip(inputs, [first, *later], strict=True):
        assert (out - expected_of(layer, x, masks.bigbird())).abs().max() < 2e-2
    assert len({out.data_ptr() for out in (first, *later, again)}) == 4


def test_outputs_can_be_reused(engine):
    inputs = [torch.randn(2, 200, 128, device="cuda", dtype=torch.float16) for _ in range(3)]
    expected = [engine(x) for x in inputs]
    engine.reuse_outputs = True
    places = set()
    for x, wanted in zip(inputs, expected, strict=True):
        out = engine(x)
        places.add(out.data_ptr())
        torch.testing.assert_close(out, wanted, atol=0, rtol=0)
    assert len(places) == 1


def test_weights_are_held_once_and_memory_stays_flat():
    """All of the GPU's memory is looked at, so nothing else may run on it."""

    def used():
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    def build(layers):
        model = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(layers)))
        return stof_tvm.build(model.half(), None, x)

    x = (torch.randn(16, 4096, dtype=torch.float16),)
    on_gpu = x[0].cuda()
    # What the first engine of a process needs: kernels, streams, buffers of the driver.
    first = build(1)
    for _ in range(3):
        first(on_gpu)
    torch.cuda.empty_cache()
    before = used()
    engine = build(8)  # 256 MiB of weights
    for _ in range(3):
        engine(on_gpu)
    after_three = used()
    assert after_three - before < 1.2 * (256 << 20), f"{(after_three - before) >> 20} MiB for 256 MiB of weights"
    for _ in range(1000):
        engine(on_gpu)
    assert used() == after_three


def test_a_reduction_to_one_number():
    class Doubled(torch.nn.Module):
        def forward(self, x):
            return torch.where(torch.isinf(x).any(), 2 * x, x)

    x = torch.randn(3, 1001, 7, device="cuda", dtype=torch.float16)
    engine = stof_tvm.build(Doubled(), None, (x.cpu(),))
    torch.testing.assert_close(engine(x), x, atol=0, rtol=0)
    for position in (0, 12345, x.numel() - 1):
        y = x.clone()
        y.view(-1)[position] = -torch.inf
        torch.testing.assert_close(engine(y), 2 * y, atol=0, rtol=0)


def test_an_engine_whose_program_needs_the_host(engine):
    """Such a program cannot be captured; it runs, and the report says why it is not replayed."""
    x = torch.randn(2, 200, 128, device="cuda", dtype=torch.float16)
    expected = engine(x)
    captured = engine._program

    def program(*args):
        torch.cuda.current_stream().synchronize()
        return captured._program(*args)

    engine._program = CudaProgram(program, engine._memory, x.device, engine.inputs_in_place, captured._weights)
    for _ in range(2):
        torch.testing.assert_close(engine(x), expected, atol=0, rtol=0)
    assert "without a CUDA graph, because capturing failed" in engine.report().execution
    assert str(engine.report()).endswith(engine.report().execution)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.randn_like(x).isfinite().all(), "PyTorch still believes in the capture"


def test_engines_do_not_write_each_others_memory(layer):
    """Replays on two streams at once, of engines whose memory is of the same sizes."""
    x = torch.randn(2, 200, 128, device="cuda", dtype=torch.float16)
    engines = [stof_tvm.build(layer, None, (x,), mask=mask) for mask in (masks.causal(), masks.sliding_window(9))]
    expected = [engine(x) for engine in engines]
    streams = [torch.cuda.Stream() for _ in engines]
    torch.cuda.synchronize()
    outputs = [[], []]
    for _ in range(50):
        for engine, stream, some in zip(engines, streams, outputs, strict=True):
            with torch.cuda.stream(stream):
                some.append(engine(x))
    torch.cuda.synchronize()
    for some, wanted in zip(outputs, expected, strict=True):
        assert all(torch.equal(out, wanted) for out in some)


def test_engine_on_the_callers_stream(layer):
    x = torch.randn(2, 200, 128, device="cuda", dtype=torch.float16)
    engine = stof_tvm.build(layer, None, (x,), mask=masks.causal())
    expected = engine(x)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(x)
        torch.cuda._sleep(100_000_000)
        late.copy_(x)
        actual = engine(late)
    stream.synchronize()
    torch.testing.assert_close(actual, expected, atol=0, rtol=0)


def test_an_engine_shared_by_streams(layer):
    """Its calls share memory, so one must not start before the other has ended, whatever their streams."""
    mask = masks.longformer()
    inputs = [torch.randn(2, 1000, 128, device="cuda", dtype=torch.float16) for _ in range(2)]
    engine = stof_tvm.build(layer, None, (inputs[0],), mask=mask)
    expected = [engine(x) for x in inputs]
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(400_000_000)  # 0.2 s
        outputs = [engine(inputs[0])]
    with torch.cuda.stream(second):
        outputs.append(engine(inputs[1]))
        done = second.record_event()
    time.sleep(0.05)
    assert not done.query(), "the second call did not wait for the first"
    torch.cuda.synchronize()
    for actual, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(actual, wanted, atol=0, rtol=0)
