"""The rules in NumPy, by loops over their published definitions; float64."""

import numpy as np


def repeated(q, k):
    """q and k as float64 arrays (B, H, S, D), keys repeated for the heads that share them."""
    q, k = (np.asarray(x.double()) for x in (q, k))
    return q, np.repeat(k, q.shape[1] // k.shape[1], axis=1)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def by_head(of_head):
    """A reference of (B, H, S, D) tensors of torch from one of two matrices."""

    def every(q, k, *args):
        q, k = repeated(q, k)
        return np.stack([[of_head(a, b, *args) for a, b in zip(x, y)] for x, y in zip(q, k)])

    return every


def blocks(n, size):
    return [slice(at, min(at + size, n)) for at in range(0, n, size)]


@by_head
def top_blocks(q, k, n, size, causal):
    rows, keys = blocks(len(q), size), blocks(len(k), size)
    kept = np.zeros((len(rows), len(keys)), bool)
    for r, row in enumerate(rows):
        scores = {c: q[row].mean(0) @ k[key].mean(0) for c, key in enumerate(keys)}
        seen = [c for c in scores if not causal or keys[c].start < row.stop]
        kept[r, sorted(seen, key=lambda c: -scores[c])[:n]] = True
    return kept


@by_head
def vertical_slash(q, k, vertical, slash, last, sinks, window, size):
    n, dim = q.shape
    keys, distances = np.zeros(n), np.zeros(n)
    for i in range(max(0, n - last), n):
        weights = softmax(k[: i + 1] @ q[i] / dim**0.5)
        for j in range(i + 1):
            keys[j] += weights[j]
            distances[i - j] += weights[j]
    keys[:sinks] = distances[:window] = np.inf
    columns = np.argsort(-keys, kind="stable")[: max(vertical, sinks)]
    chosen = np.argsort(-distances, kind="stable")[: max(slash, window)]
    i, j = np.indices((n, n))
    kept = (np.isin(j, columns) | np.isin(i - j, chosen)) & (j <= i)
    return np.array([[kept[r, c].any() for c in blocks(n, size)] for r in blocks(n, size)])


@by_head
def xattention(q, k, stride, mass, size, causal):
    dim, groups = q.shape[1], [-(-len(x) // stride) for x in (q, k)]
    q, k = (np.concatenate([x, np.zeros((-len(x) % stride, dim))]) for x in (q, k))
    weights = np.zeros(groups)
    for a in range(groups[0]):
        scores = np.full(groups[1], -np.inf)
        for b in range(groups[1] if not causal else min(a + 1, groups[1])):
            antidiagonal = [q[a * stride + stride - 1 - t] @ k[b * stride + t] for t in range(stride)]
            scores[b] = sum(antidiagonal) / dim**0.5 / stride
        weights[a] = softmax(scores)
    each = size // stride
    total = np.array([[weights[r, c].sum() for c in blocks(groups[1], each)] for r in blocks(groups[0], each)])
    kept = np.zeros(total.shape, bool)
    for r, row in enumerate(total):
        forced = [c for c in range(len(row)) if causal and (c == 0 or c == r)]
        order = forced + [c for c in np.argsort(-row, kind="stable") if c not in forced and row[c] > 0]
        held = 0.0
        for c in order:
            if c in forced or held < mass * row.sum():
                kept[r, c] = True
                held += row[c]
    return kept
