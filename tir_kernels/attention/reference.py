"""The definition of `problem.py` in NumPy: what kernels are compared with."""

import numpy as np


def attention_reference(problem, q, k, v, keep, bias=None):
    """Attention in float64, as `problem.py` defines it, of a mask in one part.

    Parameters
    ----------
    q, k, v : array_like
        In the shapes and layouts of the problem, any float dtype.
    keep : bool array_like
        The mask, broadcastable to (batch, q_heads, q_len, kv_len).
    bias : array_like, optional
        Of shape `problem.bias_shape`.

    Returns
    -------
    float64, in the shape and layout of the problem's output; where the problem gives it, (output, log-sum-exp).
    """
    layouts = problem.layouts
    q = _logical(q, layouts.q)
    k, v = (np.repeat(_logical(x, layout), problem.group, axis=1) for x, layout in ((k, layouts.k), (v, layouts.v)))
    x = problem.scale * (q @ k.swapaxes(2, 3))
    if bias is not None:
        # Scores are float32: beside a bias of finfo.min a product is nothing, and such a row averages its values.
        with np.errstate(over="ignore"):
            x = (x + np.asarray(bias, np.float64)).astype(np.float32).astype(np.float64)
    x = np.where(np.asarray(keep), x, -np.inf)
    top = x.max(axis=3, keepdims=True)
    weights = np.exp(x - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=3, keepdims=True)
    out = _logical((weights / np.where(total == 0, 1.0, total)) @ v, layouts.out)
    if not problem.gives_lse:
        return out
    with np.errstate(divide="ignore"):
        return out, (np.log(total) + np.where(np.isneginf(top), 0.0, top))[..., 0]


def _logical(x, layout: str) -> np.ndarray:
    """float64 (batch, heads, length, dim) of an array in a layout; also the way back, which is the same swap."""
    x = np.asarray(x, np.float64)
    return x if layout == "bhsd" else x.swapaxes(1, 2)
