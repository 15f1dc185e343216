"""Packed programs by PyTorch, with the mask that an engine is given, apart from the code that makes it."""

import numpy as np
import torch
from torch.fx import Interpreter

from stof_tvm.frontend.packing.program import OF_SEQUENCES, OF_TOKENS

aten = torch.ops.aten


class Masked(Interpreter):
    """Runs a packed program; attentions keep pairs of one document that the model's own mask keeps."""

    def __init__(self, packed, lengths):
        program = packed.program
        super().__init__(program.graph_module, graph=program.graph)
        self.own = iter(packed.masks.values())
        self.lengths = lengths
        self.pairs = {id(node) for node in _softmaxes(program.graph, packed)}

    def keep(self):
        mask, total = next(self.own), sum(self.lengths)
        heads = [mask.heads] if mask is not None and mask.heads else []
        keep, start = torch.zeros(*heads, total, total, dtype=torch.bool), 0
        for n in self.lengths:
            keep[..., start : start + n, start : start + n] = True if mask is None else mask.dense(n)
            start += n
        return keep

    def run_node(self, n):
        if n.target is aten.scaled_dot_product_attention.default:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            q, k, v, *rest = args
            bias, kwargs = rest[0] if rest else kwargs.get("attn_mask"), dict(kwargs)
            scores = torch.zeros(self.keep_now().shape).masked_fill(~self.now, -torch.inf).to(q.dtype)
            if bias is not None:
                bias = torch.zeros(bias.shape).masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else bias
                scores = scores + bias
            kwargs = {name: kwargs[name] for name in ("scale", "enable_gqa") if name in kwargs}
            return aten.scaled_dot_product_attention.default(q, k, v, scores.to(q.dtype), 0.0, False, **kwargs)
        if id(n) in self.pairs:
            args, _ = self.fetch_args_kwargs_from_env(n)
            return torch.softmax(args[0].masked_fill(~self.keep_now(), -torch.inf), -1)
        return super().run_node(n)

    def keep_now(self):
        self.now = self.keep()
        return self.now


def _softmaxes(graph, packed):
    wide = [n for n in graph.find_nodes(op="call_function", target=aten.softmax.int)]
    return [n for n in wide if n.meta["val"].dim() > 1 and n.meta["val"].shape[-1] == n.meta["val"].shape[-2]]


def run_packed(packed, batched, rows, lengths):
    """For each sequence, what the packed program gives: `rows` are tensors (1, n, …) of each input by name."""
    program = packed.program
    (node,) = [n for n in program.graph.find_nodes(op="placeholder") if n.name == next(iter(rows))]
    tokens, real = node.meta["val"].shape[1], sum(lengths)
    whole = [*lengths, tokens - real] if real < tokens else list(lengths)
    starts = np.cumsum([0, *whole])[:-1]
    vectors = {
        "stof_place": np.concatenate([np.arange(n) for n in lengths] + [np.zeros(tokens - real, int)]),
        "stof_number": np.repeat(np.arange(len(whole)), whole),
        "stof_first": np.repeat(starts, whole),
        "stof_starts": starts,
        "stof_ends": starts + np.array(whole) - 1,
    }
    stored = {**program.state_dict, **program.constants}
    values = []
    for spec, n in zip(program.graph_signature.input_specs, program.graph.find_nodes(op="placeholder")):
        if spec.target is not None:
            values.append(stored[spec.target])
        elif n.name in rows:
            parts = torch.cat(rows[n.name], 1)
            values.append(torch.cat([parts, parts[:, -1:].expand(1, tokens - real, *parts.shape[2:])], 1))
        else:
            vector = torch.from_numpy(vectors[n.name])
            size = n.meta["val"].shape[0]
            values.append(torch.cat([vector, vector[-1:].expand(max(0, size - len(vector)))]))
    with torch.no_grad():
        results = Masked(packed, whole).run(*values)
    return [
        [_part(x, o, number, start, n) for x, o in zip(results, packed.outputs)]
        for number, (start, n) in enumerate(zip(starts, lengths))
    ]


def _part(x, output, number, start, n):
    if output.kind == OF_TOKENS:
        return x.narrow(output.token, int(start), n)
    return x.narrow(output.batch, number, 1) if output.kind == OF_SEQUENCES else x
