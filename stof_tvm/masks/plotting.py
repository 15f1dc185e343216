"""Pictures of masks."""

import numpy as np

from stof_tvm.masks.compilation import check_lengths
from tir_kernels.bitmap import count_bits
from tir_kernels.errors import UnsupportedError

PIXELS = 1024  # longer masks are drawn block by block


def plot_mask(mask, q_len: int, kv_len: int | None, b: int, h: int, ax=None):
    """Draw the mask of batch entry b and head h into `ax` (default: a new figure) and return the Axes."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UnsupportedError(f"plotting needs matplotlib (pip install 'stof-tvm[viz]'): {error}") from None
    q_len, kv_len = check_lengths(q_len, kv_len)
    entry = mask.at(b, h)
    size = -(-max(q_len, kv_len) // PIXELS)
    picture = entry.dense(q_len, kv_len).numpy() if size == 1 else _shares(entry, q_len, kv_len, -(-size // 8) * 8)
    ax = plt.subplots()[1] if ax is None else ax
    ax.imshow(picture, cmap="Greys", vmin=0, vmax=1, interpolation="nearest", extent=(0, kv_len, q_len, 0))
    ax.set(xlabel="key", ylabel="query", title=f"{mask!r}\n{100 * entry.density(q_len, kv_len):.1f} % kept")
    return ax


def _shares(entry, q_len, kv_len, block) -> np.ndarray:
    """The share of each block that is kept, (n_block_rows, n_block_cols)."""
    stored = entry.compile(q_len, kv_len, (block, block))
    shares = np.zeros((stored.n_block_rows, stored.n_block_cols))
    rows = np.arange(stored.n_block_rows)
    shares[np.repeat(rows, np.diff(stored.full_row_ptr)), stored.full_col_idx] = 1
    part_rows = np.repeat(rows, np.diff(stored.part_row_ptr))
    shares[part_rows, stored.part_col_idx] = count_bits(stored.bitmap) / block**2
    return shares
