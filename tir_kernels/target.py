"""Targets: the short form "cuda -arch=sm_80", the default target, and the limits that TVM's tags leave out."""

import difflib
import functools
import json
import re

import tvm
from tvm.target import codegen

from tir_kernels.cuda.device import GPUS, WARP, architecture_number, architecture_suffix, gpus_of_architecture
from tir_kernels.errors import TargetError

KINDS = "cuda", "llvm"
FORM = "is not of the form sm_80, sm_90a, …"
ACCEPTED = 'None (the GPU here, else this CPU), "cpu", "llvm", "cuda", "cuda -arch=sm_80", a tag, a dict or a Target'

_known = {}  # text -> Target: TVM compares targets by identity, and caches are keyed by them


def parse_target(target=None) -> tvm.target.Target:
    """A complete TVM target from what users write.

    Accepts None (the GPU present, else this CPU), a `tvm.target.Target`, a tag ("nvidia/nvidia-a100"), a dict, a JSON
    string, "cpu" (LLVM for this machine), or the short form "cuda -arch=sm_80", which TVM 0.27 no longer parses itself.
    CUDA targets get the limits that MetaSchedule and the kernels need; an LLVM target that names no CPU gets this
    machine's.  Equal targets are one object.
    Raises TargetError for anything else.
    """
    given = target
    if target is None:
        target = local_cuda_arch() and {"kind": "cuda", "arch": local_cuda_arch()} or "llvm"
    if isinstance(target, str) and re.fullmatch(r"cpu( -.*)?", target):
        target = "llvm" + target[len("cpu") :]
    if isinstance(target, str) and " -" in target:
        target = _parse_short_form(target)
    try:
        # JSON is read here: TVM's reader overflows the stack on deep nesting.
        if isinstance(target, str) and target.lstrip().startswith("{"):
            target = json.loads(target)
        target = _with_arch(target)
        parsed = tvm.target.Target(target)
    except TargetError:
        raise
    except Exception as error:
        raise TargetError(f"{repr(given)[:200]} is not a target: {_why_none(target, error)}") from None
    kind = parsed.kind.name
    if kind not in KINDS:
        raise TargetError(f"target kind {kind!r} is not supported; the supported ones are 'cuda' and 'llvm'")
    config = dict(parsed.export())
    complete = tvm.target.Target(_complete_cuda(config) if kind == "cuda" else _complete_llvm(config))
    return _known.setdefault(str(complete), complete)


def _why_none(target, error: Exception) -> str:
    """Why a text is no target: a wrong option of a known kind, or the nearest target and what is accepted."""
    kind = target.get("kind") if isinstance(target, dict) else target
    arch = target.get("arch") if isinstance(target, dict) and kind == "cuda" else None
    if arch is not None and not architecture_number(str(arch)):
        return f"CUDA architecture {str(arch)[:40]!r} {FORM}"
    if isinstance(target, dict) and kind in KINDS or isinstance(target, str) and target.lstrip().startswith("{"):
        return str(error).strip().splitlines()[-1].partition(" Target creation from")[0][:200]
    nearest = _nearest(str(kind).strip().lower()[:80])
    return f"{f'did you mean {json.dumps(nearest)}? ' if nearest else ''}Accepted are {ACCEPTED}"


def _nearest(text: str) -> str | None:
    """The known target whose name is nearest, or None."""
    if arch := re.fullmatch(r"(?:cuda)?[ :=]*(?:arch)?[ :=]*(?:sm|compute)_?([0-9]{2,3}[af]?)", text):
        return f"cuda -arch=sm_{arch[1]}"
    if text.startswith(("gpu", "cuda", "nvidia")) and "/" not in text:
        return "cuda"
    names = {"cpu": "cpu", "llvm": "llvm", "cuda": "cuda", "x86_64": "llvm"}
    tags = [str(tag) for tag in tvm.target.list_tags() or () if tag.startswith("nvidia/")]
    names |= {tag.removeprefix("nvidia/").removeprefix("nvidia-"): tag for tag in tags} | {tag: tag for tag in tags}
    close = difflib.get_close_matches(text, names, n=1, cutoff=0.7)
    return names[close[0]] if close else None


def _parse_short_form(text: str) -> dict:
    kind, *options = text.split()
    config: dict[str, str | int | list[str]] = {"kind": kind}
    for option in options:
        name, equals, value = option.lstrip("-").partition("=")
        if not option.startswith("-") or not equals or not value:
            raise TargetError(f"{option[:80]!r} in target {text[:200]!r} is not of the form -name=value")
        config[name] = int(value) if name != "arch" and re.fullmatch("[0-9]{1,18}", value) else value
        if name == "mattr":
            config[name] = value.split(",")
    return config


def _with_arch(target):
    """Add this GPU's architecture to a CUDA target without one: TVM would take sm_50.  TargetError without a GPU."""
    target = {"kind": "cuda"} if isinstance(target, str) and target == "cuda" else target
    if not isinstance(target, dict) or target.get("kind") != "cuda" or "arch" in target:
        return target
    arch = local_cuda_arch()
    if not arch:
        raise TargetError("target 'cuda' names no architecture and no GPU is here; write \"cuda -arch=sm_80\"")
    return {**target, "arch": arch}


def _complete_cuda(config: dict) -> dict:
    arch = str(config.get("arch", ""))
    number = architecture_number(arch)
    if number is None:
        raise TargetError(f"CUDA architecture {arch[:40]!r} {FORM}")
    oldest = min(int(gpu.arch) for gpu in GPUS)
    if int(number) < oldest:
        raise TargetError(f"CUDA architecture {arch!r} is too old: kernels need sm_{oldest} or later")
    alike = gpus_of_architecture(number)
    if not alike or architecture_suffix(arch) not in alike[0].suffixes:
        known = ", ".join(dict.fromkeys(f"sm_{gpu.arch}{suffix}" for gpu in GPUS for suffix in gpu.suffixes))
        raise TargetError(f"CUDA architecture {arch[:40]!r} is not known; known are {known}")
    config.update(arch=arch, max_shared_memory_per_block=alike[0].block_shared_bytes)
    config.setdefault("max_threads_per_block", 1024)
    config.setdefault("thread_warp_size", WARP)
    return config


def _complete_llvm(config: dict) -> dict:
    """Add this machine's CPU to a target that names none.

    Raises TargetError for a CPU that LLVM does not know: LLVM would only warn, and compile for a generic CPU.
    """
    triple, cpu = str(config.get("mtriple", "")), str(config.get("mcpu", ""))
    if triple and not _is_cpu("generic", triple):  # checked first: asked about CPUs of such a triple, LLVM crashes
        raise TargetError(
            f"{triple[:80]!r} in mtriple is of no architecture that LLVM knows, such as x86_64 or aarch64: "
            "tvm.target.codegen.llvm_get_targets() lists them"
        )
    if triple and "linux" not in triple:
        raise TargetError(f"{triple[:80]!r} in mtriple is of another system; engines are Linux libraries")
    host = triple or codegen.llvm_get_system_triple()
    if not cpu:
        here = codegen.llvm_get_system_cpu()
        config["mcpu"] = cpu = here if _is_cpu(here, host) else "generic"
    elif not _is_cpu(cpu, host):
        of_triple = tvm.target.Target({"kind": "llvm", "mcpu": "generic", **({"mtriple": triple} if triple else {})})
        names = [str(name) for name in codegen.llvm_get_cpu_archlist(of_triple)]
        close = difflib.get_close_matches(cpu[:80], names, n=1, cutoff=0.7)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise TargetError(
            f"{cpu[:80]!r} in mcpu is no CPU that LLVM knows for {host}: {hint}"
            "tvm.target.codegen.llvm_get_cpu_archlist() lists them; leave mcpu out for this machine's"
        )
    if host.startswith("x86_64") and "64bit" not in _features(cpu, host):  # LLVM would end the process
        raise TargetError(f"{cpu!r} in mcpu is no 64-bit CPU")
    for attribute in map(str, config.get("mattr") or ()):
        _check_feature(attribute, cpu, triple)
    return config


@functools.cache
def _is_cpu(name: str, triple: str) -> bool:
    return bool(codegen.llvm_is_valid_cpu(name, triple))


@functools.cache
def _features(cpu: str, triple: str) -> frozenset[str]:
    """LLVM's names of the features of a CPU."""
    target = tvm.target.Target({"kind": "llvm", "mcpu": cpu, "mtriple": triple})
    return frozenset(map(str, codegen.llvm_get_cpu_features(target)))


@functools.cache
def _check_feature(attribute: str, cpu: str, triple: str) -> None:
    """Raise TargetError for a feature that LLVM would leave out with a warning."""
    if not re.fullmatch(r"[+-].+", attribute):
        raise TargetError(f"{attribute[:80]!r} in mattr is not of the form +name or -name")
    config = {"kind": "llvm", "mcpu": cpu, "mattr": ["+" + attribute[1:]], **({"mtriple": triple} if triple else {})}
    if attribute[1:] not in codegen.llvm_get_cpu_features(tvm.target.Target(config)):
        raise TargetError(
            f"{attribute[:80]!r} in mattr is no feature that LLVM knows for {cpu!r}: "
            "tvm.target.codegen.llvm_get_cpu_features(target) lists those that a CPU has"
        )


@functools.cache
def local_cuda_arch() -> str | None:
    """The architecture of GPU 0, such as "sm_80", or None where there is no GPU or no driver."""
    device = tvm.cuda(0)
    return cuda_arch(*map(int, device.compute_version.split("."))) if device.exist else None


@functools.cache
def local_gpu_name() -> str | None:
    """What the driver calls GPU 0, such as "NVIDIA H200", or None where there is no GPU or no driver."""
    device = tvm.cuda(0)
    return device.device_name if device.exist else None


def cuda_arch(major: int, minor: int) -> str:
    """The architecture of a compute capability, with suffix "a" if kernels use instructions that it alone has."""
    number = f"{major}{minor}"
    return f"sm_{number}" + "a" * any(gpu.wgmma for gpu in gpus_of_architecture(number))
