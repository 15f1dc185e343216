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
def top_bounds(q, k, n, size, causal):
    rows, keys = blocks(len(q), size), blocks(len(k), size)
    kept = np.zeros((len(rows), len(keys)), bool)
    for r, row in enumerate(rows):
        scores = {}
        for c, key in enumerate(keys):
            low, high = k[key].min(0), k[key].max(0)
            scores[c] = max(np.maximum(x * low, x * high).sum() for x in q[row])
            assert scores[c] >= (q[row] @ k[key].T).max() - 1e-9
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


def means(x, size):
    return np.stack([x[b].mean(0) for b in blocks(len(x), size)])


def heaviest(weights, mass):
    """Indices of the fewest that hold `mass` of the sum."""
    order = np.argsort(-weights, kind="stable")
    held = np.cumsum(weights[order])
    return order[: np.count_nonzero(held < mass * held[-1]) + 1]


def distance_of(p, q):
    """The square root of the Jensen-Shannon divergence."""
    m = (p + q) / 2
    return max(sum(x * np.log(x / y) / 2 for of in (p, q) for x, y in zip(of, m) if x > 0), 0) ** 0.5


@by_head
def flex_prefill(q, k, gamma, tau, least, size):
    n, dim = q.shape
    count, last = -(-n // size), min(size, n)
    keys, distances = np.zeros(n), np.zeros(n)
    for i in range(n - last, n):
        weights = softmax(k[: i + 1] @ q[i] / dim**0.5) / last
        for j in range(i + 1):
            keys[j] += weights[j]
            distances[i - j] += weights[j]
    pooled, kept = means(k, size), np.zeros((count, count), bool)
    true = np.array([keys[b].sum() for b in blocks(n, size)])
    predicted = softmax(pooled @ q[-last:].mean(0) / dim**0.5)
    query_aware = distance_of(predicted, true) < tau
    fewest = max(1, -(-least // size))
    for tokens, place in ((keys, lambda r, at: (r, at)), (distances, lambda r, at: (r, r - at))):
        sums = np.array([tokens[b].sum() for b in blocks(n, size)])
        order = [0, *(1 + np.argsort(-sums[1:], kind="stable"))]
        held = np.cumsum(sums[order])
        budget = fewest if query_aware else max(fewest, np.count_nonzero(held < gamma * held[-1]) + 1)
        for at in order[:budget]:
            for r in range(at, count):
                kept[place(r, at)] = True
    if query_aware:
        scores = means(q, size) @ pooled.T / dim**0.5
        scores[np.triu_indices(count, 1)] = -np.inf
        kept.flat[heaviest(softmax(scores).ravel(), gamma)] = True
    return kept


@by_head
def sparge(q, k, mass, similarity, size, causal):
    def pooled(x):
        unit = x / np.linalg.norm(x, axis=1, keepdims=True)
        return means(x, size), [(unit[b] @ unit[b].T).mean() > similarity for b in blocks(len(x), size)]

    (rows, rows_alike), (keys, keys_alike) = pooled(q), pooled(k)
    kept = np.zeros((len(rows), len(keys)), bool)
    for r in range(len(rows)):
        seen = [c for c in range(len(keys)) if not causal or c * size < min((r + 1) * size, len(q))]
        alike = [c for c in seen if keys_alike[c]]
        if alike:
            weights = softmax(np.array([rows[r] @ keys[c] for c in alike]) / q.shape[1] ** 0.5)
            order = np.argsort(-weights, kind="stable")
            within = int((np.cumsum(weights[order]) <= mass).sum())
            kept[r, [alike[at] for at in order[: max(within, 1)]]] = True
        kept[r, [c for c in seen if not (rows_alike[r] and keys_alike[c])]] = True
    return kept


@by_head
def flash_prefill(q, k, threshold, sinks, window, last, size):
    pooled, rows = means(k, size), blocks(len(q), size)
    kept = np.zeros((len(rows), len(pooled)), bool)
    for r, row in enumerate(rows):
        scores = {}  # of the block's queries with the means of blocks that end at or before them
        for i in range(row.start, row.stop):
            for c in range(len(pooled)):
                if (c + 1) * size - 1 <= i:
                    scores.setdefault(c, []).append(q[i] @ pooled[c] / q.shape[1] ** 0.5)
        most = max((max(values) for values in scores.values()), default=0.0)
        weights = np.array([sum(np.exp(s - most) for s in scores.get(c, ())) for c in range(len(pooled))])
        for c in range(min(r + 1, len(pooled))):
            forced = c < sinks or r - c < window or r >= len(rows) - last
            kept[r, c] = forced or weights[c] >= threshold * weights.max()
    return kept


def achlioptas(size, rank, seed):
    """The signs that are hashed from places, as 32-bit numbers."""
    signs = np.zeros((size, rank))
    for at in range(size * rank):
        number = (at + seed * 0x9E3779B1) % 2**32
        for _ in range(2):
            number = (number ^ (number >> 16)) * 0x45D9F3B % 2**32
        signs.flat[at] = {0: 1, 1: -1}.get((number ^ (number >> 16)) % 6, 0)
    return signs * (3 / rank) ** 0.5


@by_head
def low_rank(q, k, mass, n, rank, bits, stride, seed, size, causal):
    def predicted(x):
        x = means(x, stride) @ achlioptas(x.shape[1], rank, seed)
        scale = np.abs(x).max(1, keepdims=True) / (2 ** (bits - 1) - 1)
        integers = np.round(x / scale)
        assert np.abs(integers).max() < 2 ** (bits - 1)
        return integers * scale

    scores, each = predicted(q) @ predicted(k).T / q.shape[1] ** 0.5, size // stride
    if causal:
        scores[np.indices(scores.shape)[1] > np.indices(scores.shape)[0]] = -np.inf
    weights = softmax(scores)
    total = np.array(
        [[weights[r, c].sum() for c in blocks(weights.shape[1], each)] for r in blocks(len(weights), each)]
    )
    kept = np.zeros(total.shape, bool)
    for r, row in enumerate(total):
        seen = r + 1 if causal else len(row)
        kept[r, heaviest(row[:seen], mass) if n is None else np.argsort(-row[:seen], kind="stable")[:n]] = True
    return kept
