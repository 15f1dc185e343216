"""Warps that fit a multiprocessor; threads that multiply get no more registers than those that copy leave."""

import pytest

from tir_kernels.cuda.registers import (
    PRODUCER_REGISTERS,
    PRODUCER_THREADS,
    REGISTERS,
    consumer_registers,
    even_registers,
    resident_warps,
)


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("consumers", [128, 256, 384])
def test_what_is_traded_was_there_before(consumers, blocks):
    threads = consumers + PRODUCER_THREADS
    each, even = consumer_registers(threads, blocks), even_registers(threads, blocks)
    assert even * threads * blocks <= REGISTERS
    if each > even:  # else nothing is traded
        assert each * consumers + PRODUCER_REGISTERS * PRODUCER_THREADS <= even * threads
        assert each % 8 == 0


@pytest.mark.parametrize("registers, warps", [(32, 64), (64, 32), (128, 16), (136, 12), (168, 12), (176, 8), (255, 8)])
def test_each_quarter_of_a_multiprocessor_holds_whole_warps(registers, warps):
    assert resident_warps(registers) == warps
    assert warps * 32 * registers <= REGISTERS
