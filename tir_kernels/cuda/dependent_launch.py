"""Programmatic dependent launches (sm_90 and up): a kernel is launched while the one before it still runs.

Without them a kernel's CTAs are launched when the kernel before has written everything.  That costs half a microsecond
for every kernel; a norm of a few rows takes only one and a half.  With them the CTAs are launched as soon as all CTAs
of the kernel before have ended or allowed the launch; they then begin with a wait for that kernel's results.

A kernel allows the next launch only after its own wait.  So when a kernel runs, all kernels but the one before it have
ended, and it touches no memory before that one has ended, too: the order of all reads and writes does not change.
Kernels that do not take part (copies, another library's) start after the end of the one before, as usual.

CTAs that are launched early go to multiprocessors with room.  The CTAs of a matrix product fill the shared memory of
some multiprocessors and leave others empty, so all early CTAs would go to the empty ones.  Products therefore set
`FILLS_MULTIPROCESSORS`, and nothing is launched before their CTAs end, or before they allow it themselves.

A kernel with `WAITS_ITSELF` waits where it says so, behind what touches no global memory: its barriers are ready then,
and maps of its operands loaded.
"""

import tvm
from tvm import tirx
from tvm.script import tirx as T

from tir_kernels.cuda.device import gpu_of

LAUNCH_PARAMETERS = "tirx.kernel_launch_params"
DEPENDENT = "tirx.use_programtic_dependent_launch"  # as TVM spells it
FILLS_MULTIPROCESSORS = "stof.fills_multiprocessors"  # attribute of a PrimFunc
WAITS_ITSELF = "stof.waits_itself"  # likewise


def can_depend(target: tvm.target.Target | None) -> bool:
    """Whether kernels for a target may be launched while the kernel before still runs."""
    return target is not None and target.kind.name == "cuda" and gpu_of(target).dependent_launch


def with_dependent_launches(lower: tvm.transform.Pass) -> tvm.transform.Pass:
    """The pass `lower`, which splits host and device code, changed to launch each kernel while the one before runs."""

    @tvm.transform.module_pass(opt_level=0, name="DependentLaunches")
    def passes(mod: tvm.IRModule, _ctx) -> tvm.IRModule:
        filling, waiting = (
            {name.name_hint for name, f in mod.functions.items() if f.attrs.get(attribute, False)}
            for attribute in (FILLS_MULTIPROCESSORS, WAITS_ITSELF)
        )
        lowered = lower(_mark(mod))
        for name, function in lowered.functions.items():
            is_kernel = function.attrs.get("tirx.is_global_func", False)
            if is_kernel and DEPENDENT in function.attrs.get(LAUNCH_PARAMETERS, ()):
                host = str(function.attrs["global_symbol"]).rpartition("_kernel")[0]
                lowered[name] = _acting(function, waits=host not in waiting, lets_next=host not in filling)
        return lowered

    return passes


@tirx.transform.prim_func_pass(opt_level=0, name="MarkDependentLaunch")
def _mark(function, _mod, _ctx):
    is_marked = can_depend(function.attrs.get("target"))
    return function.with_attr(LAUNCH_PARAMETERS, [DEPENDENT]) if is_marked else function


def _acting(kernel: tirx.PrimFunc, waits: bool, lets_next: bool) -> tirx.PrimFunc:
    """The kernel with a wait before everything else if it `waits`; if `lets_next`, it then allows the next launch."""
    actions = ["wait"] * waits + ["launch_dependents"] * lets_next
    calls = [tirx.Evaluate(T.ptx[f"griddepcontrol.{action}"]()) for action in actions]
    return kernel.with_body(tirx.SeqStmt([*calls, kernel.body])) if calls else kernel
