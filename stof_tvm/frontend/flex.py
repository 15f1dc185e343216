"""FlexAttention in an exported program, spelled as the attention that it computes.

torch.export keeps `flex_attention` as one node with two graphs, score_mod and mask_mod, each for a single score.  The
mask_mod becomes a boolean tensor, computed in the program (where it depends on no input, it is folded to a constant).
If the score_mod's graph provably computes a·score + bias, the node becomes scaled_dot_product_attention with a scale
and a bias.  Any other score_mod becomes matrix products around a softmax; where it provably computes
cap·tanh(a·score / cap) + bias, in a form that is known as attention again.
"""

import functools
import math
import operator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import _vmap_for_bhqkv

from tir_kernels.errors import UnsupportedError

Node: TypeAlias = Any  # torch.fx.Node, whose types do not say what a node's arguments are
GraphModule: TypeAlias = Any
aten = torch.ops.aten
FLEX = torch.ops.higher_order.flex_attention
SDPA = aten.scaled_dot_product_attention.default
WITH_NUMBER = {getattr(aten, name).Tensor: getattr(aten, name).Scalar for name in ("add", "sub", "mul", "div")}
COPIES = (aten.lift_fresh_copy.default, aten._to_copy.default, aten.to.dtype, aten.detach.default)
NO_BLOCKS = 1 << 30  # a block's side where there is no block mask


def rewrite_flex_attention(program) -> bool:
    """Replace FlexAttention's nodes in the program's graph, which is changed; returns whether there were any.

    Raises UnsupportedError where the model uses the log-sum-exp or the maximum, or a score_mod or mask_mod captures
    tensors that are not inputs of the node.
    """
    nodes = program.graph.find_nodes(op="call_function", target=FLEX)
    for node in nodes:
        _rewrite(program, node)
    if nodes:
        _drop_block_masks(program.graph)
        program.graph_module.recompile()
    return bool(nodes)


def _rewrite(program, node: Node) -> None:
    module = program.graph_module
    q, k, v, score_mod, block_mask, scale, _options, score_tensors, mask_tensors = node.args
    for user in node.users:
        if user.target is not operator.getitem or (user.args[1] != 0 and user.users):
            raise UnsupportedError("flex_attention with return_lse or return_aux: only the output is supported")
    score_graph, mask_graph = (_elementwise(getattr(module, mod.target)) for mod in (score_mod, block_mask[-1]))
    blocks = [x for x in block_mask[2:6] if x is not None]
    n_score = len(score_tensors)
    shape, device, dtype = (*_value(q).shape[:3], _value(k).shape[2]), _value(q).device, _value(q).dtype
    linear = _linear(score_graph)
    has_mask = not _is_always_true(mask_graph)
    # `create_block_mask` computes its blocks from the mask_mod, so they exclude nothing more.
    has_blocks = min(block_mask[-3:-1]) < NO_BLOCKS and not all(map(_comes_from_vmap, blocks))
    blocks = blocks if has_blocks else []
    tensors, n_blocks = [*blocks, *score_tensors, *mask_tensors], len(blocks)

    def keep(tensors):
        """The mask, bool; None where everything is kept."""
        kept = _over_scores(mask_graph, shape, (), tensors[n_blocks + n_score :], device) if has_mask else None
        return _with_blocks(kept, tensors[:n_blocks], block_mask[-3], block_mask[-2], shape) if has_blocks else kept

    def add(*tensors):
        """The bias added to factor * score: -inf where the mask does not keep."""
        zero = torch.zeros((), device=device)
        bias = _over_scores(score_graph, shape, (zero,), tensors[n_blocks : n_blocks + n_score], device)
        kept = keep(tensors)
        return (bias if kept is None else bias.masked_fill(kept.logical_not(), -math.inf)).to(dtype)

    def repeated(q, k, v):
        """k and v with the batch and the heads of q."""
        groups = q.shape[1] // k.shape[1]
        if k.shape[0] != q.shape[0]:
            k, v = (x.expand(q.shape[0], *x.shape[1:]) for x in (k, v))
        return (k, v) if groups == 1 else (x.repeat_interleave(groups, dim=1) for x in (k, v))

    def attend_capped(factor: float, softcap: float, is_biased: bool, q, k, v, *tensors):
        """Attention with capped scores.  Rows that keep nothing are told by the bias or the mask, not by scores."""
        q, k, v = (x.flatten(0, 1) for x in (q, *repeated(q, k, v)))  # matmul would be traced with copies of them
        scores = torch.bmm(q.float(), k.float().transpose(1, 2)).unflatten(0, shape[:2])
        scores = torch.tanh(scores * (factor * scale / softcap)) * softcap
        empty = None
        if is_biased:
            bias = add(*tensors)
            scores, empty = scores + bias, (bias == -math.inf).all(-1, keepdim=True)
        elif (kept := keep(tensors)) is not None:
            dropped = kept.logical_not()
            scores, empty = scores.masked_fill(dropped, -math.inf), dropped.all(-1, keepdim=True)
        out = torch.bmm(torch.softmax(scores, -1).to(dtype).flatten(0, 1), v).unflatten(0, shape[:2])
        return out if empty is None else out.masked_fill(empty, 0.0)

    def attend(q, k, v, *tensors):
        """Dense attention, for other scores than `_linear` knows."""
        k, v = (x.float() for x in repeated(q, k, v))
        scores = torch.matmul(q.float(), k.transpose(2, 3)) * scale
        scores = _over_scores(score_graph, shape, (scores,), tensors[n_blocks : n_blocks + n_score], device)
        kept = keep(tensors)
        scores = scores if kept is None else scores.masked_fill(kept.logical_not(), -math.inf)
        empty = (scores == -math.inf).all(-1, keepdim=True)
        return torch.matmul(torch.softmax(scores, -1), v).masked_fill(empty, 0.0).to(dtype)

    with module.graph.inserting_before(node):
        if linear is None:
            result = _inline(module, node, attend, [q, k, v, *tensors])
        elif linear.softcap is not None:
            capped = functools.partial(attend_capped, linear.factor, linear.softcap, not linear.is_product)
            result = _inline(module, node, capped, [q, k, v, *tensors])
        else:
            mask = None
            if not _is_score(score_graph):
                mask = _inline(module, node, add, tensors, _value(q))
            elif has_mask or has_blocks:
                mask = _inline(module, node, lambda *tensors: keep(tensors), tensors, _value(q))
            if _value(k).shape[0] != shape[0]:
                whole = lambda k, v: tuple(x.expand(shape[0], *x.shape[1:]) for x in (k, v))  # noqa: E731
                k, v = _inline(module, node, whole, [k, v])
            options = {"scale": linear.factor * scale, "enable_gqa": _value(q).shape[1] != _value(k).shape[1]}
            result = module.graph.call_function(SDPA, (q, k, v, mask), options)
            result.meta.update(_origin(node), val=_value(node)[0])
    _replace(program, node, result)


def _drop_block_masks(graph: Any) -> None:
    """Remove what `create_block_mask` computed in the program.  It fills new tensors in place, so it looks alive."""
    needed: set[Node] = set()
    waiting = [graph.output_node()]
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    for node in reversed(list(graph.nodes)):
        is_pure = node.op == "get_attr" or (node.op == "call_function" and not node.is_impure())
        is_filling = node.op == "call_function" and node.args and node.args[0] not in needed and _comes_from_vmap(node)
        if node not in needed and not node.users and (is_pure or is_filling):
            graph.erase_node(node)


def _comes_from_vmap(node: Node) -> bool:
    """Whether a value was computed from a tensor that vmap took apart: `create_block_mask` does so."""
    seen, waiting = {node}, [node]
    while waiting:
        inputs = waiting.pop().all_input_nodes
        if any(getattr(x.target, "__name__", "") == "_remove_batch_dim" for x in (*inputs, node)):
            return True
        if any(getattr(x.target, "__name__", "") == "_add_batch_dim" for x in inputs):
            return True
        waiting += set(inputs) - seen
        seen |= set(inputs)
    return False


def _value(node: Node):
    return node.meta["val"]


# -- the graphs of score_mod and mask_mod ----------------------------------------------------------------------------


def _elementwise(module: GraphModule) -> GraphModule:
    """A copy in which indexing is aten.index.  TorchDynamo hides it, because Python would read an index's value."""
    graph: Any = torch.fx.Graph()
    known: dict[Node, Node] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = getattr(module, node.target)
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                known[node] = graph.call_function(aten.full.default, ([], value.item()), {"dtype": value.dtype})
            elif isinstance(value, torch.Tensor):
                raise UnsupportedError(f"flex_attention's code makes a tensor of shape {tuple(value.shape)}")
        elif node.op == "call_function" and node.target is torch.ops.higher_order.flat_apply:
            if node.args[2] != "torch._dynamo._trace_wrapped_higher_order_op.ModIndex":
                raise UnsupportedError(f"flex_attention's code calls {node.args[2]}")
            source, *indices = (known[x] if isinstance(x, torch.fx.Node) else x for x in node.args[3:])
            indices = [x if isinstance(x, torch.fx.Node) or x is None else _whole(x) for x in indices]
            known[node] = graph.call_function(aten.index.Tensor, (source, indices))
        elif node.op == "output":
            (result,) = node.args if not isinstance(node.args[0], (tuple, list)) else node.args[0]
            graph.output(known[result])
        else:
            known[node] = copy = graph.node_copy(node, known.__getitem__)
            if node.op == "call_function" and any(not isinstance(x, torch.fx.Node) for x in node.args[1:2]):
                copy.target = WITH_NUMBER.get(node.target, node.target)  # vmap needs the overload for a number
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def _whole(index):
    raise UnsupportedError(f"flex_attention's code indexes a tensor with {index!r}")


def _result(module: GraphModule) -> Node:
    return module.graph.output_node().args[0]


def _is_score(module: GraphModule) -> bool:
    return _result(module) is next(iter(module.graph.nodes))


def _is_always_true(module: GraphModule) -> bool:
    result = _result(module)
    return result.op == "call_function" and result.target in (aten.new_ones.default, aten.ones.default)


class _Linear(NamedTuple):
    """factor·score + bias, or softcap·tanh(factor·score / softcap) + bias; the bias is 0 if `is_product`."""

    factor: float
    softcap: float | None = None
    is_product: bool = True

    def times(self, number: float) -> "_Linear":
        return self._replace(
            factor=self.factor * number, softcap=None if self.softcap is None else self.softcap * number
        )

    def biased(self) -> "_Linear":
        return self._replace(is_product=False)

    def bounded(self) -> "_Linear | None":
        """Its tanh; None if something is added before."""
        return self._replace(softcap=1.0) if self.is_product and self.softcap is None else None


def _linear(module: GraphModule) -> _Linear | None:
    """What the graph provably computes of the score; None for anything else.

    The bias does not depend on score and may be -inf.  So it is the graph's result for a score of 0.
    """
    score = next(iter(module.graph.nodes))
    dependent = {score}
    for node in module.graph.nodes:
        if any(x in dependent for x in node.all_input_nodes):
            dependent.add(node)

    def biased(node) -> _Linear | None:
        inner = linear(node)
        return None if inner is None else inner.biased()

    def linear(node) -> _Linear | None:
        if node is score:
            return _Linear(1.0)
        name, args = node.target, node.args
        if name in (aten.add.Tensor, aten.sub.Tensor, aten.add.Scalar, aten.sub.Scalar):
            first, second = (x if isinstance(x, torch.fx.Node) and x in dependent else None for x in args[:2])
            if node.kwargs.get("alpha", 1) != 1 or len(args) > 2:
                return None
            if first is not None and second is None:
                return biased(first)
            if second is not None and first is None and name is aten.add.Tensor:
                return biased(second)
        if name in (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar) and not node.kwargs:
            number = args[1]
            if isinstance(number, (int, float)) and math.isfinite(number) and number > 0 and args[0] in dependent:
                inner = linear(args[0])
                is_product = name in (aten.mul.Tensor, aten.mul.Scalar)
                return None if inner is None else inner.times(number if is_product else 1 / number)
        if name is aten.tanh.default:
            inner = linear(args[0])
            return None if inner is None else inner.bounded()
        if name is aten.where.self and args[0] not in dependent and args[1] in dependent:
            return biased(args[1]) if _is_minus_infinity(args[2]) else None
        if name is aten.where.ScalarOther and args[0] not in dependent and args[2] == -math.inf:
            return biased(args[1])
        if name is aten.masked_fill.Scalar and args[1] not in dependent and args[2] == -math.inf:
            return biased(args[0])
        return None

    return linear(_result(module))


def _is_minus_infinity(node) -> bool:
    if not isinstance(node, torch.fx.Node):
        return False
    if node.target is aten.full.default:
        return bool(node.args[1] == -math.inf)
    if node.target is aten.scalar_tensor.default:
        return bool(node.args[0] == -math.inf)
    return node.target in COPIES and _is_minus_infinity(node.args[0])


# -- their results, for all scores -----------------------------------------------------------------------------------


def _over_scores(module: GraphModule, shape, scores: tuple, tensors, device) -> torch.Tensor:
    """The graph's results (B or 1, H or 1, Sq, Skv): of size 1 where it does not read the batch or head index.

    `scores` is (), or a tuple of one tensor: either a single number or all scores.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    own = placeholders[len(scores) : len(scores) + 4]
    if scores and scores[0].dim():
        used = [True] * 4
        prefix: tuple = (0,)
    else:
        used = [bool(node.users) for node in own]
        prefix = (None,) * len(scores)
    counters = [torch.arange(n if u else 1, device=device) for n, u in zip(shape, used)]
    suffix = (None,) * len(tensors)
    out = _vmap_for_bhqkv(module, prefix=prefix, suffix=suffix)(*scores, *counters, *tensors)
    sizes = [n if u else 1 for n, u in zip(shape, used)]
    return out.reshape(sizes).expand(*sizes[:2], *shape[2:])


def _with_blocks(kept, tensors, q_block: int, kv_block: int, shape) -> torch.Tensor:
    """Bool: elements in a full block, and those in a partial block that the mask_mod keeps.

    `tensors` are the counts (B, H, rows) and columns (B, H, rows, n) of partial blocks, then of any full blocks.
    """
    partial = _tokens(tensors[0], tensors[1], q_block, kv_block, shape)
    partial = partial if kept is None else partial.logical_and(kept)
    if len(tensors) == 2:
        return partial
    return partial.logical_or(_tokens(tensors[2], tensors[3], q_block, kv_block, shape))


def _tokens(numbers, places, q_block: int, kv_block: int, shape) -> torch.Tensor:
    """Bool (B, H, Sq, Skv): elements in one of the blocks."""
    slots = torch.arange(places.shape[3], device=places.device)
    columns = torch.arange(-(-shape[3] // kv_block), device=places.device)
    named = (places.unsqueeze(-1) == columns).logical_and((slots < numbers.unsqueeze(-1)).unsqueeze(-1))
    blocks = named.any(3)[..., : len(columns)]
    rows = torch.arange(shape[2], device=places.device) // q_block
    keys = torch.arange(shape[3], device=places.device) // kv_block
    return blocks.index_select(2, rows).index_select(3, keys)


# -- into the program ------------------------------------------------------------------------------------------------


def _inline(module: GraphModule, node: Node, function, inputs: list[Node], like=None):
    """Insert the operators by which `function` computes its result from `inputs`; returns the result's node or nodes.

    `like` is a value of the program whose fake mode is used; needed where `inputs` may be empty.
    """
    values = [_value(x) for x in inputs]
    with torch.no_grad(), (values[0] if like is None else like).fake_mode:
        traced: Any = make_fx(function)(*values)
    known = dict(zip(traced.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for inner in traced.graph.nodes:
        if inner.op == "get_attr":
            raise UnsupportedError("flex_attention's code makes tensors of its own")
        if inner.op == "call_function":
            known[inner] = module.graph.node_copy(inner, known.__getitem__)
            known[inner].meta.update(_origin(node))
    results = traced.graph.output_node().args[0]
    return known[results] if isinstance(results, torch.fx.Node) else [known[result] for result in results]


def _origin(node: Node) -> dict:
    return {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}


def _replace(program, node: Node, result: Node) -> None:
    for user in list(node.users):
        if user.args[1] == 0:
            user.replace_all_uses_with(result)
            program.graph_signature.replace_all_uses(user.name, result.name)
        node.graph.erase_node(user)
    node.graph.erase_node(node)
