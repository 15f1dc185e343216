"""A fallback for schedules that do not compile: every scheduled function keeps its unscheduled form.

TVM accepts schedules that its later passes or LLVM refuse (vectors of a type, or a call, that they do not know).  Only
code generation can find that out.  So if a module does not build, each of its functions is built alone, and those that
fail get their plain loops back: slow, never wrong.
"""

import tvm
from tvm import tirx

from relax_passes.schedule.repairs import REPAIRS
from relax_passes.schedule.segment_schedules import REFUSED, SCHEDULE

PLAIN = "stof.plain"


def keep_plain(scheduled: tirx.PrimFunc, plain: tirx.PrimFunc) -> tirx.PrimFunc:
    """The scheduled function with the plain one beside it."""
    return scheduled.with_attr(PLAIN, plain)


def scheduled_only(mod: tvm.IRModule) -> tvm.IRModule:
    """The module without the plain functions, which TVM's printer does not take as attributes."""
    mod = mod.clone()
    for name, function in mod.functions_items():
        if isinstance(function, tirx.PrimFunc) and PLAIN in (function.attrs or {}):
            mod.update_func(name, function.without_attr(PLAIN))
    return mod


def without_refused_schedules(mod: tvm.IRModule, target, build) -> tvm.IRModule:
    """The module with plain functions in place of those that `build(module of one function, target)` fails on."""
    plain = {}
    for name, function in mod.functions_items():
        if not isinstance(function, tirx.PrimFunc) or PLAIN not in (function.attrs or {}):
            continue
        try:
            build(tvm.IRModule({name: function}), target)
        except Exception:
            before = function.attrs[PLAIN]
            for key, value in function.attrs.items():
                if key != PLAIN:
                    before = before.with_attr(key, value)
            if SCHEDULE in before.attrs:
                before = before.with_attr(SCHEDULE, REFUSED.format(before.attrs[SCHEDULE]))
            plain[name] = before
    # The plain functions have not been through the last passes of `cpu_passes` yet.
    exact = tvm.transform.Sequential(REPAIRS)(tvm.IRModule(plain))
    mod = mod.clone()
    mod.update(exact)
    return mod
