"""Spaces of attention with a mask."""

from stof_tvm import masks
from tir_kernels.attention.block_wise import cost as cuda_cost
from tir_kernels.attention.block_wise import kernel as block_wise_cuda
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.row_wise import kernel as row_wise_cuda
from tir_kernels.attention.warp_specialized import kernel as warp_specialized
from tir_kernels.target import parse_target
from tir_kernels.tuning.attention_spaces import attention_spaces, mask_digest

SM_80 = parse_target("cuda -arch=sm_80")


def problem(q_len=256, kv_len=256, dtype="float16"):
    return AttentionProblem(1, 2, 2, q_len, kv_len, 64, 64, dtype, 0.125)


def test_equal_masks_of_any_kind_have_one_digest():
    window = masks.sliding_window(16)
    digest = mask_digest(problem(), window)
    assert digest == mask_digest(problem(), masks.from_tensor(window.dense(256)))
    assert digest != mask_digest(problem(), masks.sliding_window(17))
    assert mask_digest(problem(), None) == mask_digest(problem(), ~(window & ~window))


def test_the_usual_tiles_with_any_number_of_stages():
    (space,) = attention_spaces(problem(), masks.sliding_window(16), SM_80)
    assert space.template is block_wise_cuda
    assert all(cuda_cost.is_candidate(config) for config in space.configs)
    assert space.decisions["stages"] == (1, 2, 3) and space.decisions["token_stride"] == (1,)
    assert space.decisions["warpgroup"] == (0,)
    spaces = attention_spaces(problem(), masks.sliding_window(16), parse_target("cuda -arch=sm_90a"))
    assert [space.template for space in spaces] == [block_wise_cuda, warp_specialized]
    assert spaces[0].decisions["warpgroup"] == (0, 1)
    assert spaces[1].decisions["block_m"] == (64, 128, 192) and spaces[1].decisions["stages"] == (2, 3)


def test_tokens_at_a_stride_where_the_mask_keeps_such():
    (space,) = attention_spaces(problem(), masks.dilated_window(20, 4), SM_80)
    assert space.decisions["token_stride"] == (1, 4)
    (space,) = attention_spaces(problem(), masks.strided(32), SM_80)
    assert space.decisions["token_stride"] == (1,), "its near part is another workload"


def test_row_wise_and_block_wise_for_decoding():
    spaces = attention_spaces(problem(1, 1024), None, SM_80)
    assert [space.template for space in spaces] == [block_wise_cuda, row_wise_cuda]


def test_llvm_templates_have_spaces_too():
    spaces = attention_spaces(problem(dtype="float32"), masks.causal(), parse_target("llvm"))
    assert [space.name for space in spaces] == ["llvm block-wise", "llvm row-wise"]
