"""PyTorch's results of a model with the user's masks applied to its attentions: the exported graph, rewritten.

A site of the report is tied to a node by what the importer recorded when it named the site (masking.py).  Nothing here
looks at the compiled program.
"""

from collections.abc import Callable

import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import GraphModule, Interpreter
from torch.utils import _pytree as pytree

from stof_tvm.frontend import ImportedModel, import_model
from stof_tvm.frontend.source import copied_graph
from stof_tvm.frontend.states import UPDATES
from stof_tvm.site_masks import SiteMasks, sizes_of
from stof_tvm.verification.choices import follows_from_a_choice
from stof_tvm.verification.masked_nodes import MaskedScores, MaskedSdpa
from stof_tvm.verification.masking import MaskNotApplicable, apply_mask, with_all_rows
from tir_kernels.errors import UnsupportedError

aten = torch.ops.aten
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}
# Operators that sum, as torch.export names them; `_Changed` changes their results.
SUMS = {
    *("addmm", "avg_pool1d", "avg_pool2d", "baddbmm", "bilinear", "bmm", "cdist", "conv1d", "conv2d", "conv3d"),
    *("cosine_similarity", "cumsum", "dot", "einsum", "group_norm", "layer_norm", "linalg_vector_norm", "linear"),
    *("log_softmax", "logsumexp", "matmul", "mean", "mm", "mv", "norm", "prod", "rms_norm", "softmax", "std", "sum"),
    *("scaled_dot_product_attention", "tensordot", "var"),
}
COMPLEX = {torch.complex32: torch.complex64, torch.complex64: torch.complex128}


class Reference:
    """PyTorch's results of an imported model with masks.

    Parameters
    ----------
    imported : ImportedModel
    sites : sequence of RewrittenRow
        Rows of the report for the attentions that a kernel computes.
    mask_for : callable
        Maps a site's path, sizes (B, H, Sq, Skv) and first row to the user's mask there, or None.
    part : callable
        What is returned of the leaves of a result.

    Attributes
    ----------
    untied : dict
        Maps the path of a site whose mask could not be applied to the reason.  If there is one, results must not be
        compared.
    graph : GraphModule
        Takes `arguments(…)`; returns all outputs of the exported program.
    """

    def __init__(
        self, imported: ImportedModel, sites=(), mask_for: Callable = lambda *site: None, part: Callable = list
    ):
        self.program, self.untied, self.part = imported.source, {}, part
        self.states = [state.name for state in imported.states]
        self.graph, by_name = copied_graph(self.program.graph_module)
        self.names = by_name.keys()
        for name, node in by_name.items():
            node.meta["stof.name"] = name
            if node.target is aten.view.default:  # a mask, or another dtype, may come with other strides
                node.target = aten.reshape.default
        for site in sites:
            mask = mask_for(site.site, sizes_of(site), site.first_row)
            if mask is None:
                continue
            at = by_name.get(imported.site_nodes.get(site.site, ""))
            shape = with_all_rows(at, site.mask_shape, site.first_row)
            if shape != site.mask_shape:
                mask = mask_for(site.site, (shape.batch, shape.heads, shape.q_len, shape.kv_len), None)
            try:
                apply_mask(self.graph, at, shape, mask)
            except MaskNotApplicable as reason:
                self.untied[site.site] = str(reason)
        self.graph.graph.lint()
        self.graph.recompile()

    @property
    def why_untied(self) -> str:
        """The reasons in `untied`, for a message."""
        reasons = "; ".join(f"{path or '(the model)'}: {why}" for path, why in self.untied.items())
        return f"PyTorch's graph cannot be given the mask: {reasons}"

    def take_fills_for_masks(self, lowest: float) -> None:
        """From now on the user's masks take scores of `lowest` or less, a model's own fills, for removed, like -inf."""
        for module in self.graph.modules():
            if isinstance(module, MaskedSdpa | MaskedScores):
                module.lowest = lowest

    def __call__(self, args: tuple, kwargs: dict, change=None, sums: bool = False) -> list:
        """The leaves of what the model returns, then the new values of its states, computed in the model's own dtypes.

        `change`, if given, is applied to each floating-point parameter, buffer and input before; with `sums` to the
        result of each sum as well.
        """
        run = _Changed(self.graph, change).run if sums else self.graph
        with torch.no_grad():
            return self._returned(run(*self.arguments(args, kwargs, change)))

    def precise(self, args: tuple, kwargs: dict, dtype: torch.dtype) -> list:
        """The same, with every floating-point tensor narrower than `dtype` widened to it."""
        with torch.no_grad():
            return self._returned(_Widened(self.graph, dtype).run(*self.arguments(args, kwargs)))

    def values(self, args: tuple, kwargs: dict, names: list[str], dtype: torch.dtype | None = None) -> list:
        """The values of some nodes of the exported program, named in any order; with `dtype`, widened to it."""
        recorder = _Recorder(self.graph, dtype, set(names))
        with torch.no_grad():
            recorder.run(*self.arguments(args, kwargs))
        return [recorder.values[name] for name in names]

    def follows_from_a_choice(self, number: int) -> bool:
        """Whether a result, by its number, may be anything where numbers are nearly equal (choices.py)."""
        nodes = self._returned(self.graph.graph.output_node().args[0])
        return follows_from_a_choice(nodes[number])

    def arguments(self, args: tuple, kwargs: dict, change=None) -> list:
        """The graph's inputs for a call of the model: parameters, buffers, constants and the user's inputs."""
        _, example = self.program.in_spec.unflatten(range(self.program.in_spec.num_leaves))
        given = iter(pytree.tree_leaves((args, {name: kwargs[name] for name in example})))  # in the export's order
        values = []
        for spec in self.program.graph_signature.input_specs:
            value = next(given) if spec.kind is InputKind.USER_INPUT else self.program.tensors[str(spec.target)]
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            values.append(change(value) if change is not None and is_float else value)
        return values

    def _returned(self, outputs) -> list:
        pairs = list(zip(outputs, self.program.graph_signature.output_specs, strict=True))
        own = [x for x, spec in pairs if spec.kind in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)]
        new = {spec.target: x for x, spec in pairs if spec.kind in UPDATES}
        return self.part([*own, *(new[name] for name in self.states)])


class _Changed(Interpreter):
    """Runs a graph with every floating-point sum changed, because its rounding depends on the order of summands."""

    def __init__(self, graph: GraphModule, change: Callable):
        super().__init__(graph)
        self.change = change

    def call_function(self, target, args, kwargs):
        value = super().call_function(target, args, kwargs)
        is_sum = getattr(getattr(target, "overloadpacket", None), "__name__", "") in SUMS
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return self.change(value) if is_sum and is_float else value


class _Widened(Interpreter):
    """Runs a graph in a wider dtype: values are widened where they come in, and no operator narrows them again."""

    def __init__(self, graph: GraphModule, dtype: torch.dtype | None):
        super().__init__(graph)
        self.dtype = dtype

    def placeholder(self, target, args, kwargs):
        return self._widened(super().placeholder(target, args, kwargs))

    def get_attr(self, target, args, kwargs):
        return self._widened(super().get_attr(target, args, kwargs))

    def call_function(self, target, args, kwargs):
        if target is aten._assert_tensor_metadata.default:
            return None
        args, kwargs = pytree.tree_map_only(torch.dtype, self._wider, (args, kwargs))
        return super().call_function(target, args, kwargs)

    def _widened(self, value):
        return value.to(self._wider(value.dtype)) if isinstance(value, torch.Tensor) else value

    def _wider(self, dtype: torch.dtype) -> torch.dtype:
        if self.dtype is None:
            return dtype
        while dtype in WIDER and dtype.itemsize < self.dtype.itemsize:
            dtype = WIDER[dtype]
        return COMPLEX.get(dtype, dtype)


class _Recorder(_Widened):
    """Runs a graph like `_Widened`, and keeps the values of some nodes."""

    def __init__(self, graph: GraphModule, dtype: torch.dtype | None, names: set[str]):
        super().__init__(graph, dtype)
        self.names, self.values = names, {}

    def run_node(self, n):
        value = super().run_node(n)
        if (name := n.meta.get("stof.name")) in self.names:
            self.values[name] = value
        return value


def reference_of(model, args=(), kwargs=None, *, report=None, mask=None) -> Reference:
    """The Reference of a model with the masks that `build(model, mask=mask)` applies.

    `report` is that of the engine, whose rewritten sites get the masks.  Raises UnsupportedError where a mask cannot
    be applied in PyTorch's graph, and for rules.
    """
    sites = () if report is None else report.rewritten
    site_masks = SiteMasks(mask, takes_rules=True)
    site_masks.refuse_rules("PyTorch's graph takes masks that are known before a call")
    reference = Reference(import_model(model, args, dict(kwargs or {})), sites, site_masks.given_for)
    if reference.untied:
        raise UnsupportedError(reference.why_untied)
    return reference


def reference_outputs(model, args=(), kwargs=None, *, report=None, mask=None, dtype: torch.dtype | None = None) -> list:
    """The leaves of what `model` returns in PyTorch with these masks; `dtype` as for `Reference.precise`.

    Raises UnsupportedError as `reference_of` does.
    """
    reference = reference_of(model, args, kwargs, report=report, mask=mask)
    call = args, dict(kwargs or {})
    return reference(*call) if dtype is None else reference.precise(*call, dtype)
