"""Checks whether code for a CPU runs on this machine."""

import json
import platform

import tvm

# Prefixes of LLVM's features that affect only speed: a CPU without them runs the code all the same.
TUNING = (
    *("slow-", "fast", "false-deps-", "prefer-", "no-bypass-", "idiv", "lea-", "pad-", "tuning-", "use-", "allow-"),
    *("avoid-", "branch", "macrofusion", "sbb-dep-", "vzeroupper", "ermsb", "fsrm"),
)


def why_not_here(target: str) -> str | None:
    """Why code for an LLVM target, in JSON, must not run here: architecture or missing instructions; None if it may."""
    triple = json.loads(target).get("mtriple")
    if triple is not None and not str(triple).startswith(platform.machine()):
        return f"it is for {triple}"
    missing = not_here(cpu_features(target))
    return f"this CPU lacks {', '.join(missing[:5])}" if missing else None


def not_here(features: list[str]) -> list[str]:
    """Those `features`, LLVM's names of instruction sets, that this machine's CPU lacks."""
    here = cpu_features(json.dumps({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()}))
    return sorted(set(features) - set(here))


def cpu_features(target: str) -> list[str]:
    """LLVM's names of the instruction sets that code for a target, in JSON, may use; empty for a CUDA target."""
    parsed = tvm.target.Target(json.loads(target))
    if parsed.kind.name != "llvm":
        return []
    names = map(str, tvm.target.codegen.llvm_get_cpu_features(parsed))
    return sorted(name for name in names if not name.startswith(TUNING))
