"""Does lowered TIR read or write outside its buffers?  Every index is computed, for every iteration of small loops."""

import numpy as np
import tvm
from tvm import s_tir, tirx
from tvm.ir import Call, TensorLoad, Var

MOST_POINTS = 1 << 21
UNKNOWN = None  # what depends on a buffer's contents

BINARY = {
    tirx.Add: np.add,
    tirx.Sub: np.subtract,
    tirx.Mul: np.multiply,
    tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod,
    tirx.Div: lambda a, b: np.trunc(a / b).astype(np.int64),
    tirx.Mod: np.fmod,
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
    tirx.EQ: np.equal,
    tirx.NE: np.not_equal,
    tirx.LT: np.less,
    tirx.LE: np.less_equal,
    tirx.GT: np.greater,
    tirx.GE: np.greater_equal,
    tirx.And: np.logical_and,
    tirx.Or: np.logical_or,
}
CALLS = {
    "tirx.shift_left": np.left_shift,
    "tirx.shift_right": np.right_shift,
    "tirx.bitwise_and": np.bitwise_and,
    "prim.likely": lambda x: x,
    "tirx.likely": lambda x: x,
}


def outside_accesses(mod: tvm.IRModule) -> list[str]:
    """Accesses outside a buffer, of every schedulable function after FlattenBuffer; [] where there is none."""
    found = []
    for name, function in mod.functions_items():
        if isinstance(function, tirx.PrimFunc) and function.attrs.get("s_tir", False):
            found += [f"{name.name_hint}: {what}" for what in _Walk().run(flattened(function))]
    return found


def flattened(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function lowered as TVM's pipeline lowers it, up to and with FlattenBuffer."""
    transform = s_tir.transform
    passes = [
        transform.CanonicalizeLoop(),
        transform.LowerCrossThreadReduction(),
        transform.LowerInitBlock(),
        transform.PlanAndUpdateBufferAllocationLocation(),
        transform.ConvertBlocksToOpaque(),
        transform.LiftThreadBinding(),
        transform.CompactBufferAllocation(),
        transform.UnifyThreadBinding(),
        transform.LowerMatchBuffer(),
        transform.StmtSimplify(),
        transform.LowerOpaqueBlock(),
        tirx.transform.FlattenBuffer(),
    ]
    return tvm.transform.Sequential(passes)(tvm.IRModule({"main": function}))["main"]


class _Walk:
    def __init__(self):
        self.found = []

    def run(self, function) -> list[str]:
        self.statement(function.body, {}, 1)
        return self.found

    def statement(self, node, env: dict, points: int):
        """`env` has an array of `points` values for each variable: one for each iteration that gets here."""
        if isinstance(node, tirx.SeqStmt):
            for part in node.seq:
                self.statement(part, env, points)
        elif isinstance(node, tirx.For):
            self.loop(node.loop_var, node.min, node.extent, node.body, env, points)
        elif isinstance(node, tirx.AttrStmt):
            variable = getattr(node.node, "var", None)
            if str(node.attr_key) == "thread_extent" and variable not in env:
                self.loop(variable, tirx.const(0), node.value, node.body, env, points)
            else:
                self.statement(node.body, env, points)
        elif isinstance(node, tirx.IfThenElse):
            condition = self.value(node.condition, env, points)
            self.statement(node.then_case, *_where(condition, True, env, points))
            if node.else_case is not None:
                self.statement(node.else_case, *_where(condition, False, env, points))
        elif isinstance(node, tirx.Bind):
            env[node.var] = self.value(node.value, env, points)
        elif isinstance(node, tirx.BufferStore):
            self.value(node.value, env, points)
            self.access(node.buffer, node.indices, env, points)
        elif isinstance(node, tirx.Evaluate):
            self.value(node.value, env, points)
        elif getattr(node, "body", None) is not None:
            self.statement(node.body, env, points)

    def loop(self, variable, low, extent, body, env, points):
        low, extent = (np.broadcast_to(self.value(x, env, points), points) for x in (low, extent))
        assert extent.sum() <= MOST_POINTS, "too many iterations to compute each"
        inner = {name: None if values is None else np.repeat(values, extent) for name, values in env.items()}
        starts = np.repeat(low - np.cumsum(extent) + extent, extent)
        inner[variable] = np.arange(extent.sum()) + starts
        self.statement(body, inner, int(extent.sum()))

    def access(self, buffer, indices, env, points):
        for index, size in zip(indices, buffer.ty.shape, strict=True):
            lanes = index.lanes if isinstance(index, tirx.Ramp) else 1
            first = self.value(index.base if lanes != 1 else index, env, points)
            if first is UNKNOWN or not isinstance(size, tirx.IntImm) or points == 0:
                continue
            last = first + (int(lanes) - 1) * int(index.stride) if lanes != 1 else first
            if np.min(first) < 0 or np.max(last) >= int(size):
                self.found.append(f"{buffer.name}[{index}] from {np.min(first)} to {np.max(last)} of {size}")

    def value(self, node, env, points):
        """The expression's values, of 64 bits; UNKNOWN where they depend on contents.  Notes what it reads."""
        if isinstance(node, tirx.IntImm):
            return np.full(points, int(node), np.int64)
        if isinstance(node, TensorLoad):
            self.access(node.source, node.indices, env, points)
            return UNKNOWN
        if isinstance(node, Var):
            return env.get(node, UNKNOWN)
        if isinstance(node, tirx.Let):
            return self.value(node.body, {**env, node.var: self.value(node.value, env, points)}, points)
        if isinstance(node, tirx.Select):
            return self.choice(node.condition, node.true_value, node.false_value, env, points)
        if isinstance(node, Call):
            name = getattr(node.op, "name", "")
            if name.endswith("if_then_else"):
                return self.choice(*node.args, env, points)
            operands = [self.value(x, env, points) for x in node.args if hasattr(x, "ty")]
            return CALLS[name](*operands) if name in CALLS and not any(x is UNKNOWN for x in operands) else UNKNOWN
        if isinstance(node, tirx.Cast | tirx.Not | tirx.Broadcast):
            inner = self.value(node.a if isinstance(node, tirx.Not) else node.value, env, points)
            if inner is UNKNOWN:
                return UNKNOWN
            return ~inner if isinstance(node, tirx.Not) else inner.astype(np.int64)
        if type(node) in BINARY:
            a, b = (self.value(x, env, points) for x in (node.a, node.b))
            return UNKNOWN if a is UNKNOWN or b is UNKNOWN else BINARY[type(node)](a, b)
        return UNKNOWN

    def choice(self, condition, if_true, if_false, env, points):
        condition = self.value(condition, env, points)
        chosen = [self.value(x, *_where(condition, x is if_true, env, points)) for x in (if_true, if_false)]
        if condition is UNKNOWN or chosen[0] is UNKNOWN or chosen[1] is UNKNOWN:
            return UNKNOWN
        result = np.empty(points, np.int64)
        result[condition.astype(bool)], result[~condition.astype(bool)] = chosen
        return result


def _where(condition, wanted: bool, env, points):
    """Environment and number of the iterations in which the condition is as wanted; all where that is unknown."""
    if condition is UNKNOWN:
        return dict(env), points
    kept = condition.astype(bool) == wanted
    return {name: None if v is None else v[kept] for name, v in env.items()}, int(kept.sum())
