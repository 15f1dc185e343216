"""The lowering of functions for a CPU: TVM's own pipeline, then a pass that stores variables' values on the stack.

This module registers the TIR pipeline "stof-cpu".

TVM's LLVM code generator tells its simplifier the value of each variable, and the simplifier writes that value out at
every use.  If each value uses the variable before it three times, time and memory grow exponentially with the length of
the chain: one erf of a GELU took minutes, two GELUs took hours.  The simplifier does not look into a load from the
stack, and LLVM turns the load into a register.
"""

import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, Var
from tvm.tirx import compilation_pipeline

cpu_pipeline_name = "stof-cpu"


@tvm.transform.module_pass(opt_level=0, name="KeepOnStack")
class KeepOnStack:
    """Replace float variables of bindings, and those within expressions of bindings and stores, by stack buffers.

    Bindings within a branch of an expression are left alone: what the branch guards, such as a load out of bounds,
    stays guarded.

    Precondition: this is the last pass before code generation.  It runs after vectorisation, which would let all lanes
    share one element of such a buffer.
    """

    def transform_module(self, mod, _ctx):
        changed = {}
        for name, function in mod.functions_items():
            if isinstance(function, tirx.PrimFunc):
                body = _kept_on_stack(function.body)
                if not body.same_as(function.body):
                    changed[name] = function.with_body(body)
        if changed:
            mod = mod.clone()
            mod.update(tvm.IRModule(changed))
        return mod


def _kept_on_stack(body):
    slots: dict = {}  # variable of a statement -> the buffer that has its value

    def keep(statement):
        if isinstance(statement, tirx.BufferStore) and not _binds_floats(statement.value):
            return statement
        bound = {}  # variable -> value, of the statement's expression
        guarded = _guarded(statement.value)

        def take_out(let):
            if let in guarded or not _is_float(let.var):
                return let
            bound[let.var] = let.value
            return let.body

        value = tvm_ffi.structural_map(statement.value, (tirx.Let, take_out), order="post")
        is_store = isinstance(statement, tirx.BufferStore)
        if not is_store and _is_float(statement.var):
            bound[statement.var] = value
        elif not bound:
            return statement
        ordered: dict[Var, None] = {}
        for var in bound:
            _after_what_it_reads(var, bound, ordered)
        # These buffers belong to this statement alone: another may share the expression and its variables.
        own = {var: tirx.decl_buffer((1,), str(var.ty.dtype), var.name) for var in ordered}
        statements = []
        for var, slot in own.items():
            statements += [tirx.AllocBuffer(slot), tirx.BufferStore(slot, _loaded(bound[var], own), [0])]
        if is_store:
            statements.append(tirx.BufferStore(statement.buffer, _loaded(value, own), statement.indices))
        elif statement.var in bound:
            slots[statement.var] = own[statement.var]
        else:
            statements.append(tirx.Bind(statement.var, _loaded(value, own)))
        return tirx.SeqStmt(statements)

    callbacks = [(tirx.SeqStmt, _flat)]
    if _binds_floats(body):
        callbacks += [(tirx.BufferStore, keep), (tirx.Bind, keep)]
    body = tvm_ffi.structural_map(body, callbacks, order="post")
    return _loaded(body, slots) if slots else body


def _binds_floats(part) -> bool:
    """Whether a statement or expression binds a float variable; most do not."""
    found: list = []
    see = lambda bound: found.append(bound) if _is_float(bound.var) else None
    tvm_ffi.structural_walk(part, [(tirx.Let, see), (tirx.Bind, see)], order="post")
    return bool(found)


def _loaded(part, slots: dict):
    """A statement or expression that loads from the slots instead of reading the variables."""
    loads = {var: tirx.BufferLoad(slot, [0]) for var, slot in slots.items()}
    return tvm_ffi.structural_map(part, (Var, lambda var: loads.get(var, var)), order="post")


def _after_what_it_reads(var, bound: dict, ordered: dict) -> None:
    """Add a variable to `ordered`, after those that its value reads."""
    if var not in ordered:
        read: list[Var] = []
        tvm_ffi.structural_walk(bound[var], (Var, read.append), order="post")
        for other in read:
            if other in bound and not other.same_as(var):
                _after_what_it_reads(other, bound, ordered)
        ordered[var] = None


def _guarded(value) -> set:
    """The bindings within a branch of `value`."""
    guarded: set = set()

    def see(call):
        if getattr(call.op, "name", "") == "prim.if_then_else":
            for branch in call.args[1:]:
                tvm_ffi.structural_walk(branch, (tirx.Let, guarded.add), order="post")

    tvm_ffi.structural_walk(value, (Call, see), order="post")
    return guarded


def _is_float(var) -> bool:
    return str(getattr(var.ty, "dtype", "")).startswith("float")  # scalar or vector; not bfloat16, which is only moved


def _flat(sequence):
    """Flatten nested sequences into one, because a buffer is known to the end of the sequence that allocates it."""
    if not any(isinstance(part, tirx.SeqStmt) for part in sequence.seq):
        return sequence
    return tirx.SeqStmt([x for part in sequence.seq for x in (part.seq if isinstance(part, tirx.SeqStmt) else [part])])


def _cpu_pipeline():
    lower, finalize_host, finalize_device = compilation_pipeline.get_tir_pipeline("default")
    return lower, lambda: tvm.transform.Sequential([finalize_host(), KeepOnStack()]), finalize_device


compilation_pipeline.register_tir_pipeline(cpu_pipeline_name, _cpu_pipeline)
