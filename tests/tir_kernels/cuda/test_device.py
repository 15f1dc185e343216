"""The records of GPUs: found from targets, the only place of such numbers, and all that a new GPU needs."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm

from stof_tvm import masks
from tir_kernels import target as targets
from tir_kernels.attention.block_wise import kernel as block_wise_cuda
from tir_kernels.attention.block_wise import work
from tir_kernels.attention.block_wise.work import plan_work
from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.attention.row_wise import operands as row_wise
from tir_kernels.attention.select import choose
from tir_kernels.attention.warp_specialized import kernel as warp_specialized
from tir_kernels.cuda import device
from tir_kernels.cuda.dependent_launch import can_depend
from tir_kernels.cuda.device import GPU, GPUS, H200, gpu_of, has_wgmma
from tir_kernels.errors import TargetError
from tir_kernels.fusion.gemm import gemm, gemv
from tir_kernels.fusion.gemm.sizes.geometry import GemmGeometry
from tir_kernels.fusion.mlp import mlp
from tir_kernels.fusion.problem import GemmProblem, MlpProblem, Norm, RowProblem
from tir_kernels.fusion.rows import norm
from tir_kernels.masks.block_sparse import BlockSparseMask
from tir_kernels.target import cuda_arch, parse_target

ROOT = Path(__file__).parents[3]
A100, *_ = GPUS
SM_80, SM_90A = parse_target("cuda -arch=sm_80"), parse_target("cuda -arch=sm_90a")


# -- from a target to its GPU -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target, name",
    [
        ("cuda -arch=sm_80", "a100"),
        ("cuda -arch=sm_90", "h200"),
        ("cuda -arch=sm_90a", "h200"),
        ("nvidia/nvidia-a100", "a100"),
        ("nvidia/nvidia-h100", "h100"),  # by the L2 cache, which is all that TVM keeps of a tag
        ({"kind": "cuda", "arch": "sm_90a", "tag": "nvidia/nvidia-h100"}, "h100"),
        ({"kind": "cuda", "arch": "sm_90a", "tag": "nvidia/nvidia-h100", "l2_cache_size_bytes": 60 << 20}, "h100"),
        ("cuda -arch=sm_120", "rtx-5090"),
    ],
    ids=str,
)
def test_a_target_names_its_gpu(target, name):
    assert gpu_of(parse_target(target)).name == name


def test_a_gpu_that_is_not_listed_is_like_its_architecture():
    target = parse_target({"kind": "cuda", "arch": "sm_90a", "l2_cache_size_bytes": 30 << 20})
    assert gpu_of(target) == replace(H200, l2_bytes=30 << 20)


def test_no_gpu_stands_for_an_architecture_that_is_not_listed():
    with pytest.raises(TargetError, match="no GPU of sm_75 is known"):
        gpu_of(tvm.target.Target({"kind": "cuda", "arch": "sm_75"}))


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
def test_every_record_is_found_by_its_tag_and_agrees_with_its_architecture(gpu):
    arch = f"sm_{gpu.arch}"
    target = parse_target({"kind": "cuda", "arch": arch, "tag": f"nvidia/{gpu.name}"})
    assert gpu_of(target) == gpu
    assert target.attrs["max_shared_memory_per_block"] == gpu.block_shared_bytes
    assert cuda_arch(int(gpu.arch) // 10, int(gpu.arch) % 10) == arch + "a" * gpu.wgmma
    # One build serves all GPUs of an architecture: what decides the code is the same.
    first = next(other for other in GPUS if other.arch == gpu.arch)
    for fact in ("shared_bytes", "registers", "partitions", "suffixes", "wgmma", "dependent_launch"):
        assert getattr(gpu, fact) == getattr(first, fact)


def test_own_instructions_need_code_for_nothing_else():
    assert has_wgmma(SM_90A)
    assert not any(has_wgmma(parse_target(f"cuda -arch={arch}")) for arch in ("sm_80", "sm_90", "sm_100a"))


# -- counts of work ---------------------------------------------------------------------------------------------------


def test_an_a100_has_its_own_counts_and_an_h200_those_that_were_measured():
    """Three CTAs of a block-wise kernel and two of a row-wise one on each multiprocessor: 108 and 132."""
    blocks, tiles = np.full(48, 90), np.full(32, 512)
    decoding = AttentionProblem(1, 32, 32, 1, 8192, 128, 128, "float16", 1.0)
    assert set(work.split_counts(blocks, 64, work.ctas_at_once(64, A100))) == {7} and set(
        work.split_counts(blocks, 64, work.ctas_at_once(64, H200))
    ) == {9}
    assert set(row_wise.split_counts(tiles, decoding, A100)) == {6}
    assert set(row_wise.split_counts(tiles, decoding, H200)) == {8}


def test_groups_of_heads_fill_the_same_part_of_every_cache():
    given = AttentionProblem(1, 24, 24, 8192, 8192, 128, 128, "float16", 1.0)  # 4 MB of keys and values a head
    assert [work.heads_per_group(given, gpu) for gpu in (H200, A100)] == [4, 3]


def test_operands_are_for_the_target():
    given = AttentionProblem(1, 6, 6, 512, 8192, 64, 64, "float16", 0.125)
    mask = BlockSparseMask.keep_all(512, 8192, (64, 64))
    config = block_wise_cuda.configs(given, SM_80)[0]
    plans = [block_wise_cuda.operands(given, config, target, mask).arrays[0] for target in (SM_80, SM_90A)]
    assert [len(plan) for plan in plans] == [48 * 7, 48 * 8]
    for plan, gpu in zip(plans, (A100, H200)):
        np.testing.assert_array_equal(plan, plan_work(mask, given, gpu)[0])


def test_products_are_split_while_two_tiles_a_multiprocessor_have_none():
    # 240 tiles of 64 x 128: more than an A100's 216, fewer than an H200's 264.
    product = GemmProblem(640, 3072, "float16", k=3072)
    splits = lambda target: {
        c.splits
        for c in gemm.configs(product, target)
        if (c.block_m, c.block_n) == (64, 128) and not c.warpgroup and GemmGeometry(product, c).m_tiles == 10
    }
    assert splits(SM_80) == {1} and splits(SM_90A) > {1}


def test_gemv_has_enough_ctas_for_the_gpu():
    few = GemmProblem(1, 3600, "float16", k=4096)
    assert gemv.configs(few, SM_80)[0].columns == 16 and gemv.configs(few, SM_90A)[0].columns == 8
    for n, columns in ((4088, 8), (4096, 16), (8192, 32)):  # 256 CTAs of an H200
        assert gemv.configs(GemmProblem(1, n, "float16", k=768), SM_90A)[0].columns == columns
    for n, warps in ((2552, 16), (2560, 8)):  # 320
        assert gemv.configs(GemmProblem(1, n, "float16", k=2048), SM_90A)[0].warps == warps


# -- a new GPU --------------------------------------------------------------------------------------------------------


def test_a_new_architecture_is_one_record(monkeypatch):
    new = GPU("n1", "95", 200, 300 << 10, 80 << 20, 9e6, suffixes=("", "a"), wgmma=True, dependent_launch=True)
    with pytest.raises(TargetError, match="'sm_95a' is not known"):
        parse_target("cuda -arch=sm_95a")
    monkeypatch.setattr(targets, "_known", {})
    monkeypatch.setattr(device, "GPUS", [*GPUS, new])
    target = parse_target("cuda -arch=sm_95a")
    assert gpu_of(target) == new and has_wgmma(target) and can_depend(target)
    assert target.attrs["max_shared_memory_per_block"] == 299 << 10
    assert cuda_arch(9, 5) == "sm_95a"
    attention = AttentionProblem(1, 12, 12, 2048, 2048, 64, 64, "float16", 0.125)
    choice = choose(attention, masks.causal(), target)
    assert choice.template is warp_specialized
    assert 0 < choice.predicted_us < choose(attention, masks.causal(), SM_80).predicted_us
    assert choice.operands(target).arrays
    product = GemmProblem(4096, 4096, "float16", k=4096)
    pair = MlpProblem(GemmProblem(512, 64, "float16", k=768), GemmProblem(512, 768, "float16", k=64))
    rows = RowProblem(4096, 768, "float16", norm=Norm("rms_norm", 1e-6))
    for template, problem in ((gemm, product), (mlp, pair), (norm, rows)):
        best = template.configs(problem, target)[0]
        slower = template.predict_us(problem, template.configs(problem, SM_80)[0], SM_80)
        assert 0 < template.predict_us(problem, best, target) < slower
    assert any(config.tma for config in gemm.configs(product, target))


# -- one place --------------------------------------------------------------------------------------------------------

EVERY = {gpu for gpu in GPUS if gpu.multiprocessors >= 80}  # smaller counts are common numbers
FACTS = {
    *(times * gpu.multiprocessors for gpu in EVERY for times in (1, 2, 3)),
    *(fact for gpu in GPUS for fact in (gpu.shared_bytes, gpu.block_shared_bytes, gpu.l2_bytes, gpu.bandwidth)),
    *(fact for gpu in GPUS for fact in (gpu.registers, gpu.registers // gpu.partitions)),
}
ARCHITECTURE = re.compile(rf"(sm_|compute_)?({'|'.join(gpu.arch for gpu in GPUS)})[af]?|sm_\d+[af]?")
SUFFIXES = {"a", "f", "af", "fa"}
ELSEWHERE = {
    ("relax_passes/legalizations/norms.py", 65536): "numbers that are added to one",
    ("relax_passes/schedule/cpu_rules/blocks.py", 16384): "work of a CPU",
    ("tir_kernels/masks/block_counts.py", 65536): "the values of two bytes",
    ("tir_kernels/attention/row_wise/operands.py", 65536): "bytes that are worth a CTA of their own",
    ("stof_tvm/parallel/statuses.py", 16384): "bytes of a message between processes",
    ("stof_tvm/parallel/context/lists.py", 16384): "blocks of a mask that NumPy looks at together",
    ("stof_tvm/parallel/context/lists.py", 65536): "the same, where a block is a number",
    ("stof_tvm/running/shared_tensors.py", 65536): "bytes whose checksum finds equal tensors",
    ("stof_tvm/running/shared_tensors.py", 16384): "the same of tensors that are the beginning of others",
    ("tir_kernels/fusion/group/boxes/box.py", 264): "boxes of a copy: one source, verified once, for every GPU",
    ("stof_tvm/generation/parts.py", 65536): "tokens of prompts that are computed at once",
}


def spelled(text: str) -> set:
    """Facts of GPUs, and architectures' names and endings that code compares or takes off, in a module's code.

    Constants that are computed of constants count as what they are; docstrings, comments and longer texts do not.
    """
    found = set()

    def visit(node):
        value = constant(node)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value in FACTS:
            found.add(value)
        if isinstance(value, str) and ARCHITECTURE.fullmatch(value):
            found.add(value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("strip"):
            found.update({constant(argument) for argument in node.args} & SUFFIXES)
        if value is None:
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(ast.parse(text))
    return found


def constant(node):
    """The value of an expression of constants; None for others."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.LShift, ast.Mult)):
        left, right = constant(node.left), constant(node.right)
        if all(isinstance(side, (int, float)) for side in (left, right)):
            return left << right if isinstance(node.op, ast.LShift) else left * right
    return None


def test_no_other_module_spells_the_facts_of_a_gpu():
    own = Path(device.__file__)
    files = [path for package in ("tir_kernels", "relax_passes", "stof_tvm") for path in (ROOT / package).rglob("*.py")]
    found = {(str(path.relative_to(ROOT)), fact) for path in files if path != own for fact in spelled(path.read_text())}
    assert found - ELSEWHERE.keys() == set()
    assert ELSEWHERE.keys() - found == set(), "gone: take it out of ELSEWHERE"


@pytest.mark.parametrize(
    "code, found",
    [
        ("CTAS = 3 * 132", {396}),
        ("LIMIT = 228 << 10", {228 << 10}),
        ("BANDWIDTH = 4.3e6", {4.3e6}),
        ("warps = 4 * (16384 // 32 // registers)", {16384}),
        ('if arch == "sm_90a": pass', {"sm_90a"}),
        ('TABLE = {"80": 1}', {"80"}),
        ('number = arch.rstrip("af")', {"af"}),
        ('"""For sm_90a."""\nraise ValueError("write cuda -arch=sm_80")  # 132', set()),
    ],
)
def test_the_check_sees_what_it_is_for(code, found):
    assert spelled(code) == found
