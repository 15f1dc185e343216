"""Which systems run which case, and in which process: FlashAttention-4 needs one of its own."""

from benchmarks.peers.cases import Case

SDPA_DENSE = ("fa2", "cudnn")
SDPA_CAUSAL = ("fa2-causal", "cudnn-causal")
FLEX = ("flex-tensor", "flex-analytic", "flex-fa4-tensor", "flex-fa4-analytic")
ALL = ("stof", "sdpa-mask", *SDPA_DENSE, *SDPA_CAUSAL, *FLEX, "fa4", "flashinfer-bsr")
# FlashAttention-4 brings another tvm_ffi than TVM's, so that both cannot be in one process.
FA4_GROUP = ("flex-fa4-tensor", "flex-fa4-analytic", "fa4")


def systems_for(case: Case) -> tuple[str, ...]:
    """Every system that can be given this very mask."""
    base, _, width = case.mask.partition("-")
    if case.bench == "decode":
        return ("fa2",) if base == "none" else ("stof", "sdpa-mask", "flex-tensor", "flex-analytic", "flashinfer-bsr")
    if base == "none":
        return (*SDPA_DENSE, "fa4")
    if width or base in ("full_blocks", "part_blocks"):
        return ("stof",)  # cases that check our kernel against itself or against published times
    some = ["stof", "sdpa-mask", *FLEX, "flashinfer-bsr"]
    some += SDPA_CAUSAL if base == "causal" else ()
    some += ("fa4",) if base in ("causal", "sliding_window") else ()
    return tuple(some)


def prepare(system: str, case: Case, pattern, device: str):
    """Dispatch to the system's module, which is imported only where it runs."""
    if system == "stof":
        from benchmarks.peers import stof as module
    elif system.startswith("flex"):
        from benchmarks.peers import flex as module
    elif system == "fa4":
        from benchmarks.peers import fa4 as module
    elif system == "flashinfer-bsr":
        from benchmarks.peers import flashinfer_bsr as module
    else:
        from benchmarks.peers import sdpa as module
    return module.prepare(system, case, pattern, device)
