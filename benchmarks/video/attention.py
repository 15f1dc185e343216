"""Attentions of video models, and a million tokens, by each system: made ready, checked, then timed.

This project is imported where it is used: it cannot be in one environment with some of the peers.
"""

import os
from collections.abc import Callable

import torch

from benchmarks.peers.accuracy import Reference
from benchmarks.peers.timing import Replays
from benchmarks.video.cases import MILLION, OURS, WIDE, Case, Tiles

SINKS, COLUMNS, NEAR = 4, 32, 128  # of a million tokens: first keys, other columns, and nearest keys that are kept
RULE_BLOCKS = {OURS: 128, WIDE: 256}


def get_ready(case: Case, system: str, device: str) -> tuple[dict, Callable[[], dict]]:
    """Compile a system and call it once; the second result checks and times it (benchmarks/models/worker.py)."""
    seed = int.from_bytes(os.urandom(4), "little")
    generator = torch.Generator(device).manual_seed(seed)
    heads = case.heads, case.kv_heads, case.kv_heads
    q, k, v = (
        torch.randn(1, n, case.length, case.head_dim, device=device, dtype=torch.bfloat16, generator=generator)
        for n in heads
    )
    if case.kind == MILLION:
        prepare = _million
    else:
        prepare = {OURS: _stof, "flex": _flex, "flex-fa4": _flex, "cudnn-flex": _cudnn_flex}.get(system, _fastvideo)
    call, keep, facts, *restore = prepare(case, system, q, k, v)
    call()
    _synchronize(device)
    return {"seed": seed, **facts}, lambda: _measure(call, keep, q, k, v, device, *restore)


def _measure(call, keep, q, k, v, device: str, restore=lambda out: out) -> dict:
    """Errors, the peak of memory, and if the errors are small, times of what does not include `restore`."""
    touched = q.nbytes * 2 + k.nbytes + v.nbytes
    poison = torch.full_like(q, float("nan"))  # what the output is allocated in next holds NaN
    del poison
    found = {}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    out = call()
    if device == "cuda":
        torch.cuda.synchronize()
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    reference = Reference(q, k, v, keep)
    error = reference.error(restore(out))
    del out
    found |= {"touched_bytes": touched, "error": error, "half_error": reference.half_error, "median_us": None}
    if not error <= 2 * reference.half_error:
        return found
    replays = Replays([call], device)
    replays.warm_up()
    samples = replays.samples()
    return found | {"median_us": sorted(samples)[len(samples) // 2], "samples_us": samples}


def _stof(case: Case, system: str, q, k, v):
    from stof_tvm import masks, sparse_attention

    mask, tiles = masks.sliding_tile(case.canvas, case.tile, case.window), case.tiles(q.device.type)
    choice = chosen(case, mask, q)
    density = tiles.kept / case.length**2
    if abs(choice.density - density) > 1e-9:
        raise ValueError(f"{mask!r} keeps {choice.density:.9f}, the benchmark's formula {density:.9f}")
    facts = {"variant": choice.label, "density": density, "scheduled": choice.scheduled_density}
    return lambda: sparse_attention(q, k, v, mask), tiles.rows, facts


def chosen(case: Case, mask, q: torch.Tensor):
    """The kernel that `sparse_attention` takes for the mask."""
    from tir_kernels.attention.problem import AttentionProblem
    from tir_kernels.attention.select import choose
    from tir_kernels.target import cuda_arch, parse_target

    capability = torch.cuda.get_device_capability() if q.is_cuda else None
    target = parse_target({"kind": "cuda", "arch": cuda_arch(*capability)} if capability else "llvm")
    sizes = case.heads, case.kv_heads, case.length, case.length, case.head_dim, case.head_dim
    return choose(AttentionProblem(1, *sizes, "bfloat16", case.head_dim**-0.5), mask, target)


def _flex(case: Case, system: str, q, k, v):
    """Its blocks are what create_block_mask finds: full ones, where the formula is not asked, and partial ones."""
    from benchmarks.peers.flex import _attention, compiled_attention

    tiles = case.tiles(q.device.type)
    block_mask, scheduled = flex_mask(tiles)
    function = compiled_attention() if q.is_cuda else _attention
    options = {"BACKEND": "FLASH"} if system == "flex-fa4" else None
    if options and not q.is_cuda:
        raise RuntimeError("FlexAttention's FLASH back-end needs a GPU")
    facts = {"variant": f"torch {torch.__version__}", "density": tiles.kept / case.length**2, "scheduled": scheduled}
    return lambda: function(q, k, v, block_mask, False, options), tiles.rows, facts


def flex_mask(tiles: Tiles):
    """The BlockMask of sliding tiles, and the share of pairs in its blocks."""
    from benchmarks.peers.flex import DEFAULT_BLOCK, block_mask_of

    number, near = tiles.number, tiles.near

    def mask_mod(b, h, i, j):
        return near[number[i], number[j]]

    block = DEFAULT_BLOCK, DEFAULT_BLOCK
    found = block_mask_of(tiles.chunks(), (tiles.q_len, tiles.kv_len), mask_mod, block)
    listed = int(found.kv_num_blocks.sum() + found.full_kv_num_blocks.sum())
    return found, min(1.0, listed * block[0] * block[1] / tiles.q_len**2)


def _cudnn_flex(case: Case, system: str, q, k, v):
    """The keys of a query are a few ranges in tile order; their plan is made before and is not timed."""
    import cudnn
    from cudnn.flex_attention import create_mask_plan, flex_attn_func

    from benchmarks.peers.cudnn_flex import arrange, key_ranges

    tiles = case.tiles(q.device.type)
    given = arrange(q, k, v)
    plan = create_mask_plan(key_ranges(tiles), *given)
    facts = {"variant": f"cudnn {cudnn.__version__}", "density": tiles.kept / case.length**2, "scheduled": None}
    return lambda: flex_attn_func(*given, mask_plan=plan).transpose(1, 2), tiles.rows, facts


def _fastvideo(case: Case, system: str, q, k, v):
    from benchmarks.video import fastvideo

    return fastvideo.prepare(case, system, q, k, v)


def _million(case: Case, system: str, q, k, v):
    """Vertical-slash attention: found by the rule, or given as columns and distances (`stof-static`)."""
    from stof_tvm import masks, sparse_attention

    device, length = q.device, case.length
    if system in RULE_BLOCKS:
        rule = masks.runtime.vertical_slash(SINKS + COLUMNS, NEAR, sinks=SINKS, window=NEAR, block=RULE_BLOCKS[system])
        listed, (height, width) = rule.block_map(q, k), rule.block
        scheduled = float(listed.sum() / listed.numel())
        on_diagonal = float(listed.diagonal(dim1=-2, dim2=-1).float().mean())
        density = scheduled - on_diagonal * (height - 1) / 2 / length  # keys behind the query
        rows, b, h = Reference.places(q)
        # What is not sampled is given back: it is no memory of the attention.
        listed = listed.expand(1, case.heads, -1, -1)[b[:, None], h[:, None], rows // height]

        def keep(rows):
            before = rows[:, None] >= torch.arange(length, device=device)
            return listed.repeat_interleave(width, -1)[..., :length] & before

        call = lambda: sparse_attention(q, k, v, rule, enable_gqa=True)
        return call, keep, {"variant": repr(rule)[:80], "density": density, "scheduled": scheduled}
    columns = sorted({*range(SINKS), *torch.linspace(SINKS, length - 1, COLUMNS).long().tolist()})
    mask = masks.vertical_slash(columns, range(NEAR))
    member = torch.zeros(length, dtype=torch.bool, device=device)
    member[columns] = True

    def keep_static(rows):
        distance = rows[:, None] - torch.arange(length, device=device)
        return (distance >= 0) & (member | (distance < NEAR))

    choice = chosen(case, mask, q)
    facts = {"variant": choice.label, "density": choice.density, "scheduled": choice.scheduled_density}
    return lambda: sparse_attention(q, k, v, mask, enable_gqa=True), keep_static, facts


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
