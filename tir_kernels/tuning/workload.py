"""Workloads: what a segment or an attention computes, as the schedulable PrimFunc that MetaSchedule keys records by.

The function "main" is a reference and is never run.  Its attribute `stof.problem` holds the problem in JSON, and
`stof.mask` the digest of an attention's mask.  Equal problems give structurally equal modules in every process.
"""

import tvm
from tvm import te

from tir_kernels.attention.problem import AttentionProblem
from tir_kernels.problems.kind import Problem
from tir_kernels.problems.registry import kind_of
from tir_kernels.tuning.problem_json import problem_from_json, problem_to_json

PROBLEM = "stof.problem"
MASK = "stof.mask"
ANCHOR = "out"  # the block that carries a template's choice


def fusion_workload(problem: Problem) -> tvm.IRModule:
    """The workload of a fused segment's problem."""
    return _module(kind_of(problem).tensors(problem), {PROBLEM: problem_to_json(problem)})


def attention_workload(problem: AttentionProblem, mask_digest: str) -> tvm.IRModule:
    """The workload of an attention whose mask has a digest, as `attention_spaces.mask_digest` computes it."""
    return _module(kind_of(problem).tensors(problem), {PROBLEM: problem_to_json(problem), MASK: mask_digest})


def primfunc_workload(function: tvm.tirx.PrimFunc) -> tvm.IRModule:
    """The workload of a function that no template computes, whatever its name: MetaSchedule's own rules apply."""
    return tvm.IRModule({"main": function.with_attrs({"global_symbol": "main", "tirx.noalias": True})})


def problem_of(mod: tvm.IRModule):
    """The problem of a workload that templates compute; None for any other module.

    Raises InputError where the problem is of another version.
    """
    text = mod["main"].attrs.get(PROBLEM)
    return None if text is None else problem_from_json(str(text))


def mask_of(mod: tvm.IRModule) -> str | None:
    """The digest of an attention workload's mask; None for any other."""
    digest = mod["main"].attrs.get(MASK)
    return None if digest is None else str(digest)


def _module(tensors: list[te.Tensor], attrs: dict[str, str]) -> tvm.IRModule:
    return tvm.IRModule({"main": te.create_prim_func(tensors).with_attrs({"global_symbol": "main", **attrs})})
