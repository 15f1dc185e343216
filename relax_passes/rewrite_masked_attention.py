"""Rewrite attention to sparse kernels: a composite call becomes call_tir of a TIR kernel on q, k, v and BSR constants.

Preconditions: after `CanonicalizeAttention` (every spelling is the composite) and `FoldMasks` (masks that depend on no
input are constants); before `LegalizeOps`.  Shapes must be static.  Transposes between (B, S, H, D) and (B, H, S, D)
around the attention are absorbed into the kernel's layouts.  What was done, or why not, is recorded for each site in
the module attribute `stof.sites`, a JSON list, with what the passes before had to say.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes.attention_composite import AttentionCall, is_attention, match_attention
from relax_passes.canonicalize_attention import NOT_REWRITTEN
from relax_passes.fold_masks import NOTES
from tir_kernels.attention.problem import AttentionProblem, Layouts
from tir_kernels.attention.select import Choice, MaskLike, choose
from tir_kernels.errors import MaskError, StofError
from tir_kernels.quick_script import quick_script

SITES = "stof.sites"
SWAP_HEADS = [0, 2, 1, 3]


@dataclass(frozen=True)
class AttentionSite:
    """One attention of the model, as the mask's chooser sees it.

    `constant` is the model's own constant mask, bool (1 or B, 1 or H, Sq, Skv), or None; `causal` is "", "top-left" or
    "bottom-right".
    """

    path: str
    causal: str
    constant: np.ndarray | None


@tvm.transform.module_pass(opt_level=0, name="RewriteMaskedAttention")
class RewriteMaskedAttention:
    """Rewrite every composite attention that a kernel of the target covers.

    Parameters
    ----------
    target : tvm.target.Target
        Decides which kernels there are.
    site_mask : callable
        From an AttentionSite to the mask to apply there (all of causal, constant and the user's own), or None.
    """

    def __init__(self, target, site_mask: Callable[[AttentionSite], MaskLike | None]):
        self.target = target
        self.site_mask = site_mask

    def transform_module(self, mod, _ctx):
        return _Rewriter(mod, self.target, self.site_mask).transform()


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, mod, target, site_mask):
        super().__init__(mod)
        self.mod = mod
        self.target = target
        self.site_mask = site_mask
        self.sites = []
        self.kernels = {}  # (template, problem, config) -> GlobalVar
        self.constants = {}  # content of an array -> one constant shared by all sites
        self.transposed = {}  # attention output (B, H, S, D) -> the kernel's own output (B, S, H, D)
        self.swapped_outputs = set()

    def transform(self):
        for global_var, function in self.mod.functions_items():
            if not isinstance(function, relax.Function) or is_attention(function):
                continue
            self.swapped_outputs = _outputs_read_only_swapped(function)
            self.builder_.update_func(global_var, self.visit_expr(function))
        for path, reason in self._recorded(NOT_REWRITTEN):
            self.sites.append({"site": path, "spelling": "softmax", "rewritten": False, "reason": reason})
        for path, note in self._recorded(NOTES):
            for site in self.sites:
                if site["site"] == path:
                    site.setdefault("notes", []).append(note)
        return self.builder_.get().with_attr(SITES, json.dumps(self.sites))

    def _recorded(self, attribute):
        """The (site, text) pairs that an earlier pass left in a module attribute."""
        attrs = self.mod.attrs
        return [(str(path), str(text)) for path, text in attrs[attribute]] if attrs and attribute in attrs else []

    def visit_var_binding_(self, binding):
        call = match_attention(self.mod, binding.value)
        if call is not None:
            swapped = binding.var in self.swapped_outputs
            new = self._rewrite(call, swapped)
            if new is not None:
                if not isinstance(binding.var, relax.DataflowVar):
                    new = self.builder_.emit_output(new)
                self.set_var_remap(binding.var, new)
                return
        elif isinstance(binding.var, relax.DataflowVar) and (source := _swap_source(binding.value)) is not None:
            source = self.visit_expr(source)
            if source in self.transposed:
                self.set_var_remap(binding.var, self.transposed[source])
                return
        super().visit_var_binding_(binding)

    def _rewrite(self, call: AttentionCall, swapped: bool):
        row = {"site": call.site, "spelling": call.spelling, "rewritten": False}
        self.sites.append(row)
        reason = _why_not(call)
        if reason is None:
            operands, layouts = self._operands(call)
            try:
                problem = _problem(call, layouts._replace(out="bshd" if swapped else "bhsd"))
                mask, choice = self._choose(call, problem)
            except MaskError:
                raise
            except StofError as error:
                reason = str(error)
        if reason is not None:
            row["reason"] = reason
            return None
        row.update(_describe(call, problem, mask, choice))
        return self._emit_kernels(problem, choice, operands)

    def _operands(self, call):
        """q, k, v with a transpose that made them undone, and the layouts that this leaves them in."""
        operands, layouts = [], []
        for operand in (call.q, call.k, call.v):
            source = _swap_source(self.lookup_binding(operand)) if isinstance(operand, relax.Var) else None
            operands.append(self.visit_expr(operand if source is None else source))
            layouts.append("bhsd" if source is None else "bshd")
        if call.bias is not None:
            operands.append(self.visit_expr(call.bias))
        return operands, Layouts(*layouts)

    def _choose(self, call, problem):
        constant = None if call.mask is None else call.mask.value.numpy().astype(bool)
        mask = self.site_mask(AttentionSite(call.site, call.causal, constant))
        try:
            return mask, choose(problem, mask, self.target)
        except MaskError as error:
            raise MaskError(f"attention {call.site!r}: {error}") from None

    def _emit_kernels(self, problem, choice, operands):
        results = []
        for launch in choice.launches:
            results = self._emit_kernel(launch, [*operands, *results])
        out = results[0]
        if problem.layouts.out == "bhsd":
            return out
        untransposed = self.builder_.emit(relax.op.permute_dims(out, SWAP_HEADS))
        self.transposed[untransposed] = out
        return untransposed

    def _emit_kernel(self, launch: Choice, operands) -> list:
        """The kernel's outputs: out, and the log-sum-exp where it gives that."""
        problem, template = launch.problem, launch.template
        key = template.NAME, problem, launch.config
        if key not in self.kernels:
            with quick_script():
                function = template.instantiate(problem, launch.config, self.target)
            name = f"sparse_attention_{template.NAME.replace('-', '_')}"
            self.kernels[key] = self.builder_.add_func(function.without_attr("global_symbol"), name)
        constants = [self._constant(array) for array in template.mask_operands(launch.mask, problem)]
        types = [relax.TensorType(problem.shape("out"), problem.dtype)]
        if not problem.gives_lse:
            return [self.builder_.emit(relax.call_tir(self.kernels[key], [*operands, *constants], types[0]))]
        types.append(relax.TensorType(problem.lse_shape, "float32"))
        both = self.builder_.emit(relax.call_tir(self.kernels[key], [*operands, *constants], types))
        return [self.builder_.emit(relax.TupleGetItem(both, i)) for i in range(2)]

    def _constant(self, array):
        key = array.dtype.str, array.shape, hashlib.sha256(array).digest()
        if key not in self.constants:
            self.constants[key] = relax.const(array, str(array.dtype))
        return self.constants[key]


def _why_not(call: AttentionCall) -> str | None:
    """The reason why a site must stay dense, or None."""
    for name, operand in (("q", call.q), ("k", call.k), ("v", call.v), ("bias", call.bias)):
        if operand is not None and not all(isinstance(n, tvm.tirx.IntImm) for n in operand.ty.shape):
            return f"{name} has the symbolic shape {list(operand.ty.shape)}"
    if call.mask is not None and not isinstance(call.mask, GenericConst):
        return "its mask is computed from the model's inputs and could not be split into a static and a run-time part"
    return None


def _problem(call: AttentionCall, layouts: Layouts) -> AttentionProblem:
    batch, q_heads, q_len, head_dim = (int(n) for n in call.q.ty.shape)
    _, kv_heads, kv_len, v_head_dim = (int(n) for n in call.v.ty.shape)
    bias = {}
    if call.bias is not None:
        bias = {"bias_shape": tuple(int(n) for n in call.bias.ty.shape), "bias_dtype": str(call.bias.ty.dtype)}
    return AttentionProblem(
        batch,
        q_heads,
        kv_heads,
        q_len,
        kv_len,
        head_dim,
        v_head_dim,
        str(call.q.ty.dtype),
        call.scale,
        **bias,
        layouts=layouts,
    )


def _describe(call: AttentionCall, problem: AttentionProblem, mask, choice: Choice) -> dict:
    """One JSON row of the report."""
    compiled = choice.mask
    notes = []
    if mask is None:
        notes.append("no static mask: nothing to skip")
    if call.bias is not None:
        notes.append("constant bias" if isinstance(call.bias, GenericConst) else "bias or padding given at run time")
    return {
        "rewritten": True,
        "kernel": choice.template.NAME,
        "config": " + ".join(launch.config.label for launch in choice.launches),
        "block": [compiled.block_m, compiled.block_n],
        "mask": "none" if mask is None else repr(mask),
        "mask_digest": compiled.digest,
        "density": choice.density,
        "block_density": sum(launch.mask.block_density for launch in choice.launches),
        "shape": {
            "batch": problem.batch,
            "heads": problem.q_heads,
            "kv_heads": problem.kv_heads,
            "q_len": problem.q_len,
            "kv_len": problem.kv_len,
            "head_dim": problem.head_dim,
            "dtype": problem.dtype,
        },
        "layouts": list(problem.layouts),
        "predicted_us": choice.predicted_us,
        "reason": choice.reason,
        "notes": notes,
    }


def _swap_source(expr):
    """x where expr is permute_dims(x, [0, 2, 1, 3]), else None."""
    if not isinstance(expr, relax.Call) or expr.op != tvm.ir.Op.get("relax.permute_dims"):
        return None
    axes = expr.attrs.axes
    return expr.args[0] if axes is not None and [int(a) for a in axes] == SWAP_HEADS else None


def _outputs_read_only_swapped(function: relax.Function) -> set:
    """Variables whose every use in the function is permute_dims(·, [0, 2, 1, 3])."""
    values = [binding.value for block in function.body.blocks for binding in block.bindings]
    swapped, otherwise = set(), set()
    for value in [*values, function.body.body]:
        used = swapped if _swap_source(value) is not None else otherwise
        used.update(relax.analysis.free_vars(value))
    return swapped - otherwise
