"""Constants where compiled code can read them.

Weights that are mapped from a file begin where the file has them, and compiled code takes boundaries of 64 bytes for
granted.  After `ShardTensors` what ranks divide was copied in parts; what every rank has whole is copied here.
"""

import tvm
from tvm import relax
from tvm.ir.expr import GenericConst

from relax_passes.ir.constant_arrays import with_aligned
from relax_passes.ir.rebuild import rebuild


@tvm.transform.module_pass(opt_level=0, name="AlignConstants")
class AlignConstants:
    """Replace the constants of "main" that are not aligned by copies that are."""

    def transform_module(self, mod, _ctx):
        copies: dict[GenericConst, relax.Expr] = {}
        blocks = mod["main"].body.blocks
        values = {binding.var: with_aligned(binding.value, copies) for block in blocks for binding in block.bindings}
        if not copies:
            return mod
        return rebuild(mod, lambda _builder, var, new: new(values[var]))
