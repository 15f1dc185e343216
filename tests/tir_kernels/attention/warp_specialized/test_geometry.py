"""Shared memory and registers of the warp-specialized kernel, for every configuration of every head size."""

from dataclasses import replace
from itertools import pairwise

import pytest

from tir_kernels.attention.problem import AttentionProblem, BlockMap
from tir_kernels.attention.warp_specialized import kernel as specialized
from tir_kernels.attention.warp_specialized.geometry import (
    BARRIER_BYTES,
    FLAG_BYTES,
    ITEM_BYTES,
    PRODUCER_REGISTERS,
    WORD_BYTES,
    Geometry,
)
from tir_kernels.attention.warp_specialized.rings import ARRIVED, READ, rings_of
from tir_kernels.cuda.device import H200
from tir_kernels.cuda.registers import PRODUCER_THREADS, even_registers
from tir_kernels.target import parse_target

SM_90A = parse_target("cuda -arch=sm_90a")
DIMS = [*((dim, dim) for dim in range(16, 257, 16)), (64, 128), (192, 128), (192, 256), (32, 80), (16, 256), (256, 16)]


def geometries(dims):
    dim, v_dim = dims
    given = AttentionProblem(1, 2, 2, 300, 300, dim, v_dim, "float16", dim**-0.5)
    return [Geometry(given, config) for config in specialized.configs(given, SM_90A)]


def regions(g: Geometry) -> list[tuple[int, int, int]]:
    """(start, bytes, alignment) of all that lies in shared memory."""
    stages = range(g.config.stages)
    found = [(t * g.q_bytes, g.q_bytes, 1024) for t in range(g.q_stages)]
    found += [(g.k_offset + i * g.k_tile.size, g.k_tile.size, 1024) for i in stages]
    found += [(g.v_offset + i * g.v_tile.size, g.v_tile.size, 1024) for i in stages]
    found += [(g.keep_offset + i * g.keep_bytes, g.keep_bytes, 16) for i in stages]
    found += [(g.item_offset + t * ITEM_BYTES, ITEM_BYTES, WORD_BYTES) for t in range(g.q_stages)]
    found.append((g.flag_offset, FLAG_BYTES, WORD_BYTES))
    rings = rings_of(g)
    for ring, n in ((rings.k, g.config.stages), (rings.v, g.config.stages), (rings.q, g.q_stages)):
        assert ring.stages == n
        for side in (ARRIVED, READ):
            found += [(ring.offset + (side * n + i) * BARRIER_BYTES, BARRIER_BYTES, BARRIER_BYTES) for i in range(n)]
    return sorted(found)


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_regions_do_not_overlap_and_fit(dims):
    for g in geometries(dims):
        found = regions(g)
        assert all(start % alignment == 0 for start, _, alignment in found), g.config
        assert all(start + size <= following for (start, size, _), (following, *_) in pairwise(found)), g.config
        start, size, _ = found[-1]
        assert start + size == g.shared_bytes <= H200.block_shared_bytes, g.config
        assert g.warpgroups * WORD_BYTES <= FLAG_BYTES


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_queries_have_two_stages_where_these_fit(dims):
    for g in geometries(dims):
        more = g.q_bytes + ITEM_BYTES + 2 * BARRIER_BYTES
        assert g.q_stages == 2 or g.shared_bytes + more > H200.block_shared_bytes, g.config


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_what_is_staged_stays_in_its_stage(dims):
    """Queries and, later, the output in a stage of queries; every warp's rows of the output apart from the others'."""
    for g in geometries(dims):
        assert g.q_tile.size <= g.q_bytes
        chunks = [
            warp * 16 * g.out_tile.pitch + g.out_tile.offset(row, chunk)
            for warp in range(g.threads // 32)
            for row in range(16)
            for chunk in range(g.v_head_dim // 8)
        ]
        assert len(set(chunks)) == len(chunks) and max(chunks) + 16 <= g.q_bytes


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_registers_that_are_traded_fit_a_multiprocessor(dims):
    for g in geometries(dims):
        ctas = g.ctas_per_multiprocessor
        each, more = even_registers(g.cta_threads, ctas), g.registers_at(ctas)
        assert g.registers <= more, g.config
        if g.trades_registers:
            # As setmaxnreg wants it.
            assert 24 <= PRODUCER_REGISTERS <= each <= more <= 256 and more % 8 == 0, g.config
            assert ctas * (g.threads * more + PRODUCER_THREADS * PRODUCER_REGISTERS) <= H200.registers, g.config
        else:
            assert ctas * g.cta_threads * more <= H200.registers, g.config


@pytest.mark.parametrize(
    "block_m, length, rows",
    [(192, 192, 0), (192, 129, 0), (192, 128, 64), (192, 65, 64), (192, 64, 128), (192, 1, 128), (192, 4096, 128)]
    + [(128, 64, 0), (128, 4096, 0), (64, 1, 0)],
)
def test_block_rows_of_192_end_where_the_sequence_does(block_m, length, rows):
    given = AttentionProblem(1, 2, 2, length, 300, 64, 64, "float16", 0.125)
    config = specialized.Config(block_m, 128, 2)
    assert Geometry(given, config).leading_rows == rows
    assert Geometry(replace(given, block_map=BlockMap(1, 1, 1920, 1920)), config).leading_rows == 0


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_boxes_are_what_the_tensor_memory_accelerator_takes(dims):
    for g in geometries(dims):
        for tile in (g.q_tile, g.k_tile, g.v_tile):
            assert tile.rows <= 256 and tile.pitch in (32, 64, 128) and tile.panels * tile.panel == tile.dim
            assert tile.panel_bytes % 1024 == 0 or tile.panel_bytes % (8 * tile.pitch) == 0
