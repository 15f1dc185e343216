"""Writes docs/operators.md, the table of operators, from the converters and the last whole run of OpInfo.

python -m tests.stof_tvm.frontend.opinfo --jobs 30 --json tests/stof_tvm/frontend/opinfo/results.json
python docs/operators.py
"""

import json
from pathlib import Path

import torch

from stof_tvm.frontend.operators.table import FROM_TVM, OURS

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "operators.md"
RESULTS = ROOT / "tests" / "stof_tvm" / "frontend" / "opinfo" / "results.json"
DTYPES = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
HEAD = """\
# Operators

Written by `python docs/operators.py`. PyTorch decomposes a model's operators to those of ATen that have a converter
([table.py](../stof_tvm/frontend/operators/table.py)); each means what PyTorch means or raises `UnsupportedError`.

## Functions of PyTorch

On the samples that PyTorch ships for each function (OpInfo) and on special values (NaN, infinities, ties, huge and
negative integers), compiled for this processor: in which dtypes all of them give PyTorch's numbers, and why calls are
refused. Left out are functions of random, complex or sparse results, and what the last run did not come to.
"""


def page(results: dict) -> str:
    lines = [HEAD, "| function | right in | refused calls |", "|---|---|---|"]
    absent = {}
    for name, outcomes in sorted(results.items()):
        right = [d for d in DTYPES if outcomes.get(d, {}).get("right") and not outcomes[d].get("wrong")]
        reasons = sorted({why for outcome in outcomes.values() for why in outcome.get("why", [])})
        if right:
            lines.append(f"| `{name}` | {_dtypes(right)} | {_cell('; '.join(reasons[:3]))} |")
        else:
            absent[name] = reasons
    lines += ["", "## Refused throughout", "", "| function | why |", "|---|---|"]
    lines += [f"| `{name}` | {_cell('; '.join(reasons[:2]))} |" for name, reasons in absent.items()]
    lines += ["", "## ATen operators that have a converter", ""]
    lines.append(", ".join(f"`{name}`" for name in sorted({*OURS, *FROM_TVM} - {"getitem"}) if _is_pure(name)) + ".")
    lines += ["", "Of the core operators of ATen, these have none: "]
    lines.append(", ".join(f"`{name}`" for name in core() if name not in OURS and name not in FROM_TVM) + ".")
    return "\n".join(lines) + "\n"


def core() -> list[str]:
    """The names of ATen's core operators that compute something for inference."""
    names = []
    for schema in torch._C._jit_get_all_schemas():  # torch.ops lists only what was asked for
        packet, overload = schema.name.removeprefix("aten::"), schema.overload_name or "default"
        if schema.name.startswith("aten::") and not schema.is_mutable and "backward" not in packet:
            operator = getattr(getattr(torch.ops.aten, packet, None), overload, None)
            if operator is not None and torch.Tag.core in operator.tags:
                names.append(f"{packet}.{overload}")
    return sorted(names)


def _is_pure(name) -> bool:
    return "." in name and not name.startswith("_assert")


def _dtypes(names) -> str:
    return "all" if len(names) == len(DTYPES) else ", ".join(names)


def _cell(text) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(page(json.loads(RESULTS.read_text())))
