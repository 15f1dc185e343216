"""The division of a multiprocessor's registers between a warpgroup that copies and those that multiply (sm_90a)."""

REGISTERS = 65536  # of a multiprocessor
PRODUCER_THREADS = 128
PRODUCER_REGISTERS = 40  # of a thread that copies
MAX_TRADED = 240


def even_registers(threads: int, blocks: int) -> int:
    """Registers of a thread at the start, where `blocks` CTAs of `threads` share a multiprocessor."""
    return REGISTERS // blocks // threads // 8 * 8


def consumer_registers(threads: int, blocks: int) -> int:
    """Registers of a thread that multiplies: it gets those that the copying threads give up."""
    each = even_registers(threads, blocks)
    spare = (each - PRODUCER_REGISTERS) * PRODUCER_THREADS
    return min(each + spare // (threads - PRODUCER_THREADS) // 8 * 8, MAX_TRADED)
