"""Predictions for meshes: what they are made of, and what they say of models that were measured."""

from dataclasses import replace

import pytest

from stof_tvm import masks
from stof_tvm.errors import InputError, MaskError
from stof_tvm.parallel import context_plan
from stof_tvm.parallel.planning import meshes as simulated
from stof_tvm.parallel.planning.advice import advice
from stof_tvm.parallel.planning.links import Links
from stof_tvm.parallel.planning.meshes import Simulation, meshes
from stof_tvm.parallel.planning.model import PlannedModel
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.select import choose
from tir_kernels.cuda.device import gpu_of
from tir_kernels.target import parse_target

H200 = parse_target("cuda -arch=sm_90a")
BERT_LARGE = PlannedModel(2048, 8, 24, 16, 16, 64, 1024, 4096, False, "float16")
LLAMA = PlannedModel(2048, 1, 32, 32, 32, 128, 4096, 11008, True, "bfloat16")


def test_one_gpu_is_the_kernel_that_is_chosen_and_the_products():
    found = Simulation(masks.sliding_window(64), BERT_LARGE, H200, Links()).on_one()
    problem = AttentionProblem(8, 16, 16, 2048, 2048, 64, 64, "float16", 0.125)
    assert found.own_us == choose(problem, masks.sliding_window(64), H200).predicted_us
    assert found.received_us == found.exchange_us == found.reduce_us == found.moved_bytes == 0
    assert found.layer_us == found.own_us + found.products_us + found.norms_us
    assert found.speedup == found.efficiency == 1
    assert 15 < found.total_ms < 19  # 17 measured on an H200


def test_tensor_ranks_share_products_and_reduce_twice():
    simulation = Simulation(masks.causal(), LLAMA, H200, Links())
    one, two = simulation.on_one(), simulation.on(2, 1)
    assert two.products_us == pytest.approx(one.products_us / 2) and two.exchange_us == 0
    assert two.reduce_us == 2 * Links().sum_us(2048 * 4096 * 2, 2, gpu_of(H200).bandwidth)
    assert two.speedup == pytest.approx(one.total_ms / two.total_ms) and two.efficiency == two.speedup / 2
    assert 39 < one.total_ms < 45  # 41 measured on an H200


def test_context_ranks_move_what_plans_say():
    model = replace(LLAMA, length=16384, kv_heads=8)
    mask = masks.sliding_window(256)
    found, plan = Simulation(mask, model, H200, Links()).on(1, 4), context_plan(mask, 16384, 4)
    row = 2 * 128 * 2  # bytes of a token's key and value of a head
    assert found.moved_bytes == plan.received_rows(8).sum() * row
    assert found.received_bytes == plan.received_rows(8).max() * row == 8 * row * 512
    assert found.exchange_us == Links().exchange_us(found.received_bytes, True)
    assert found.layer_us == pytest.approx(
        max(found.own_us, found.exchange_us) + found.received_us + found.copies_us + found.products_us + found.norms_us
    )
    both = Simulation(mask, model, H200, Links()).on(2, 2)
    assert both.received_bytes == 4 * row * 256  # each with half of the heads


def test_ranks_beyond_a_host_are_slower():
    model = replace(LLAMA, length=16384)
    times = [Simulation(masks.causal(), model, H200, Links(host)).on(1, 4).exchange_us for host in (2, 4)]
    assert times[0] > times[1]


def test_heads_are_shared_out_with_their_masks():
    model = replace(LLAMA, length=1024, q_heads=4, kv_heads=4)
    causal, narrow = masks.causal(), masks.sliding_window(8)
    mixed = Simulation(masks.per_head([narrow, narrow, causal, causal]), model, H200, Links()).on(2, 1)
    alike = Simulation(causal, model, H200, Links()).on(2, 1)
    assert mixed.own_us == pytest.approx(alike.own_us)  # the slower half


def test_large_masks_are_scaled_from_pieces(monkeypatch):
    model = replace(LLAMA, length=32768)
    mask = masks.sliding_window(2048)
    whole = Simulation(mask, model, H200, Links()).on_one().own_us
    monkeypatch.setattr(simulated, "LARGEST_GRID", (32768 // 16) * (32768 // 32) // 4)
    assert Simulation(mask, model, H200, Links()).on_one().own_us == pytest.approx(whole, rel=0.15)


def test_meshes_that_the_sizes_allow():
    assert list(meshes(replace(LLAMA, kv_heads=8), 16)) == [(1, 16), (2, 8), (4, 4), (8, 2)]
    assert list(meshes(replace(LLAMA, length=100), 16)) == [(2, 8), (4, 4), (8, 2), (16, 1)]
    assert list(meshes(replace(LLAMA, kv_heads=1, q_heads=32), 6)) == [(1, 6)]


def test_a_model_too_small_to_gain_is_told_so():
    small = replace(BERT_LARGE, batch=1, length=512)
    for model, gpus in ((small, 2), (BERT_LARGE, 4)):
        simulation = Simulation(masks.sliding_window(64), model, H200, Links())
        text = advice([simulation.on(*mesh) for mesh in meshes(model, gpus)], gpus)
        assert text.startswith("too small to gain from tensor parallelism: tensor parallelism of")
        assert f"a copy of the model on each GPU serves {gpus}× the requests, or the sequence cut among" in text


def test_advice_for_models_that_gain():
    simulation = Simulation(masks.causal(), LLAMA, H200, Links())
    found = [simulation.on(2, 1)]
    assert advice(found, 2) == f"take tensor parallelism of 2: {found[0].speedup:.2f}× one GPU"
    poor = [replace(found[0], efficiency=0.5, speedup=1.0)]
    assert advice(poor, 2).startswith("a copy of the model on each GPU serves 2× the requests; for one request tensor")
    assert "one GPU" in advice([simulation.on_one()], 1)


@pytest.mark.parametrize(
    ("mask", "error", "why"),
    [
        (masks.padding([5, 6]), InputError, "depends on the batch entry"),
        (masks.per_head([masks.causal()] * 3), MaskError, "does not broadcast"),
    ],
)
def test_masks_that_do_not_fit(mask, error, why):
    with pytest.raises(error, match=why):
        Simulation(mask, BERT_LARGE, H200, Links())


def test_heads_must_be_multiples():
    with pytest.raises(InputError, match="heads=32 must be a multiple of kv-heads=5"):
        replace(LLAMA, kv_heads=5)
