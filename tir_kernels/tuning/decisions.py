"""What a trace decided, as plain data: the key by which tuning knows a candidate of a workload.

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
    instructions, decided = trace.as_json() if isinstance(trace, Trace) else trace
    found = _template_decisions(instructions, decided)
    if found:
        return found
    text = json.dumps([instructions, decided], default=str)
    return {TRACE: hashlib.sha256(text.encode()).hexdigest()[:32]}


def decisions_key(decisions: dict[str, object]) -> str:
    """Equal for equal decisions."""
    return json.dumps(decisions, sort_keys=True)


def _template_decisions(instructions, decided) -> dict[str, object]:
    decision_of = {int(place): int(index) for place, index in decided if _is_index(index)}
    values, found = {}, {}
    for place, (kind, inputs, attrs, outputs) in enumerate(instructions):
        if kind == "SampleCategorical" and place in decision_of:
            values[outputs[0]] = int(attrs[0][decision_of[place]])
        elif kind == "Annotate" and str(attrs[0]).startswith(PREFIX):
            text = str(inputs[1])
            value = values[text] if text in values else json.loads(text)
            found[str(attrs[0]).removeprefix(PREFIX)] = value
    return found


def _is_index(decision) -> bool:
    return not isinstance(decision, list | tuple) and str(decision).isdigit()
