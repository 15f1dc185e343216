"""Where an attention is masked in PyTorch's graph: at the attention itself, or at the scores of a softmax.

A softmax may be spelled softmax, exp(log_softmax), exp(s - logsumexp(s)) or exp(s) over its sum, the maximum of a row
subtracted before or not.  Anything that is not one of these for certain is refused, never guessed.
"""

import math
import weakref
from dataclasses import replace

import torch
from torch.fx import GraphModule

from stof_tvm.verification.masked_nodes import Keep, MaskedScores, MaskedSdpa, ZeroRows
from stof_tvm.verification.positions import positions_of
from tir_kernels.errors import MaskError
from tir_kernels.report_rows import AttentionShape

aten = torch.ops.aten
LARGEST_MASK = 1 << 30  # elements
SDPA = (aten.scaled_dot_product_attention.default,)
SOFTMAX = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
LOG_SOFTMAX = (aten.log_softmax.int, aten._log_softmax.default)
EXP = (aten.exp.default, aten.exp2.default)
LOGSUMEXP = (aten.logsumexp.default,)
CASTS = (aten.to.dtype, aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default)
ROW_MAXIMA = (aten.amax.default, aten.max.dim)
PADS = (aten.pad.default, aten.constant_pad_nd.default)
SUMS = (aten.sum.dim_IntList, aten.sum.default)


class MaskNotApplicable(Exception):
    """A mask cannot be applied to a site in PyTorch's graph; the message says why."""


_known: weakref.WeakValueDictionary[tuple, torch.Tensor] = weakref.WeakValueDictionary()


def _dense(mask, rows: int, kv_len: int) -> torch.Tensor:
    """`mask.dense`, made once for all layers that have an equal mask."""
    key = mask.identity, rows, kv_len
    dense = _known.get(key)
    if dense is None:
        dense = _known[key] = mask.dense(rows, kv_len)
    return dense


def apply_mask(module: GraphModule, node, shape: AttentionShape, mask) -> None:
    """Put a mask on the attention that a graph's node belongs to; MaskNotApplicable where it is not known how.

    `shape` is that of the attention.  The caller recompiles the graph afterwards.
    """
    if node is None:
        raise MaskNotApplicable("no node of the exported program is known for it")
    rows, kv_len = shape.kv_len if shape.has_positions else shape.q_len, shape.kv_len
    if rows * kv_len > LARGEST_MASK:
        raise MaskNotApplicable(f"a mask of {rows} × {kv_len} is too large to be computed densely")
    try:
        dense = _dense(mask, rows, kv_len)
    except MaskError as error:
        raise MaskNotApplicable(str(error)) from None
    if node.target in SDPA:
        keep = _keep(dense, node, shape, node.args[1])
        _replace(module, node, MaskedSdpa(node.target, keep))
    elif node.target in SOFTMAX + LOG_SOFTMAX:
        _on_softmax(module, node, dense, shape)
    elif node.target in EXP + LOGSUMEXP:
        _on_exp(module, node, dense, shape)
    else:
        raise MaskNotApplicable(f"{node.target} is no attention that the reference knows")


def with_all_rows(node, shape: AttentionShape, first_row: int | None) -> AttentionShape:
    """The shape of an attention as it is in the graph, of which an engine computes only the rows that are read.

    With a window it computes them of some keys, too: then `first_row` is that of its first query among these.
    """
    if node is None or "val" not in node.meta or node.target not in SDPA + SOFTMAX + LOG_SOFTMAX + EXP + LOGSUMEXP:
        return shape
    scores = _scores_of(node) if node.target in EXP + LOGSUMEXP else node
    sizes = scores.meta["val"].shape
    turned = node.target in SOFTMAX + LOG_SOFTMAX and node.args[1] in (-2, len(sizes) - 2)
    rows = sizes[-1 if turned else -2] if len(sizes) > 1 else shape.q_len
    has_some_keys = first_row is not None and rows > shape.kv_len
    if rows == shape.q_len or not (rows == shape.kv_len or has_some_keys):
        return shape
    return replace(shape, q_len=rows, kv_len=rows, has_positions=False)


def _on_softmax(module: GraphModule, node, dense, shape: AttentionShape) -> None:
    rank, source = node.meta["val"].dim(), node.args[0]
    axis = node.args[1] if node.args[1] < 0 else node.args[1] - rank
    if axis not in (-1, -2):
        raise MaskNotApplicable(f"its softmax is over dimension {node.args[1]} of {rank}")
    first = _first_column(source, dense.shape[-1], axis)
    if axis == -2:
        node = _turned(module, node)
    scores = node.args[0]
    keep = _keep(dense, scores, shape)
    _mask_gates(module, _before(source, CASTS), node, MaskedScores(keep, first), axis)
    with module.graph.inserting_before(node):
        node.args = (_call(module, MaskedScores(keep, first), scores), *node.args[1:])
    zero = ZeroRows(keep, first, float("-inf") if node.target in LOG_SOFTMAX else 0.0)
    _follow(module, node, zero, scores, list(node.users))


def _turned(module: GraphModule, node):
    """Replace `node`, a softmax over the last dimension but one, by one over the last of transposed scores."""
    graph, scores = module.graph, node.args[0]
    with graph.inserting_before(node):
        turned = _swapped(module, scores)
        new = graph.call_function(node.target, (turned, -1, *node.args[2:]), node.kwargs)
        new.meta = {**node.meta, "val": node.meta["val"].transpose(-1, -2)}
        new.meta.pop("stof.name", None)
        back = graph.call_function(aten.transpose.int, (new, -1, -2))
    back.meta = node.meta
    node.replace_all_uses_with(back)
    graph.erase_node(node)
    return new


def _mask_gates(module: GraphModule, scores, softmax, mask: MaskedScores, axis: int) -> None:
    """Let gates read masked scores, whose keys are along `axis`."""
    readers = _read_by_gates(module, scores, softmax)
    if not readers:
        return
    masked = scores
    with module.graph.inserting_after(scores):
        if axis == -2:
            masked = _swapped(module, masked)
    with module.graph.inserting_after(masked):
        masked = _call(module, mask, masked)
    with module.graph.inserting_after(masked):
        if axis == -2:
            masked = _swapped(module, masked)
    for reader in readers:
        reader.replace_input_with(scores, masked)


def _swapped(module: GraphModule, node):
    new = module.graph.call_function(aten.transpose.int, (node, -1, -2))
    new.meta = {**node.meta, "val": node.meta["val"].transpose(-1, -2)}
    new.meta.pop("stof.name", None)
    return new


def _read_by_gates(module: GraphModule, scores, softmax) -> list:
    """Nodes that read the scores for a sink's gate, a sigmoid that only products read; the softmax is left out."""
    found = []
    for gate in module.graph.nodes:
        if gate.target is not aten.sigmoid.default or not all(x.target is aten.mul.Tensor for x in gate.users):
            continue
        seen, pending = set(), [gate]
        while pending:
            node = pending.pop()
            if node not in seen and node is not scores and node is not softmax:
                seen.add(node)
                pending += node.all_input_nodes
        if softmax not in {x for node in seen for x in node.all_input_nodes}:
            found += [node for node in scores.users if node in seen]
    return list(dict.fromkeys(found))


def _on_exp(module: GraphModule, node, dense, shape: AttentionShape) -> None:
    """Mask the scores for all that reads them: exp, its sum, and the maximum or logsumexp subtracted before."""
    scores = _scores_of(node)
    if scores.meta["val"].shape[-1] != dense.shape[-1]:
        raise MaskNotApplicable(f"its scores have the shape {tuple(scores.meta['val'].shape)}")
    if any(user.op != "call_function" for user in scores.users):
        raise MaskNotApplicable("its scores have another reader")
    if any(_reduces_rows(x) for weights in (node, scores) for x in weights.users):
        raise MaskNotApplicable("its sum is not over the last dimension")
    keep = _keep(dense, scores, shape)
    alike = [x for x in module.graph.nodes if x.target in EXP and _scores_of(x) is scores]
    readers = list(scores.users)
    totals = [*readers, *(user for weights in alike for user in weights.users)]
    if not any(user.target in SUMS + LOGSUMEXP for user in totals):
        raise MaskNotApplicable("its weights are not divided by their own sum")
    with module.graph.inserting_after(scores):
        masked = _call(module, MaskedScores(keep), scores)
    for reader in readers:
        reader.replace_input_with(scores, masked)
    for weights in alike:
        # Their sum still has the emptied rows, so that a quotient is 0 and not 0 / 0.
        users = [user for user in weights.users if user.target not in SUMS]
        _follow(module, weights, ZeroRows(keep), scores, users)


def _reduces_rows(node) -> bool:
    """Whether a sum, a maximum or a logsumexp is over another dimension than the last."""
    if node.target not in SUMS + ROW_MAXIMA + LOGSUMEXP:
        return False
    rank = node.args[0].meta["val"].dim()
    axes = node.args[1] if len(node.args) > 1 else None
    axes = [axes] if isinstance(axes, int) else axes
    return not axes or any(axis not in (-1, rank - 1) for axis in axes)


def _scores_of(node):
    """The scores that exp or logsumexp reads, before the rows' maximum or logsumexp was subtracted."""
    scores = _before(node.args[0], CASTS)
    if scores.target is aten.sub.Tensor and _is_of_rows(scores.args[1], scores.args[0]):
        scores = _before(scores.args[0], CASTS)
    return scores


def _keep(dense, node, shape: AttentionShape, keys=None) -> Keep:
    """The mask for scores with the leading dimensions and rows of `node`; `keys` are theirs, if a node holds them."""
    *lead, rows, _ = node.meta["val"].shape
    if rows != shape.q_len:
        raise MaskNotApplicable(f"its scores have {rows} rows for {shape.q_len} queries")
    if dense.dim() == 4 and dense.shape[:2] != (1, 1) and math.prod(lead) != shape.batch * shape.heads:
        raise MaskNotApplicable(f"{shape.batch} × {shape.heads} masks do not fit scores with leading dimensions {lead}")
    positions = None
    if shape.has_positions and (positions := positions_of(node if keys is None else keys, shape.q_len)) is None:
        raise MaskNotApplicable("no positions, or several, are found at which the call writes its keys")
    return Keep(dense, tuple(lead), shape.batch, shape.heads, positions)


def _first_column(scores, kv_len: int, axis: int = -1) -> int:
    """The index along `axis` at which the keys begin: 0, or the width of what stands before them."""
    width = scores.meta["val"].shape[axis]
    if width == kv_len:
        return 0
    node = _before(scores, CASTS)
    if node.target is aten.sub.Tensor and _is_of_rows(node.args[1], node.args[0]):
        node = _before(node.args[0], CASTS)
    if node.target in PADS and width == kv_len + 1:
        return [*node.args[1], 0, 0][-2 * (axis + 1)]
    rank = scores.meta["val"].dim()
    if node.target is aten.cat.default and (node.args[1:] or (0,))[0] in (axis, rank + axis):
        first = 0
        for part in node.args[0]:
            size = part.meta["val"].shape[axis]
            if size == kv_len:
                return first
            first += size
    raise MaskNotApplicable(f"its scores have {width} columns for {kv_len} keys")


def _is_of_rows(value, scores) -> bool:
    """Whether a value is computed from each row's maximum or logsumexp, or from the sum of its exponentials."""
    if not isinstance(value, torch.fx.Node):
        return False
    value = _before(value, CASTS)
    seen, pending = set(), [value]
    while pending:
        node = pending.pop()
        is_sum = node.target in SUMS and _before(node.args[0], CASTS).target in EXP
        if is_sum or node.target in ROW_MAXIMA + LOGSUMEXP:
            return value.meta["val"].shape[-1] == 1
        if node not in seen and isinstance(node.meta.get("val"), torch.Tensor | tuple | list):
            seen.add(node)
            small = [x for x in node.all_input_nodes if x is not scores and x.op == "call_function"]
            pending += small
    return False


def _before(node, targets):
    while node.op == "call_function" and node.target in targets and isinstance(node.args[0], torch.fx.Node):
        node = node.args[0]
    return node


def _replace(module: GraphModule, node, by: MaskedSdpa) -> None:
    with module.graph.inserting_before(node):
        new = _call(module, by, *node.args, **node.kwargs)
    new.meta = node.meta
    node.replace_all_uses_with(new)
    module.graph.erase_node(node)


def _follow(module: GraphModule, node, by: ZeroRows, scores, users) -> None:
    """Let some users of a node read it through a module that also gets the unmasked scores."""
    with module.graph.inserting_after(node):
        new = _call(module, by, node, scores)
    for user in users:
        user.replace_input_with(node, new)


def _call(module: GraphModule, by: MaskedSdpa | MaskedScores, *args, **kwargs):
    name = f"masked_{sum(1 for _ in module.children())}"
    module.add_submodule(name, by)
    if by.keep.positions is not None:
        kwargs["positions"] = by.keep.positions
    node = module.graph.call_module(name, args, kwargs)
    node.meta = {name: value for name, value in args[0].meta.items() if name != "stof.name"}
    return node
