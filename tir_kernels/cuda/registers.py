"""How threads share a multiprocessor's registers: CTAs that run at once, and a warpgroup that copies (sm_90a).

Launch bounds are part of a kernel's source, which is the same for every GPU.  So they assume what every listed GPU has.
"""

from tir_kernels.cuda.device import GPUS, WARP

REGISTERS = min(gpu.registers for gpu in GPUS)  # of a multiprocessor
PARTITIONS = min(gpu.partitions for gpu in GPUS)
PRODUCER_THREADS = 128
PRODUCER_REGISTERS = 40  # of a thread that copies
MAX_TRADED = 240


def resident_warps(registers: int) -> int:
    """Warps that a multiprocessor holds if a thread has `registers` registers; each partition holds whole warps."""
    return PARTITIONS * (REGISTERS // PARTITIONS // WARP // registers)


def even_registers(threads: int, blocks: int) -> int:
    """Registers that a thread has at the start, if `blocks` CTAs of `threads` threads share a multiprocessor."""
    return REGISTERS // blocks // threads // 8 * 8


def consumer_registers(threads: int, blocks: int, kept: int = PRODUCER_REGISTERS) -> int:
    """Registers of a thread that multiplies: its even share, and a share of those that the copying threads give up.

    A thread that copies keeps `kept` registers.
    """
    each = even_registers(threads, blocks)
    spare = (each - kept) * PRODUCER_THREADS
    return min(each + spare // (threads - PRODUCER_THREADS) // 8 * 8, MAX_TRADED)
