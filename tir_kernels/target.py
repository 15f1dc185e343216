"""Targets: the short form "cuda -arch=sm_80", the default target, and the limits that TVM's tags leave out."""

import functools
import json
import re

import tvm

from tir_kernels.errors import TargetError

# Shared memory that one CTA may use, bytes, by compute capability (CUDA programming guide, technical specifications).
SHARED_MEMORY = {"80": 166912, "86": 101376, "87": 166912, "89": 101376, "90": 232448, "100": 232448, "120": 101376}

_known = {}  # text -> Target: TVM compares targets by identity, and caches are keyed by them


def parse_target(target=None) -> tvm.target.Target:
    """A complete TVM target from what users write.

    Accepts None (the GPU present, else this CPU), a `tvm.target.Target`, a tag ("nvidia/nvidia-a100"), a dict, a JSON
    string, "cpu" (LLVM for this machine), or the short form "cuda -arch=sm_80", which TVM 0.27 no longer parses itself.
    CUDA targets get the limits that MetaSchedule and the kernels need; "llvm" without a CPU gets this machine's.  Equal
    ones are one object.
    Raises TargetError for anything else.
    """
    if target is None:
        target = local_cuda_arch() and {"kind": "cuda", "arch": local_cuda_arch()} or "llvm"
    if isinstance(target, str) and re.fullmatch(r"cpu( -.*)?", target):
        target = "llvm" + target[len("cpu") :]
    if isinstance(target, str) and " -" in target:
        target = _parse_short_form(target)
    try:
        # JSON is read here: TVM's reader overflows the stack on deep nesting.
        is_json = isinstance(target, str) and target.lstrip().startswith("{")
        parsed = tvm.target.Target(json.loads(target) if is_json else target)
    except Exception as error:
        reason = str(error).strip().splitlines()[-1][:300]
        raise TargetError(f"{repr(target)[:200]} is not a target: {reason}") from None
    kind = parsed.kind.name
    if kind not in ("cuda", "llvm"):
        raise TargetError(f"target kind {kind!r} is not supported; the supported ones are 'cuda' and 'llvm'")
    config = dict(parsed.export())
    complete = tvm.target.Target(_complete_cuda(config, target) if kind == "cuda" else _complete_llvm(config))
    return _known.setdefault(str(complete), complete)


def _parse_short_form(text: str) -> dict:
    kind, *options = text.split()
    config = {"kind": kind}
    for option in options:
        name, equals, value = option.lstrip("-").partition("=")
        if not option.startswith("-") or not equals or not value:
            raise TargetError(f"{option[:80]!r} in target {text[:200]!r} is not of the form -name=value")
        config[name] = int(value) if re.fullmatch("[0-9]{1,18}", value) else value
    return config


def _complete_cuda(config: dict, given) -> dict:
    arch = str(config.get("arch", ""))
    if isinstance(given, str) and given == "cuda" or isinstance(given, dict) and "arch" not in given:
        arch = local_cuda_arch() or ""
        if not arch:
            raise TargetError("target 'cuda' names no architecture and no GPU is here; write \"cuda -arch=sm_80\"")
    number = arch.removeprefix("sm_").rstrip("af")
    if not arch.startswith("sm_") or not re.fullmatch("[0-9]{1,4}", number):
        raise TargetError(f"CUDA architecture {arch[:40]!r} is not of the form sm_80, sm_90a, …")
    if int(number) < 80:
        raise TargetError(f"CUDA architecture {arch!r} is too old: kernels need sm_80 or later")
    config.update(arch=arch, max_shared_memory_per_block=SHARED_MEMORY.get(number, 101376))
    config.setdefault("max_threads_per_block", 1024)
    config.setdefault("thread_warp_size", 32)
    return config


def _complete_llvm(config: dict) -> dict:
    if not config.get("mcpu"):
        config["mcpu"] = tvm.target.codegen.llvm_get_system_cpu()
    return config


@functools.cache
def local_cuda_arch() -> str | None:
    """The architecture of GPU 0, such as "sm_80", or None where there is no GPU or no driver."""
    device = tvm.cuda(0)
    return cuda_arch(*map(int, device.compute_version.split("."))) if device.exist else None


def cuda_arch(major: int, minor: int) -> str:
    """The architecture of a compute capability, with its own instructions where the kernels have a use for them."""
    return f"sm_{major}{minor}" + "a" * ((major, minor) == (9, 0))
