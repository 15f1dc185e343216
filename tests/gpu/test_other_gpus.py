"""A GPU that is not the current one: engines and `sparse_attention` run where their tensors are."""

import copy

import pytest
import torch
from torch import nn
from torch.export import Dim

import stof_tvm
from stof_tvm import masks, sparse_attention
from stof_tvm.dynamo.backend import stof
from stof_tvm.errors import InputError
from stof_tvm.masks import runtime

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
MASK = masks.sliding_window(16)
TOLERANCE = 2e-2
IDS = ["window", "strided", "pooled", "vertical and slash"]
HERE, THERE = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def the_current_gpu_stays():
    torch.cuda.set_device(HERE)
    yield
    assert torch.cuda.current_device() == HERE.index


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, activation="gelu", norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).half().eval()


def inputs(batch=2, length=200, device=THERE):
    return torch.randn(batch, length, 64, device=device, dtype=torch.float16)


@torch.no_grad()
def check(model, engine, batch=2, length=200, calls=3):
    exact = copy.deepcopy(model).float().to(THERE)
    for _ in range(calls):
        x = inputs(batch, length)
        y = engine(x)
        assert y.device == THERE
        expected = exact(x.float(), mask=~MASK.dense(length).to(THERE))
        assert (y.float() - expected).abs().max() < TOLERANCE
        assert torch.cuda.current_device() == HERE.index


def test_an_engine_is_where_the_example_is(model):
    engine = stof_tvm.build(copy.deepcopy(model).to(THERE), None, (inputs(),), MASK)
    assert engine.device == THERE and engine.report().verification.result == "passed"
    check(model, engine)
    assert engine.prepare().is_captured
    with pytest.raises(InputError, match="is on cuda:0; the engine runs on cuda:1"):
        engine(inputs(device=HERE))


def test_an_engine_of_cpu_tensors_is_on_the_current_gpu(model, tmp_path):
    with torch.cuda.device(THERE):
        engine = stof_tvm.build(model, "cuda -arch=sm_80", (inputs(device="cpu"),), MASK)
        engine.save(tmp_path / "model.stof")
        loaded = stof_tvm.load(tmp_path / "model.stof")
    for one in (engine, loaded):
        check(model, one)
    assert stof_tvm.load(tmp_path / "model.stof").device == HERE


def test_example_inputs_on_two_gpus(model):
    class Two(nn.Module):
        def forward(self, x, y):
            return model(x) + y.to(x.device)

    with pytest.raises(InputError, match="on cuda:0 and cuda:1; an engine is on one GPU"):
        stof_tvm.build(Two(), None, (inputs(), inputs(device=HERE)), MASK)


def test_engines_of_both_gpus_in_turns(model):
    engines = [stof_tvm.build(copy.deepcopy(model).to(d), None, (inputs(device=d),), MASK) for d in (HERE, THERE)]
    x = inputs(device="cpu")
    for _ in range(3):
        a, b = (engine(x.to(d)) for engine, d in zip(engines, (HERE, THERE)))
        assert a.device == HERE and torch.equal(a.cpu(), b.cpu())


def test_other_masks(model):
    engine = stof_tvm.build(
        copy.deepcopy(model).to(THERE), None, (inputs(),), masks.causal(), replaceable_masks=True, verify=False
    )
    check(model, engine.with_mask(MASK))


@pytest.mark.parametrize("lazy", [True, False])
def test_ranges(model, lazy):
    engine = stof_tvm.build(
        copy.deepcopy(model).to(THERE),
        None,
        (inputs(),),
        MASK,
        dynamic_shapes={"src": {1: Dim("length", min=2, max=200)}},
        lazy=lazy,
        **({} if lazy else {"buckets": {"src[1]": [64, 200]}}),
    )
    for length in (200, 50):
        check(model, engine, length=length, calls=2)


def test_batches_without_padding():
    from tests.gpu.test_packed_on_gpu import LONGEST, Encoder, batch, compare

    model = Encoder(torch.float16).eval()
    ids, mask = (x.to(THERE) for x in batch([LONGEST, 5, 1]))
    engine = stof_tvm.build(copy.deepcopy(model).to(THERE), None, (ids, mask), without_padding=True)
    assert engine.device == THERE
    for lengths in ([3, 7], [LONGEST, 1, 2]):
        ids, mask = batch(lengths)
        compare(copy.deepcopy(model).float(), engine(ids.to(THERE), mask.to(THERE)), ids, mask)


def test_the_backend_of_torch_compile(model):
    x = inputs()
    compiled = torch.compile(copy.deepcopy(model).to(THERE), backend=stof)
    with torch.no_grad():
        expected = copy.deepcopy(model).float().to(THERE)(x.float())
        for _ in range(3):
            y = compiled(x)
            assert y.device == THERE and (y.float() - expected).abs().max() < TOLERANCE


def test_generation():
    transformers = pytest.importorskip("transformers")
    from stof_tvm.generation import generate

    torch.manual_seed(0)
    sizes = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)
    config = transformers.LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=128, **sizes)
    model = transformers.LlamaForCausalLM(config).float().eval().to(THERE)
    ids = torch.randint(0, 96, (1, 20), device=THERE)
    found = generate(model, ids, max_new_tokens=8, do_sample=False)
    assert found.device == THERE and torch.equal(found, model.generate(ids, max_new_tokens=8, do_sample=False))
    with pytest.raises(InputError, match="ids are on cuda:0; the engines run on cuda:1"):
        generate(model, ids.to(HERE), max_new_tokens=8)


@pytest.mark.parametrize(
    "mask", [MASK, masks.strided(16), runtime.top_blocks(2), runtime.vertical_slash(8, 8)], ids=IDS
)
@pytest.mark.parametrize("captured", [False, True])
def test_sparse_attention(mask, captured):
    q, k, v = (torch.randn(1, 2, 256, 64, device=THERE, dtype=torch.float16) for _ in range(3))
    out = sparse_attention(q, k, v, mask)
    assert out.device == THERE and torch.cuda.current_device() == HERE.index
    expected = sparse_attention(*(x.to(HERE) for x in (q, k, v)), mask)
    assert torch.equal(out.cpu(), expected.cpu())
    if captured:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(THERE)
        with torch.cuda.device(THERE), torch.cuda.graph(graph, stream=stream):
            again = sparse_attention(q, k, v, mask)
        again.zero_()
        with torch.cuda.device(THERE):
            graph.replay()
            torch.cuda.synchronize()
        assert torch.equal(again, out)
