"""Which systems run which case, and in which process: some peers need an environment of their own."""

from benchmarks.peers.cases import GRID_MASKS, Case

SDPA_DENSE = ("fa2", "cudnn")
SDPA_CAUSAL = ("fa2-causal", "cudnn-causal")
FLEX = ("flex-tensor", "flex-analytic", "flex-fa4-tensor", "flex-fa4-analytic")
CUDNN = ("cudnn-flex", "cudnn-bsa")
FASTVIDEO = ("fastvideo",)
ALL = ("stof", "sdpa-mask", *SDPA_DENSE, *SDPA_CAUSAL, *FLEX, "fa4", *CUDNN, *FASTVIDEO, "flashinfer-bsr")
# FlashAttention-4 brings another tvm_ffi than TVM's, so that both cannot be in one process; cuDNN's front end uses
# FlashAttention-4's CUTLASS DSL.
FA4_GROUP = ("flex-fa4-tensor", "flex-fa4-analytic", "fa4", *CUDNN)
# Systems by the environment of their processes.  FastVideo's wheel needs PyTorch alone, of the version that it was
# built for, and loads the driver's library by a name of its own: TVM, which also loads that, stays out of there.
GROUPS = {
    "main": tuple(system for system in ALL if system not in (*FA4_GROUP, *FASTVIDEO)),
    "fa4": FA4_GROUP,
    "fastvideo": FASTVIDEO,
}
# Keys, beyond which no system is given a tensor of the whole mask, or one that it makes larger still.
MAX_DENSE, MAX_UNFUSED = 32768, 16384
# cuDNN's kernels take a few ranges of keys a query, or whole blocks.
MANY_RANGES = ("dilated_window", "strided", "random_blocks")
WHOLE_BLOCKS = ("video", "random_tiles")
# What FastVideo's kernel is compiled for.
FASTVIDEO_DTYPE, FASTVIDEO_DIMS = "bfloat16", (64, 128)


def systems_for(case: Case) -> tuple[str, ...]:
    """Every system that can be given this very mask."""
    base, _, argument = case.mask.partition("-")
    if case.bench == "decode":
        return ("fa2",) if base == "none" else ("stof", "sdpa-mask", "flex-tensor", "flex-analytic", "flashinfer-bsr")
    if base == "none":
        return (*SDPA_DENSE, "fa4")
    if argument and base in GRID_MASKS or base in ("full_blocks", "part_blocks"):
        return ("stof",)  # cases that check our kernel against itself or against published times
    some = ["stof"]
    some += ("sdpa-mask", "flashinfer-bsr") if case.kv_len <= MAX_UNFUSED else ()
    some += FLEX if case.kv_len <= MAX_DENSE else (system for system in FLEX if system.endswith("analytic"))
    some += SDPA_CAUSAL if base == "causal" else ()
    some += ("fa4",) if base in ("causal", "sliding_window", "causal_window") else ()
    some += ("cudnn-flex",) if base not in MANY_RANGES else ()
    if base in WHOLE_BLOCKS:
        some += ("cudnn-bsa",)
        some += FASTVIDEO if case.dtype == FASTVIDEO_DTYPE and case.head_dim in FASTVIDEO_DIMS else ()
    return tuple(some)


def prepare(system: str, case: Case, pattern, device: str):
    """Dispatch to the system's module, which is imported only where it runs."""
    if system == "stof":
        from benchmarks.peers import stof as module
    elif system.startswith("flex"):
        from benchmarks.peers import flex as module
    elif system == "fa4":
        from benchmarks.peers import fa4 as module
    elif system == "cudnn-flex":
        from benchmarks.peers import cudnn_flex as module
    elif system == "cudnn-bsa":
        from benchmarks.peers import cudnn_bsa as module
    elif system == "fastvideo":
        from benchmarks.peers import fastvideo as module
    elif system == "flashinfer-bsr":
        from benchmarks.peers import flashinfer_bsr as module
    else:
        from benchmarks.peers import sdpa as module
    return module.prepare(system, case, pattern, device)
