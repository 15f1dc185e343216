"""Weights beside the library instead of in it: the large constants of "main" become its last parameters.

Preconditions: everything is lowered to what the virtual machine runs, so no later pass looks for a constant.  The
library of such a module has code and small constants; whoever runs it passes the weights at every call.  A constant
that is a result becomes a parameter whatever its size: so the engine recognises it and returns a copy of it.

Parameters for arrays of replaceable masks come after the weights, because the caller passes them in the same way.
"""

import zlib

import torch
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.attention.replaceable_masks import ARRAYS

LEAST_BYTES = 1024  # below, an argument at each call costs more than a constant in the library
PART_BYTES = 20_000  # at the beginning, in the middle and at the end of a tensor, by which others are told apart


def lift_weights(mod: tvm.IRModule) -> tuple[tvm.IRModule, list[torch.Tensor]]:
    """(the module with a parameter for each constant of at least `LEAST_BYTES`, the tensors to pass for them).

    Equal constants share a parameter.  The tensors share the constants' memory.
    """
    function, lifted = mod["main"], _Lifted()
    blocks = [
        relax.BindingBlock([_lift(binding, lifted) for binding in block.bindings]) for block in function.body.blocks
    ]
    body = relax.SeqExpr(blocks, lifted.replace(function.body.body, least=0))
    first, count = map(int, (function.attrs or {}).get(ARRAYS, (0, 0)))
    given = list(function.params)
    arrays, given[first : first + count] = given[first : first + count], []
    parameters = [*given, *lifted.parameters, *arrays]
    mod = mod.clone()
    mod["main"] = relax.Function(parameters, body, function.ret_ty, function.is_pure, function.attrs)
    return relax.transform.Normalize()(mod), lifted.tensors


def _lift(binding, lifted):
    if not isinstance(binding, relax.VarBinding):
        return binding
    is_result = not isinstance(binding.value, relax.Call)  # a constant bound to a variable, alone or in a tuple
    return relax.VarBinding(binding.var, lifted.replace(binding.value, 0 if is_result else LEAST_BYTES))


class _Lifted:
    """Parameters and tensors of the constants met so far."""

    def __init__(self):
        self.parameters: list[relax.Var] = []
        self.tensors: list[torch.Tensor] = []
        self._of_constant: dict[GenericConst, relax.Expr] = {}
        self._numbers: dict[tuple, list[int]] = {}  # (dtype, shape, checksum of parts) -> tensors that share these

    def replace(self, expr, least: int):
        """The expression with parameters for its constants of at least `least` bytes."""
        if isinstance(expr, GenericConst):
            if expr not in self._of_constant and (parameter := self._parameter(expr, least)) is not None:
                self._of_constant[expr] = parameter
            return self._of_constant.get(expr, expr)
        if isinstance(expr, relax.Tuple):
            fields = [self.replace(field, least) for field in expr.fields]
            return expr if _same(fields, expr.fields) else relax.Tuple(fields)
        if isinstance(expr, relax.Call):
            arguments = [self.replace(argument, least) for argument in expr.args]
            if not _same(arguments, expr.args):
                return relax.Call(expr.op, arguments, expr.attrs, expr.ty_args, expr.span)
        return expr

    def _parameter(self, constant: GenericConst, least: int) -> relax.Expr | None:
        if not isinstance(constant.value, tvm.runtime.Tensor):  # such as a dtype
            return None
        dtype = str(constant.value.dtype)
        if not isinstance(getattr(torch, dtype, None), torch.dtype):
            return None
        tensor = torch.from_dlpack(constant.value)
        if tensor.nbytes < least:
            return None
        data = tensor.view(-1).view(torch.uint8).numpy().data
        alike = self._numbers.setdefault((dtype, tensor.shape, _checksum(data)), [])
        for number in alike:
            if torch.equal(self.tensors[number].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)):
                return self.parameters[number]
        alike.append(len(self.tensors))
        self.tensors.append(tensor)
        self.parameters.append(relax.Var(f"weight{len(self.parameters)}", relax.TensorType(tensor.shape, dtype)))
        return self.parameters[-1]


def _checksum(data: memoryview) -> int:
    """A number that tells most tensors apart and is found without reading them whole: weights may be gigabytes."""
    parts = {0, max(len(data) // 2 - PART_BYTES, 0), max(len(data) - PART_BYTES, 0)}
    checksum = 0
    for start in sorted(parts):
        checksum = zlib.crc32(data[start : start + PART_BYTES], checksum)
    return checksum


def _same(new, old) -> bool:
    return all(a is b or a.same_as(b) for a, b in zip(new, old, strict=True))
