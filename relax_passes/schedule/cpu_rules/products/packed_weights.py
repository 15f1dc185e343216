"""Constant matrices in panels, of which the register tile of a product is one or a few.

A product with B (k, n) reads one column tile of it after the other.  Where B is a constant, it is stored as these tiles
are read, B[n // panel, k, n % panel], and no call copies it.  The last panel is padded with zeros, and the product runs
over whole tiles: for rows beyond the last it computes the last row again, in elements that nobody reads.  The panels of
a matrix do not depend on the number of rows, so engines of several lengths have the same bytes and hold them once.

Preconditions: after `ApplyTuningRecords`, whose records are for functions with B as it was; before `ScheduleForCPU`.
"""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx
from tvm.ir import Call
from tvm.ir.expr import GenericConst

from relax_passes.ir.bindings import Bindings
from relax_passes.ir.bindings import operator as operator_of
from relax_passes.ir.constant_arrays import array_of
from relax_passes.ir.rebuild import rebuild
from relax_passes.schedule.apply_tuning_records import is_unscheduled
from relax_passes.schedule.cpu_rules import blocks as blk
from relax_passes.schedule.cpu_rules.products.contraction import match_contraction
from relax_passes.schedule.cpu_rules.products.tile import (
    COLUMNS,
    PANEL_VECTORS,
    TILE_ROWS,
    TILE_VECTORS,
    choose_panel_tile,
    panel_vectors,
)
from relax_passes.schedule.cpu_rules.simd import Simd, simd_of

DTYPE = "float32"  # half precision is converted by blocks of its own


@dataclass(frozen=True)
class Panels:
    """How a matrix (k, n), or (n, k) where it is transposed, is stored: in panels of `width` columns."""

    width: int
    is_transposed: bool

    def index(self, *axes) -> tuple:
        """Where an element of the matrix is stored."""
        depth, column = reversed(axes) if self.is_transposed else axes
        return column // self.width, depth, column % self.width

    def pack(self, matrix: np.ndarray) -> np.ndarray:
        """The panels (n / width rounded up, k, width) in the matrix's dtype, zeros behind column n."""
        matrix = matrix.T if self.is_transposed else matrix
        depth, columns = matrix.shape
        whole = columns // self.width
        panels = np.zeros((-(-columns // self.width), depth, self.width), matrix.dtype)
        np.copyto(panels[:whole], matrix[:, : whole * self.width].reshape(depth, whole, self.width).transpose(1, 0, 2))
        if columns % self.width:
            panels[whole, :, : columns % self.width] = matrix[:, whole * self.width :]
        return panels


@tvm.transform.module_pass(opt_level=0, name="PackWeights")
class PackWeights:
    """Store in panels each float32 matrix that is a constant in every call of a function with a product that reads it.

    A function that also reads the matrix otherwise keeps it as it is.
    """

    def __init__(self, target):
        self.simd = simd_of(target)

    def transform_module(self, mod, _ctx):
        constants = _constant_arguments(mod)
        packed = {}
        for name, func in mod.functions_items():
            if isinstance(func, tirx.PrimFunc) and is_unscheduled(func) and constants.get(name):
                function, panels = pack_weights(func, constants[name], self.simd)
                if panels:
                    packed[name] = function, panels
        if not packed:
            return mod
        # A variable keeps the type of its function: each packed function has a new one of the same name.
        names = {name: relax.BlockBuilder().add_func(packed[name][0], name.name_hint) for name in packed}
        functions = {names.get(name, name): packed.get(name, [func])[0] for name, func in mod.functions_items()}
        mod = tvm.IRModule(functions, attrs=mod.attrs)
        stored: dict = {}  # (constant, panels) -> the constant in panels

        def in_panels(constant, panels):
            at = constant, panels
            if at not in stored:
                stored[at] = relax.const(panels.pack(array_of(constant)))
            return stored[at]

        def replace(_builder, var, new):
            call = bound[var]
            if not _is_call_tir(call) or call.args[0] not in packed:
                return None
            fields = list(call.args[1].fields)
            for position, panels in packed[call.args[0]][1].items():
                fields[position] = in_panels(fields[position], panels)
            arguments = [names[call.args[0]], relax.Tuple([new(field) for field in fields])]
            return relax.Call(call.op, arguments, call.attrs, call.ty_args, call.span)

        bound = Bindings(mod["main"]).values
        return rebuild(mod, replace)


def pack_weights(
    func: tirx.PrimFunc, constants: Collection[int], simd: Simd
) -> tuple[tirx.PrimFunc, dict[int, Panels]]:
    """An unscheduled function that reads parameters among `constants` in panels, and these panels by position."""
    panels: dict[int, Panels] = {}
    sch = s_tir.Schedule(func)
    for name in [sch.get(block).name_hint for block in blk.top_blocks(sch)]:
        try:
            found = _with_packed_product(sch, name, set(constants) - set(panels), simd)
        except blk.REFUSALS:
            sch = s_tir.Schedule(func)
            continue
        if found is not None:
            func, position, panels[position] = found
            sch = s_tir.Schedule(func)
    return func, panels


def _with_packed_product(sch, name: str, constants: Collection[int], simd: Simd):
    """(the function, a parameter's position, its panels) if block `name` is a product with that parameter; or None.

    A schedule for which this is None is still what it was.
    """
    func, block = sch.mod["main"], sch.get_sblock(name)
    roles = match_contraction(sch, block)
    if roles is None or TILE_ROWS in sch.get(block).annotations or sch.get_producers(block):
        return None
    stmt, sizes = sch.get(block), [blk.extent(sch, loop) for loop in sch.get_loops(block)]
    matrix, columns = stmt.reads[roles.b].source, sizes[roles.column]
    position = next((i for i in constants if func.params[i].same_as(matrix)), None)
    reads = sum(load.source.same_as(matrix) for load in blk.loads_in(func.body))
    if position is None or columns is None or reads != 1 or len(matrix.ty.shape) != 2 or str(matrix.ty.dtype) != DTYPE:
        return None
    rows = 1 if roles.row is None else sizes[roles.row]
    tile, width = choose_panel_tile(rows, columns, simd), panel_vectors(columns, simd)
    factors = [1] * len(sizes)
    if tile.pads_rows:
        assert roles.row is not None  # one row is a whole tile
        factors[roles.row] = tile.rows
    if tile.pads_columns:
        factors[roles.column] = width * simd.lanes
    if factors.count(1) < len(factors):
        sch.pad_einsum(block, factors)
    copies = {sch.get(x).reads[0].source: x for x in sch.get_producers(block)}
    copy = copies.pop(matrix, None) or sch.cache_read(block, roles.b, "global")
    for padded in copies.values():
        sch.compute_inline(padded)
    panels = Panels(width * simd.lanes, roles.b_is_transposed)
    sch.transform_layout(block, ("read", roles.b), panels.index)
    shape = {TILE_ROWS: tile.rows, TILE_VECTORS: tile.vectors, PANEL_VECTORS: width, COLUMNS: columns}
    for key, value in shape.items():
        sch.annotate(block, key, value)
    function = _without_copy(sch.mod["main"], sch.get(copy), position)
    return _with_clamped_rows(function, name), position, panels


def _without_copy(func, copy, position: int):
    """The function that has as a parameter what the block `copy` makes of this parameter."""
    root, panels = func.body.block, copy.writes[0].source
    nests = [nest for nest in root.body.seq if not any(block.name_hint == copy.name_hint for block in _blocks(nest))]
    body = nests[0] if len(nests) == 1 else tirx.SeqStmt(nests)
    allocated = [buffer for buffer in root.alloc_buffers if not buffer.same_as(panels)]
    block = s_tir.SBlock([], [], [], root.name_hint, body, alloc_buffers=allocated)
    params = [*func.params[:position], panels, *func.params[position + 1 :]]
    return tirx.PrimFunc(params, s_tir.SBlockRealize([], True, block), func.ret_type, func.attrs)


def _with_clamped_rows(func, name: str):
    """The function whose product `name` loads A[min(m, last), k] where it was `if_then_else(m <= last, A[m, k], 0)`."""
    row = last = matrix = None

    def clamped(index):
        return tirx.Min(index, last) if index.same_as(row) else index

    def clamp(call):
        nonlocal row, last, matrix
        if getattr(call.op, "name", "") != "prim.if_then_else":
            return call
        condition, load, _ = call.args
        row, last, matrix = condition.a, condition.b - 1, load.source
        return tirx.BufferLoad(matrix, [clamped(index) for index in load.indices])

    def clamp_block(block):
        if block.name_hint != name:
            return block
        body = tvm_ffi.structural_map(block.body, (Call, clamp), order="post")
        reads = [
            tirx.BufferRegion(x.source, [tvm.ir.Range.from_min_extent(clamped(r.min), r.extent) for r in x.region])
            if x.source.same_as(matrix)
            else x
            for x in block.reads
        ]
        return s_tir.SBlock(
            block.iter_vars, reads, block.writes, name, body, block.init, block.alloc_buffers, [], block.annotations
        )

    return func.with_body(tvm_ffi.structural_map(func.body, (s_tir.SBlock, clamp_block), order="post"))


def _constant_arguments(mod) -> dict:
    """For each function that "main" calls, the positions of arguments that are constants in every call."""
    found: dict = {}
    names = {var.name_hint for var in mod.get_global_vars()}
    for value in Bindings(mod["main"]).values.values() if "main" in names else ():
        if _is_call_tir(value):
            positions = {i for i, x in enumerate(value.args[1].fields) if isinstance(x, GenericConst)}
            found[value.args[0]] = found.get(value.args[0], positions) & positions
    return found


def _is_call_tir(value) -> bool:
    return (
        isinstance(value, relax.Call)
        and operator_of(value) == "call_tir"
        and len(value.args) == 2
        and isinstance(value.args[1], relax.Tuple)
    )


def _blocks(stmt) -> list:
    found: list = []
    tvm_ffi.structural_walk(stmt, (s_tir.SBlock, found.append), order="post")
    return found
