"""Threads that multiply get no more registers than those that copy leave."""

import pytest

from tir_kernels.cuda.registers import (
    PRODUCER_REGISTERS,
    PRODUCER_THREADS,
    REGISTERS,
    consumer_registers,
    even_registers,
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
