"""Rewrite attention to sparse kernels: a composite call becomes call_tir of a kernel on q, k, v and mask constants.

Preconditions: after `CanonicalizeAttention` (every spelling is the composite) and `FoldMasks` (masks that depend on no
input are constants); before `LegalizeOps`.  Shapes must be static.  Transposes around the attention, and the splits
and slices that take q, k and v out of one projection, are absorbed into the kernel's layouts.  The module attribute
`stof.sites`, a JSON list, records which kernel each site got, or why it got none, with the notes of earlier passes.
"""

import contextlib
import functools
import hashlib
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import tvm
from tvm import relax
from tvm.ir.expr import GenericConst
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_passes.attention.attention_site import AttentionSite
from relax_passes.attention.caches.emit_plans import PlanEmitter
from relax_passes.attention.canonicalize_attention import NOT_REWRITTEN
from relax_passes.attention.composite import AttentionCall, is_attention, match_attention
from relax_passes.attention.fold_masks import NOTES
from relax_passes.attention.found_blocks.block_maps import RuleEmitter, SiteRule, described
from relax_passes.attention.found_blocks.results import with_results
from relax_passes.attention.masks.key_counts import KeyCountFinder, KeyCounts
from relax_passes.attention.refusals.folded_queries import folded_queries
from relax_passes.attention.repeated_heads import reshaped
from relax_passes.attention.replaceable_masks import (
    ARRAYS,
    EVERY_BLOCK,
    ReplaceableMask,
    ReplaceableMasks,
    array_parameter,
)
from relax_passes.attention.site_names import named
from relax_passes.attention.spellings.patterns import Known
from relax_passes.ir.bindings import SAME_ELEMENTS, Bindings, dtype_of, operator, permutation, shape_of, static_shape
from relax_passes.ir.open_blocks import closing_blocks
from relax_passes.ir.strided_views import find_view
from relax_passes.report_rows import SITES, with_rows
from relax_passes.tuned_choices import TunedChoices
from tir_kernels.attention.mask_forms import MaskLike
from tir_kernels.attention.problem import LAYOUTS, AttentionProblem, Layouts, View
from tir_kernels.attention.select import Choice, choose
from tir_kernels.compiling.quick_script import quick_script
from tir_kernels.cuda.shared_tiles import chunk_elements
from tir_kernels.errors import MaskError, StofError, UnsupportedError
from tir_kernels.report_rows import AttentionShape, RewrittenRow, SiteRow
from tir_kernels.target import parse_target

COUNTED = "keys up to a number that is given at run time"


@tvm.transform.module_pass(opt_level=0, name="RewriteMaskedAttention")
class RewriteMaskedAttention:
    """Rewrite every composite attention that a kernel of the target covers.

    Parameters
    ----------
    target : tvm.target.Target
        Decides which kernels there are.
    site_mask : callable
        Maps an AttentionSite to the mask to apply there (causal, constant and the user's own together), or to None.
    tuned : TunedChoices, optional
        Kernels measured to be the fastest are preferred to those predicted to be.
    float32 : str
        How attention in float32 is multiplied on a GPU: "ieee" or "tf32".
    replaceable : ReplaceableMasks, optional
        Masks may be replaced after the build: kernels are chosen that compute any mask, mask arrays become parameters
        of "main", and a ReplaceableMask is appended to `kernels` for each attention.
    rule_for : callable
        Maps a site's path to the SiteRule that finds blocks to keep among those of the site's mask, or to None.  Rules
        do not go with `replaceable`.
    is_given : callable
        Whether the user gave a mask or a rule for the attention at a path.
    """

    def __init__(
        self,
        target,
        site_mask: Callable[[AttentionSite], MaskLike | None],
        tuned: TunedChoices | None = None,
        float32: str = "ieee",
        replaceable: ReplaceableMasks | None = None,
        rule_for: Callable[[str], SiteRule | None] = lambda path: None,
        is_given: Callable[[str], bool] = lambda path: False,
    ):
        self.target = target
        self.site_mask = site_mask
        self.tuned = tuned
        self.float32 = float32
        self.replaceable = replaceable
        self.rule_for = rule_for
        self.is_given = is_given

    def transform_module(self, mod, _ctx):
        return _Rewriter(mod, self).transform()


@mutator
class _Rewriter(PyExprMutator):
    def __init__(self, mod, options: RewriteMaskedAttention):
        super().__init__(mod)
        self.mod = mod
        self.target = options.target
        self.site_mask = options.site_mask
        self.tuned = options.tuned
        self.float32 = options.float32
        self.replaceable = options.replaceable
        self.rule_for = options.rule_for
        self.is_given = options.is_given
        self.parameters: list[relax.Var] = []  # for mask arrays
        self.is_cuda = self.target.kind.name == "cuda"
        self.sites: list[SiteRow] = []
        self.choices = {}  # (problem, mask) -> Choice
        self.kernels = {}  # (template, problem, config) -> GlobalVar
        self.plans = PlanEmitter(self.builder_.add_func, self.builder_.emit, self._constant)
        self.rules = RuleEmitter(self.builder_, self._constant)
        self.constants = {}  # content of an array -> one constant shared by all sites
        self.counts: dict[KeyCounts, relax.Var] = {}  # as kernels read them, in the block that is being visited
        self.key_counts: KeyCountFinder
        self.bindings: Bindings  # of the function that is being visited
        self.known: Known
        self.transposed = {}  # attention output (B, H, S, D) -> (axes, the kernel's own output, permuted by them)
        self.permuted_outputs = {}  # attention output of the old function -> the axes by which every reader permutes it

    def transform(self):
        for global_var, function in self.mod.functions_items():
            if not isinstance(function, relax.Function) or is_attention(function):
                continue
            self.bindings = Bindings(function)
            self.known = Known(self.bindings)
            self.key_counts = KeyCountFinder(self.bindings)
            self.permuted_outputs = _outputs_read_only_permuted(self.bindings)
            with closing_blocks(self.builder_):
                new = self._with_arrays(self.visit_expr(function))
                self.builder_.update_func(global_var, with_results(new, self.rules.take_results()))
        for path, reason in self._recorded(NOT_REWRITTEN):
            self.sites.append(SiteRow(site=path, spelling="softmax", reason=reason))
        for path, note in self._recorded(NOTES):
            self.sites = [replace(x, notes=(*x.notes, note)) if x.site == path else x for x in self.sites]
        return with_rows(self.builder_.get(), SITES, self.sites)

    def _with_arrays(self, function):
        """The function with the parameters that were made for its mask arrays."""
        parameters, self.parameters = self.parameters, []
        if not parameters:
            return function
        function = relax.Function(
            [*function.params, *parameters], function.body, function.ret_ty, function.is_pure, function.attrs
        )
        return function.with_attr(ARRAYS, [len(function.params) - len(parameters), len(parameters)])

    def _recorded(self, attribute):
        """The (site, text) pairs that an earlier pass left in a module attribute."""
        attrs = self.mod.attrs
        return [(str(path), str(text)) for path, text in attrs[attribute]] if attrs and attribute in attrs else []

    def visit_dataflow_block_(self, block):
        self.counts = {}
        return super().visit_dataflow_block_(block)

    def visit_var_binding_(self, binding):
        call = match_attention(self.mod, binding.value)
        if call is not None:
            new = self._rewrite(call, self.permuted_outputs.get(binding.var, (0, 1, 2, 3)))
            if new is not None:
                if self.builder_.current_block_is_dataflow() and not isinstance(binding.var, relax.DataflowVar):
                    new = self.builder_.emit_output(new)
                self.set_var_remap(binding.var, new)
                return
        elif isinstance(binding.var, relax.DataflowVar) and operator(binding.value) == "permute_dims":
            source = _before_reshapes(self.bindings, binding.value.args[0])
            axes, output = self.transposed.get(self.visit_expr(source), (None, None))
            if axes == tuple(permutation(binding.value)):
                self.set_var_remap(binding.var, output)
                return
        super().visit_var_binding_(binding)

    def _rewrite(self, call: AttentionCall, out_axes):
        reason = _why_not(call)
        if reason is None and (self.replaceable is not None or self.is_given(call.site)):
            reason = folded_queries(self.bindings, call.q, call.k, self.known.origins)
        rule = self.rule_for(call.site)
        counts = None
        if reason is None:
            sources, layouts = self._sources(call)
            function = None if rule is None else self.rules.function(rule, call)
            try:
                problem = _problem(call, layouts._replace(out="".join("bhsd"[axis] for axis in out_axes)))
                if function is not None:
                    problem = replace(problem, block_map=function.block_map)
                if self.is_cuda and problem.dtype == "float32":
                    problem = replace(problem, float32=self.float32)
                site, mask, choice = self._choose(call, problem)
                if rule is None and (found := self._counted(call, problem, choice)) is not None:
                    counts, choice = found
                    problem, call = choice.problem, replace(call, bias=None)
            except MaskError:
                raise
            except StofError as error:
                reason = _refusal(error)
        if reason is not None and rule is not None and _why_not(call) is None:
            raise UnsupportedError(
                f"attention {named(call.site)}: no kernel keeps the blocks that {rule!r} finds at run time ({reason}); "
                "rule.mask(q, k) is the static mask of what it keeps for some q and k"
            )
        if reason is not None and call.positions is not None:
            raise MaskError(
                f"attention {named(call.site)} is over a cache, and where its {shape_of(call.q)[2]} queries stand "
                f"there is known at run time only, but no kernel has such rows of a mask ({reason}): write the keys at "
                "constant positions, as x[:, :, 0:n] = keys does"
            )
        if reason is not None:
            self.sites.append(SiteRow(site=call.site, spelling=call.spelling, reason=reason))
            return None
        row = _described(call, problem, mask, choice)
        if counts is not None:
            row = replace(row, notes=(*row.notes, COUNTED))
        given = None if call.positions is None else self.visit_expr(call.positions)
        if rule is not None and function is not None:
            row = described(row, rule, function, problem)
            q, k = self.visit_expr(call.q), self.visit_expr(call.k)
            given = self.rules.block_map(function, q, k, mask, problem, row.returns_map)
        self.sites.append(row)
        return self._emit_kernels(call, site, choice, sources, counts, given, out_axes)

    def _counted(self, call, problem: AttentionProblem, with_bias: Choice) -> tuple[KeyCounts, Choice] | None:
        """The key counts that the bias stands for, and the choice of kernels that read them; None for the bias."""
        counts = None if call.bias is None or call.positions is not None else self.key_counts.of(call.bias)
        if counts is None:
            return None
        try:
            counted = replace(problem, bias_shape=None, bias_dtype="float32", key_counts=counts.count)
            _, _, choice = self._choose(call, counted)
        except UnsupportedError:
            return None
        return (counts, choice) if choice.predicted_us <= with_bias.predicted_us else None

    def _sources(self, call):
        """The tensors of which q, k and v are views, and the layout of each view."""
        sources, layouts = [], []
        alignment = chunk_elements(dtype_of(call.q)) if self.is_cuda else 1
        for operand in (call.q, call.k, call.v):
            source, layout = find_view(self.bindings, operand, alignment) or (operand, "bhsd")
            layout = next((name for name in LAYOUTS if layout == _whole(operand, name)), layout)
            sources.append(operand if layout == "bhsd" else source)
            layouts.append(layout)
        q, k, v = layouts
        return sources, Layouts(q, k, v)

    def _choose(self, call, problem):
        constant = None if call.mask is None else call.mask.value.numpy().astype(bool)
        site = AttentionSite(
            call.site, call.causal, constant, call.mask_sizes, call.first_row, call.heads, call.reordered
        )
        mask = self.site_mask(site)
        try:
            if (problem, mask) not in self.choices:
                self.choices[problem, mask] = self._choice(problem, mask)
            return site, mask, self.choices[problem, mask]
        except MaskError as error:
            raise MaskError(f"attention {named(call.site)}: {error}") from None

    def _choice(self, problem, mask) -> Choice:
        for_any_mask = self.replaceable is not None
        if self.replaceable is not None and self.replaceable.written_on_gpu and self.is_cuda:
            with contextlib.suppress(UnsupportedError):  # no kernel reads such lists: the host writes what others read
                written = replace(problem, block_map=EVERY_BLOCK)
                return choose(written, mask, self.target, tuned=self.tuned, for_any_mask=True)
        return choose(problem, mask, self.target, tuned=self.tuned, for_any_mask=for_any_mask)

    def _emit_kernels(self, call, site, choice, sources, counts, given, out_axes):
        emit, problem = self.builder_.emit, choice.problem
        flat = {}  # q, k and v of one projection are views of one buffer
        for name, source in zip("qkv", sources):
            if (source, problem.shape(name)) not in flat:
                flat[source, problem.shape(name)] = reshaped(emit, self.visit_expr(source), problem.shape(name))
        operands = [flat[source, problem.shape(name)] for name, source in zip("qkv", sources)]
        if call.bias is not None:
            operands.append(self.visit_expr(call.bias))
        if counts is not None:
            if counts not in self.counts:
                self.counts[counts] = counts.emit(emit, self.visit_expr, problem.kv_len)
            operands.append(self.counts[counts])
        results = []
        for launch in choice.launches:
            sink = [] if launch.problem.sink_dtype is None else [self.visit_expr(call.sink)]
            results = self._emit_kernel(call, site, launch, [*operands, *sink, *results], given)
        out = results[0]
        if problem.layouts.out == "bhsd":
            return out
        untransposed = emit(relax.op.permute_dims(out, np.argsort(out_axes).tolist()))
        self.transposed[untransposed] = out_axes, out
        return untransposed

    def _emit_kernel(self, call: AttentionCall, site: AttentionSite, launch: Choice, operands, given) -> list:
        """The kernel's outputs: out, and the log-sum-exp if the problem asks for it."""
        problem, template = launch.problem, launch.template
        key = template.NAME, problem, launch.config
        if key not in self.kernels:
            if self.is_cuda:
                with quick_script():
                    function = template.instantiate(problem, launch.config, self.target)
            else:
                function = _on_a_cpu(template, problem, launch.config, str(self.target))
            name = f"sparse_attention_{template.NAME.replace('-', '_')}"
            self.kernels[key] = self.builder_.add_func(function.without_attr("global_symbol"), name)
        operands = [*operands, *self._mask_operands(call, site, launch, key, len(operands), given)]
        types = [relax.TensorType(problem.shape("out"), problem.dtype)]
        if not problem.gives_lse:
            return [self.builder_.emit(relax.call_tir(self.kernels[key], operands, types[0]))]
        types.append(relax.TensorType(problem.lse_shape, "float32"))
        both = self.builder_.emit(relax.call_tir(self.kernels[key], operands, types))
        return [self.builder_.emit(relax.TupleGetItem(both, i)) for i in range(2)]

    def _mask_operands(self, call, site: AttentionSite, launch: Choice, key, place: int, given) -> list:
        """The kernel's arguments from `place` on: what it reads of its mask, and its workspace.

        `given` is what it, or its plan, reads at run time: positions, a block map, or None.
        """
        if self.replaceable is None and given is not None:
            return self.plans.operands(launch, given, self.target)
        if given is not None and self.is_cuda:
            raise UnsupportedError(
                f"attention {named(call.site)} is over a cache: on a GPU its mask cannot be replaced; leave "
                "replaceable_masks out"
            )
        arrays = launch.operands(self.target).arrays
        if self.replaceable is None:
            return [self._constant(array) for array in arrays]
        before = [] if given is None else [given]
        return [*before, *self._parameters(site, launch, self.kernels[key], place + len(before), len(arrays))]

    def _parameters(self, site: AttentionSite, launch: Choice, kernel, place: int, count: int) -> list[relax.Var]:
        """Parameters for the kernel's arguments from `place` on, which are its mask arrays."""
        assert self.replaceable is not None
        function, first = self.builder_.get()[kernel], len(self.parameters)
        buffers = [function.params[place + number].ty for number in range(count)]
        parameters = [array_parameter(first + number, buffer) for number, buffer in enumerate(buffers)]
        self.parameters += parameters
        self.replaceable.kernels.append(
            ReplaceableMask(site, launch.template, launch.problem, launch.config, first, count)
        )
        return parameters

    def _constant(self, array):
        key = array.dtype.str, array.shape, hashlib.sha256(array).digest()
        if key not in self.constants:
            self.constants[key] = relax.const(array, str(array.dtype))
        return self.constants[key]


@functools.lru_cache(maxsize=64)
def _on_a_cpu(template, problem: AttentionProblem, config, target: str) -> tvm.tirx.PrimFunc:
    """A model is often built again, with another mask or with other weights: a third of its time would be this."""
    with quick_script():
        return template.instantiate(problem, config, parse_target(target))


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
    problem = AttentionProblem(
        batch,
        q_heads,
        kv_heads,
        q_len,
        kv_len,
        head_dim,
        v_head_dim,
        str(call.q.ty.dtype),
        call.scale,
        layouts=layouts,
        softcap=call.softcap,
        has_positions=call.positions is not None,
    )
    if call.sink is not None:
        problem = replace(problem, sink_dtype=str(call.sink.ty.dtype))
    if call.bias is None:
        return problem
    b, h, i, j = (int(n) for n in call.bias.ty.shape)
    return replace(problem, bias_shape=(b, h, i, j), bias_dtype=str(call.bias.ty.dtype))


def _refusal(error: StofError) -> str:
    """Why no kernel computes an attention: the error's text without the fields of the problem."""
    return str(error).partition(": AttentionProblem(")[0]


def _described(call: AttentionCall, problem: AttentionProblem, mask, choice: Choice) -> RewrittenRow:
    compiled = choice.mask
    notes = []
    if mask is None:
        notes.append("no static mask: nothing to skip")
    if call.bias is not None:
        notes.append("constant bias" if isinstance(call.bias, GenericConst) else "bias or padding given at run time")
    if call.softcap is not None:
        notes.append(f"scores capped at {call.softcap:g} by tanh")
    if call.sink is not None:
        notes.append("a sink in each head's softmax")
    if call.positions is not None:
        notes.append("each query has the mask's row of its position, which is read at run time")
    return RewrittenRow(
        site=call.site,
        spelling=call.spelling,
        reason=choice.reason,
        density=choice.density,
        block_density=sum(launch.mask.block_density for launch in choice.launches),
        notes=tuple(notes),
        kernel=choice.template.NAME,
        config=" + ".join(launch.config.label for launch in choice.launches),
        block=(compiled.block_m, compiled.block_n),
        mask="none" if mask is None else repr(mask),
        mask_digest=compiled.digest,
        shape=shape_row(problem),
        layouts=tuple(str(layout) for layout in problem.layouts),
        predicted_us=choice.predicted_us,
        measured_us=choice.measured_us,
        first_row=call.first_row,
        all_heads=None if call.heads is None else call.heads[1],
    )


def shape_row(problem: AttentionProblem) -> AttentionShape:
    """A problem's shape as the report shows it."""
    return AttentionShape(
        batch=problem.batch,
        heads=problem.q_heads,
        kv_heads=problem.kv_heads,
        q_len=problem.q_len,
        kv_len=problem.kv_len,
        head_dim=problem.head_dim,
        dtype=problem.dtype,
        has_positions=problem.has_positions,
    )


def _whole(operand, layout: str) -> View:
    """The view that is the whole of a tensor with the operand's elements, stored in `layout`."""
    extents = dict(zip("bhsd", shape_of(operand)))
    strides = {x: math.prod(extents[y] for y in layout[i + 1 :]) for i, x in enumerate(layout)}
    return View(math.prod(extents.values()), 0, *(0 if extents[x] == 1 else strides[x] for x in "bhs"))


def _outputs_read_only_permuted(bindings: Bindings) -> dict:
    """The axes for each variable whose every use is the same permute_dims and keeps the last dimension last.

    Reshapes in between do not count if they bring the shape back, as where batch and heads are one for a while.
    """

    def uses(read, shape) -> set:
        found: set = {None} if read in bindings.outputs else set()
        for var in bindings.readers[read]:
            value = bindings.values.get(var)
            if operator(value) == "permute_dims" and static_shape(read) == shape:
                found.add(tuple(permutation(value)))
            elif operator(value) in SAME_ELEMENTS:
                found |= uses(var, shape)
            else:
                found.add(None)
        return found

    shapes = {var: static_shape(var) for var in bindings.values}
    single = {var: uses(var, shape) for var, shape in shapes.items() if shape is not None and len(shape) == 4}
    permuted = {var: axes.pop() for var, axes in single.items() if len(axes) == 1}
    return {var: axes for var, axes in permuted.items() if axes is not None and axes[3] == 3}


def _before_reshapes(bindings: Bindings, expr):
    """The first variable of the same shape that `expr` is, through reshapes."""
    found, inner = expr, expr
    while isinstance(inner, relax.Var) and bindings.call(inner, *SAME_ELEMENTS) is not None:
        inner = bindings.values[inner].args[0]
        found = inner if static_shape(inner) == static_shape(expr) else found
    return found
