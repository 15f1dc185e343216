"""What heads choose among: spans with sinks, columns and diagonals that hold most of the softmax, and rules."""

import torch

from stof_tvm.masks import runtime
from stof_tvm.masks.mask import Mask
from stof_tvm.masks.published import a_shape, vertical_slash
from stof_tvm.masks.quality.weights import Attention, softmax_of
from stof_tvm.masks.runtime.rule import Rule
from stof_tvm.masks.tokens import padding
from stof_tvm.masks.windows import everything, sliding_window

SPANS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # of the keys
LINES = (1 / 32, 1 / 16, 1 / 8)  # of the keys: columns, and as many diagonals
LARGEST_SINK, SINK = 64, 1 / 32
EVERYTHING = everything()
BLOCK = 64  # of rules
BLOCKS = (1 / 16, 1 / 8, 1 / 4)  # of the blocks of keys
LAST = 64  # queries by which columns and diagonals are found


def default_candidates(attention: Attention, rows: int | None = None) -> list[list[Mask]]:
    """For each head, the masks that it may have; the last keeps everything.

    Causal attention: spans with sinks (`a_shape`) and, found in this attention's own weights, the columns and diagonals
    with most mass (`vertical_slash`).  Other attention: windows around the query, and the first keys.
    """
    _, heads, q_len, kv_len = attention.sizes
    spans = sorted({max(1, round(kv_len * share)) for share in SPANS})
    sink = min(LARGEST_SINK, max(1, round(kv_len * SINK)), kv_len)
    if not attention.is_causal:
        shared: list[Mask] = [sliding_window(span) | padding([sink]) for span in spans]
        return [[*shared, EVERYTHING]] * heads
    shared = [a_shape(sink, span) for span in spans]
    if q_len != kv_len:  # a diagonal is a distance only where queries and keys are the same tokens
        return [[*shared, EVERYTHING]] * heads
    columns, diagonals = _masses(attention, rows)
    counts = sorted({max(1, round(kv_len * share)) for share in LINES})
    lines = [
        [
            vertical_slash(columns[h].topk(count).indices.sort().values, diagonals[h].topk(count).indices.sort().values)
            for count in counts
        ]
        for h in range(heads)
    ]
    return [[*shared, *lines[h], EVERYTHING] for h in range(heads)]


def rule_candidates(attention: Attention) -> list[Mask | Rule]:
    """What MInference's search chooses from (Jiang et al., 2024), at some sizes; the last keeps everything.

    Causal attention of prompts: spans with sinks, and rules that find columns and diagonals, or blocks of keys, in each
    call.  Other attention: the blocks.
    """
    _, _, q_len, kv_len = attention.sizes
    blocks = sorted({max(1, round(-(-kv_len // BLOCK) * share)) for share in BLOCKS})
    found = [runtime.top_blocks(n, BLOCK, attention.is_causal) for n in blocks]
    if attention.is_causal and q_len == kv_len:
        lines = sorted({max(1, round(kv_len * share)) for share in LINES})
        few = max(1, lines[0] // 2)
        given = {"last": min(LAST, q_len), "sinks": few, "window": few, "block": BLOCK}
        found = [runtime.vertical_slash(n, n, **given) for n in lines] + found
    spans = [round(kv_len * share) for share in SPANS[:3]] if attention.is_causal else []
    sink = min(LARGEST_SINK, max(1, round(kv_len * SINK)))
    return [*(a_shape(sink, max(1, span)) for span in sorted(set(spans))), *found, EVERYTHING]


def _masses(attention: Attention, rows: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax mass of each column and each distance i - j >= 0, float32 (H, length) both, of the batch's sum."""
    _, heads, q_len, kv_len = attention.sizes
    columns, diagonals = (torch.zeros(heads, kv_len, device=attention.q.device) for _ in range(2))
    j = torch.arange(kv_len, device=attention.q.device)
    for i, scores, whole in attention.chunks(rows):
        summed = softmax_of(scores, whole).sum(0)
        columns += summed.sum(1)
        distance = (i[:, None] - j).clamp(min=0)  # what lies above the diagonal has no mass
        diagonals.scatter_add_(1, distance.flatten().expand(heads, -1), summed.flatten(1))
    return columns, diagonals
