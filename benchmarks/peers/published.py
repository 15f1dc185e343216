"""Times of the STOF paper's own published kernel, which cannot be carried to where this benchmark runs.

Built for sm_90 and timed on an NVIDIA H200 with CUDA-graph replay, median, fp16; windows and global tokens are 32 wide.
It never reads its bitmaps: its outputs are right for causal only, elsewhere its times are those of less work.
"""

from benchmarks.peers.cases import PUBLISHED_MASKS, PUBLISHED_SHAPES, Case, attention_case

GPU = "NVIDIA H200"
_MICROSECONDS = ((18.5, 6.6, 20.1, 19.9), (207, 58, 101, 121), (783, 109, 212, 317), (1509, 212, 354, 597))

PAPER_KERNEL_US: dict[Case, float] = {
    attention_case(*shape, mask): float(time)
    for shape, times in zip(PUBLISHED_SHAPES, _MICROSECONDS, strict=True)
    for mask, time in zip(PUBLISHED_MASKS, times, strict=True)
}
