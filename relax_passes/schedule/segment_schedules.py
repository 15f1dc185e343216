"""The functions of segments without a template, and how each was scheduled, for the report.

`NoteSegmentFunctions` runs before these functions are inlined, `DescribeSchedules` after they are scheduled.  The rows
of such segments in the module attribute `stof.segments` get their "config": how many functions a tuning record
scheduled ("tuned schedule"), how many each rule of `cpu_rules` scheduled ("schedule rule rows"), and how many keep
their loops ("plain loops").  Code generation may later refuse a schedule (cpu_rules/plain.py): `described` is then
called again.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import tvm
from tvm import relax, tirx

from relax_passes.fusion.lower_segments import DEFAULT
from relax_passes.fusion.partition_segments import SEGMENT
from relax_passes.report_rows import SEGMENTS, segment_rows, with_rows
from tir_kernels.report_rows import SegmentRow

SCHEDULE = "stof.schedule"  # attribute of a PrimFunc: what scheduled it
FUNCTIONS = "stof.segment_functions"  # module attribute: from a segment's number to the names of its functions
TUNED = "tuned schedule"
PLAIN_LOOPS = "plain loops"
REFUSED = PLAIN_LOOPS + " ({} does not compile)"
EXTERNAL = "external function"
NOTHING = "nothing to compute"


def rule_name(rule) -> str:
    """The name of a rule of `schedule/cpu.py` in the report."""
    return f"schedule rule {rule.__name__.removeprefix('schedule_')}"


@tvm.transform.module_pass(opt_level=0, name="NoteSegmentFunctions")
class NoteSegmentFunctions:
    """Record which functions each segment calls."""

    def transform_module(self, mod, _ctx):
        found = {
            str(int(function.attrs[SEGMENT])): _called(function)
            for function in mod.functions.values()
            if isinstance(function, relax.Function) and SEGMENT in (function.attrs or {})
        }
        return mod.with_attr(FUNCTIONS, json.dumps(found))


@tvm.transform.module_pass(opt_level=0, name="DescribeSchedules")
class DescribeSchedules:
    """Write into the segments' rows what scheduled the functions that `NoteSegmentFunctions` recorded."""

    def transform_module(self, mod, _ctx):
        if not mod.attrs or SEGMENTS not in mod.attrs or FUNCTIONS not in mod.attrs:
            return mod
        return with_rows(mod, SEGMENTS, described(segment_rows(mod), mod, str(mod.attrs[FUNCTIONS])))


def described(rows: Iterable[SegmentRow], mod: tvm.IRModule, noted: str) -> list[SegmentRow]:
    """The segments' rows, with the schedules that the functions of `mod` have in their attributes.

    `noted` is the module attribute `stof.segment_functions`, JSON.
    """
    functions = json.loads(noted)

    def with_config(row):
        names = functions.get(str(row.segment)) if row.kernel == DEFAULT else None
        return row if names is None else replace(row, config=_counted(_schedule_of(mod, name) for name in names))

    return [with_config(row) for row in rows]


def _called(function: relax.Function) -> list[str]:
    """The names of the PrimFuncs that a function calls, in order, and "" for each call of something else."""
    names = []

    def visit(expr):
        if isinstance(expr, relax.Call) and getattr(expr.op, "name", "").startswith("relax.call_"):
            callee = expr.args[0]
            names.append(callee.name_hint if isinstance(callee, tvm.ir.GlobalVar) else "")

    relax.analysis.post_order_visit(function.body, visit)
    return names


def _schedule_of(mod: tvm.IRModule, name: str) -> str:
    if not name or name not in {var.name_hint for var in mod.get_global_vars()}:
        return EXTERNAL
    function = mod[name]
    is_primfunc = isinstance(function, tirx.PrimFunc)
    return str(function.attrs[SCHEDULE]) if is_primfunc and SCHEDULE in (function.attrs or {}) else EXTERNAL


def _counted(schedules) -> str:
    counts = Counter(schedules)
    return ", ".join(f"{name} (×{n})" if n > 1 else name for name, n in counts.items()) or NOTHING
