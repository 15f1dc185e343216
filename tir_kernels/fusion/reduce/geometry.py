"""The assignment of a reduction to threads and CTAs: its configurations and sizes.

A CTA computes `items` side by side (outputs, or vectors of neighbouring ones), each by `sharing` threads that take
turns at its steps.  Where items are few, `splits` CTAs share them; the last one to arrive reduces what all found.
"""

from dataclasses import dataclass

from tir_kernels.cuda.device import GPU, WARP
from tir_kernels.fusion.reduce.reduction import Reduction
from tir_kernels.fusion.steps import VECTOR

UNROLLED = 4  # steps whose loads are under way together
CTA_THREADS = 256
RESIDENT_THREADS = 1024  # of a multiprocessor
COLUMNS = 32  # vectors side by side, where vectors are neighbouring outputs: a warp then reads 512 bytes of halves
LEAST_COLUMNS = 4  # the same of what is small
STEPS = 4  # of a thread, so that it is worth its while
MOST_STEPS = 256  # of a thread, where there is a choice: each adds to the error of a sum in float32
CTAS_WANTED = 6  # for each multiprocessor: so many threads keep its share of the memory busy
FLAG_BYTES = 16


@dataclass(frozen=True)
class ReduceConfig:
    """Items of a CTA, threads of each, and CTAs that share them."""

    items: int
    sharing: int
    splits: int = 1

    @property
    def label(self) -> str:
        """The configuration as reports show it: "32 of 8 threads, 4 splits"."""
        return f"{self.items} of {self.sharing} threads" + (f", {self.splits} splits" if self.splits > 1 else "")


class ReduceGeometry:
    """What follows from a reduction and a configuration."""

    def __init__(self, reduction: Reduction, config: ReduceConfig, accumulator_bytes: int):
        self.reduction, self.config = reduction, config
        self.threads = config.items * config.sharing
        self.lanes = 1 if reduction.along else VECTOR  # numbers of an item
        self.tiles = -(-reduction.items // config.items)
        self.ctas = self.tiles * config.splits
        self.steps_of_split = -(-reduction.steps // config.splits)
        self.is_even = reduction.steps % config.splits == 0
        self.words = accumulator_bytes // 4
        # Threads of a warp that share an item exchange it by shuffles, over these distances.
        first = 1 if reduction.along else config.items
        last = min(config.sharing, WARP) if reduction.along else WARP
        self.distances = [1 << i for i in range(WARP.bit_length()) if first <= 1 << i < last]
        if not reduction.along and self.threads < WARP:
            self.distances = [distance for distance in self.distances if distance < self.threads]
        # What is left to other warps is exchanged through shared memory.
        self.warp_parts = config.sharing // max(1, 1 << len(self.distances))

    @property
    def resident_ctas(self) -> int:
        """CTAs of a multiprocessor that must fit: fewer where vectors have eight places or CTAs are large."""
        plain = self.reduction.whole_vectors and self.threads <= CTA_THREADS
        return max(1, RESIDENT_THREADS // (1 if plain else 2) // self.threads)

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory."""
        exchanged = self.warp_parts * self.config.items * self.lanes * self.words * 4
        return FLAG_BYTES + (exchanged if self.warp_parts > 1 else 0)

    @property
    def partials(self) -> tuple[int, ...]:
        """Shape of the words in which splits leave what they found: splits, words, numbers of an item, items."""
        return self.config.splits, self.words, self.lanes, self.tiles * self.config.items


def reduce_configs(reduction: Reduction, gpu: GPU) -> list[ReduceConfig]:
    """Legal configurations, the one expected to be the fastest first."""
    default = _default(reduction, gpu)
    found = [default]
    for threads in (CTA_THREADS, 2 * CTA_THREADS, CTA_THREADS // 2):
        for sharing in sorted({default.sharing, 2 * default.sharing, max(1, default.sharing // 2)}):
            for splits in sorted({default.splits, 2 * default.splits, max(1, default.splits // 2), 1}):
                if -(-reduction.steps // (splits * sharing)) > MOST_STEPS:
                    continue
                if sharing <= threads and splits * sharing <= max(1, reduction.steps):
                    found.append(ReduceConfig(threads // sharing, sharing, splits))
    return list(dict.fromkeys(found))


def _default(reduction: Reduction, gpu: GPU) -> ReduceConfig:
    wanted = gpu.multiprocessors * CTAS_WANTED
    if reduction.along:
        sharing = _power(min(CTA_THREADS, -(-reduction.steps // STEPS)))
        # Few items get more threads each, down to one step a thread.
        while sharing < CTA_THREADS and reduction.items * sharing < wanted * CTA_THREADS and sharing < reduction.steps:
            sharing *= 2
    else:
        columns = min(COLUMNS, _power(reduction.items))
        if reduction.items * reduction.steps <= wanted * CTA_THREADS * STEPS:  # of what is small: more CTAs, no splits
            while columns > LEAST_COLUMNS and -(-reduction.items // columns) < gpu.multiprocessors:
                columns //= 2
        sharing = min(CTA_THREADS // columns, _power(-(-reduction.steps // STEPS)))
    items = CTA_THREADS // sharing
    tiles = -(-reduction.items // items)
    most = reduction.steps // (sharing * STEPS * 2)
    splits = max(1, min(most, wanted // tiles)) if tiles < wanted // 2 else 1
    return ReduceConfig(items, sharing, _even(reduction.steps, splits))


def _even(steps: int, splits: int) -> int:
    """A number of splits near the one wanted that leaves all of them as many steps, or the one wanted."""
    return next((some for some in range(splits, splits * 2 // 3, -1) if steps % some == 0), splits)


def _power(number: int) -> int:
    """The least power of two that is not below a number."""
    return 1 << max(0, number - 1).bit_length()
