"""Makes the benchmarks importable, builds result rows, and stands for a peer's package."""

import sys
import types
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture
def row():
    """A function that makes a result row as a measuring run writes it."""

    def make(case, system, us=None, density=0.1, **fields):
        row = {
            "bench": case.bench, "gpu": "NVIDIA H200", "driver": "580", "date": "2026-11-21", "commit": "abc",
            "run": "one", "case": case.to_json(density), "system": system,
        }  # fmt: skip
        if us is not None:
            row |= {"variant": "some", "median_us": us, "wall_us": us + 10, "samples_us": [us], "error": 1e-4}
            row |= {"half_error": 2e-4}
        return row | fields

    return make


@pytest.fixture
def fastvideo(monkeypatch):
    """A package that stands for FastVideo's wheel: its operators, by their meaning, in float32 on the CPU."""

    def attention(q, k, v, keep):
        scores = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).masked_fill(~keep, float("-inf"))
        return (scores.softmax(-1) @ v.float()).to(q.dtype)

    def block_sparse_fwd(q, k, v, columns, counts, sizes):
        blocks = q.shape[2] // 64, k.shape[2] // 64
        assert q.shape[0] == 1 and q.dtype == torch.bfloat16 and q.shape[3] in (64, 128)
        assert all(x.is_contiguous() for x in (q, k, v, columns, counts, sizes))
        assert {x.dtype for x in (columns, counts, sizes)} == {torch.int32}
        assert columns.shape[:3] == counts.shape == (1, q.shape[1], blocks[0]) and sizes.shape == blocks[1:]
        assert all(blocks[n] * 64 == x.shape[2] for n, x in enumerate((q, k))) and int(counts.min()) > 0
        listed = torch.arange(columns.shape[3]) < counts[..., None]
        found = torch.zeros(*counts.shape, blocks[1], dtype=torch.int32)
        found = found.scatter_add(-1, columns.long(), listed.to(torch.int32))
        assert int(found.max()) == 1  # no block is listed twice
        there = torch.arange(64) < sizes[:, None]
        keep = found.bool().repeat_interleave(64, 2).repeat_interleave(64, 3) & there.flatten()
        return attention(q, k, v, keep), torch.empty(0)

    def sta_fwd(q, k, v, out, t, h, w, text, of_text, has_text, flag):
        assert (t, h, w, text, of_text, has_text, flag) == (3, 3, 3, 0, False, True, 1)
        tiles, size = (5, 6, 10), (q.shape[2] - 384) // 300
        tile = torch.stack(torch.meshgrid(*map(torch.arange, tiles), indexing="ij")).flatten(1)
        middle = torch.stack([x.clamp(1, n - 2) for x, n in zip(tile, tiles)])
        near = ((middle[:, :, None] - tile[:, None]).abs() <= 1).all(0)
        keep = near.repeat_interleave(size, 0).repeat_interleave(size, 1)
        n = 300 * size
        out[:, :, :n] = attention(q[:, :, :n], k[:, :, :n], v[:, :, :n], keep)
        return out

    package, extensions = types.ModuleType("fastvideo_kernel"), types.ModuleType("fastvideo_kernel._C")
    package.__version__, package._C = "0", extensions
    extensions.fastvideo_kernel_ops = types.SimpleNamespace(block_sparse_fwd=block_sparse_fwd, sta_fwd=sta_fwd)
    monkeypatch.setitem(sys.modules, "fastvideo_kernel", package)
    monkeypatch.setitem(sys.modules, "fastvideo_kernel._C", extensions)
