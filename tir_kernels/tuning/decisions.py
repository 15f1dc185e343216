"""The decisions of a trace as plain data: the key by which tuning identifies a candidate of a workload.

A template's choice is its name and the fields of its configuration, {"template": "cuda gemm", "block_m": 64, …}.  Any
other trace, of MetaSchedule's own rules, is {"trace": a digest of its instructions and decisions}.
"""

import hashlib
import json

from tvm.s_tir.schedule import Trace

PREFIX = "stof."  # of the annotations that hold a template's choice
TEMPLATE = "template"
TRACE = "trace"


def decisions_of(trace: Trace | list) -> dict[str, object]:
    """The decisions of a trace or of its JSON form, which is what records hold."""
    if isinstance(trace, Trace) and (found := _annotated(trace)):
        return found
    instructions, decided = _plain(trace.as_json()) if isinstance(trace, Trace) else trace
    if found := _template_decisions(instructions, decided):
        return found
    text = json.dumps([instructions, decided])
    return {TRACE: hashlib.sha256(text.encode()).hexdigest()[:32]}


def decisions_key(decisions: dict[str, object]) -> str:
    """A text that is equal for equal decisions."""
    return json.dumps(decisions, sort_keys=True)


def _annotated(trace: Trace) -> dict[str, object]:
    """The annotations `stof.*` of a trace, read from its objects, which is much faster than by its JSON form."""
    decided, values = trace.decisions, {}
    found: dict[str, object] = {}
    for instruction in trace.insts:
        kind = instruction.kind.name
        if kind == "SampleCategorical" and instruction in decided:
            values[instruction.outputs[0]] = int(instruction.attrs[0][int(decided[instruction])])
        elif kind == "Annotate" and (name := str(instruction.attrs[0])).startswith(PREFIX):
            value = instruction.inputs[1]
            found[name.removeprefix(PREFIX)] = str(value) if isinstance(value, str) else values[value]
    return found


def _template_decisions(instructions, decided) -> dict[str, object]:
    decision_of = {position: index for position, index in decided if isinstance(index, int)}
    values, found = {}, {}
    for position, (kind, inputs, attrs, outputs) in enumerate(instructions):
        if kind == "SampleCategorical" and position in decision_of:
            values[outputs[0]] = attrs[0][decision_of[position]]
        elif kind == "Annotate" and attrs[0].startswith(PREFIX):
            text = inputs[1]
            found[attrs[0].removeprefix(PREFIX)] = values[text] if text in values else json.loads(text)
    return found


def _plain(value):
    """The value as JSON would give it: TVM's numbers, strings and arrays become Python's own."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int | float | None):
        return value
    return _plain(value.value) if hasattr(value, "value") else [_plain(x) for x in value]
