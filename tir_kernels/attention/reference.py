"""The definition of `problem.py` in NumPy: what kernels are compared with."""

import numpy as np

from tir_kernels.attention.problem import View


def attention_reference(problem, q, k, v, keep, bias=None, sink=None, key_count=None):
    """Attention in float64, as `problem.py` defines it, for a mask that is not split into parts.

    Parameters
    ----------
    q, k, v : array_like
        The inputs, in the shapes and layouts of the problem, of any float dtype.
    keep : bool array_like
        The mask, broadcastable to (batch, q_heads, q_len, kv_len).
    bias : array_like, optional
        The bias, of shape `problem.bias_shape`.
    sink : array_like, optional
        The sink, of shape (q_heads,).
    key_count : array_like, optional
        The key count, of shape `(problem.key_counts,)`.

    Returns
    -------
    The float64 output in the problem's shape and layout; if the problem gives the log-sum-exp, (output, log-sum-exp).
    """
    q, k, v = (_logical(problem, name, np.asarray(x, np.float64)) for name, x in zip("qkv", (q, k, v)))
    k, v = (np.repeat(x, problem.group, axis=1) for x in (k, v))
    x = problem.scale * (q @ k.swapaxes(2, 3))
    if problem.softcap is not None:
        x = problem.softcap * np.tanh(x / problem.softcap)
    if bias is not None:
        # Scores are rounded to float32: a product plus a bias of finfo.min is the bias, so its row averages its values.
        with np.errstate(over="ignore"):
            x = (x + np.asarray(bias, np.float64)).astype(np.float32).astype(np.float64)
    x = np.where(np.asarray(keep), x, -np.inf)
    if key_count is not None:
        x = np.where(np.arange(problem.kv_len) < np.reshape(key_count, (-1, 1, 1, 1)), x, -np.inf)
    sink = np.asarray(-np.inf if sink is None else sink, np.float64).reshape(1, -1, 1, 1)
    top = np.maximum(x.max(axis=3, keepdims=True), sink)
    weights = np.exp(x - np.where(np.isneginf(top), 0.0, top))
    total = weights.sum(axis=3, keepdims=True) + np.exp(sink - np.where(np.isneginf(top), 0.0, top))
    out = (weights / np.where(total == 0, 1.0, total)) @ v
    laid_out = np.empty(problem.shape("out"))
    _logical(problem, "out", laid_out)[...] = out
    if not problem.gives_lse:
        return laid_out
    with np.errstate(divide="ignore"):
        return laid_out, (np.log(total) + np.where(np.isneginf(top), 0.0, top))[..., 0]


def _logical(problem, operand: str, x) -> np.ndarray:
    """The (batch, heads, length, dim) view of an operand in its layout."""
    layout = getattr(problem.layouts, operand)
    if isinstance(layout, View):
        strides = (n * x.itemsize for n in (layout.batch, layout.head, layout.token, 1))
        return np.lib.stride_tricks.as_strided(x[layout.offset :], problem.logical_shape(operand), tuple(strides))
    return x.transpose([layout.index(dimension) for dimension in "bhsd"])
