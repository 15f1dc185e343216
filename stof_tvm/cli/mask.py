"""`stof mask`: what a mask keeps, what its storage takes, and a picture of it."""

import argparse
import os
import time
from pathlib import Path

from stof_tvm.cli.command import new_command, positive, print_answer
from stof_tvm.whole_file import replacing
from tir_kernels.errors import InputError

DOTS_PER_INCH = 150


def add_command(commands) -> None:
    mask = new_command(
        commands,
        "mask",
        _mask,
        "statistics and a picture of a mask",
        'stof mask "bigbird(random_fill=0.2) & causal()" 4096 --picture bigbird.png',
        "A mask is written as in Python, with the names of stof_tvm.masks.",
    )
    mask.add_argument("mask", help='such as bigbird, or "sliding_window(64) | global_tokens([0])"')
    mask.add_argument("q_len", type=positive, help="number of queries")
    mask.add_argument("kv_len", type=positive, nargs="?", help="number of keys (default: q_len)")
    mask.add_argument(
        "--block", type=_block, default=(64, 64), metavar="HEIGHTxWIDTH", help="block size (default: 64x64)"
    )
    mask.add_argument("--picture", type=_picture, metavar="FILE", help="draw it into a .png or .svg file")
    mask.add_argument("--batch", type=int, default=0, help="batch entry in the picture (default: %(default)s)")
    mask.add_argument("--head", type=int, default=0, help="head in the picture (default: %(default)s)")


def _mask(arguments) -> None:
    from stof_tvm.masks.text import parse_mask

    mask = parse_mask(arguments.mask)
    found = mask_statistics(mask, arguments.q_len, arguments.kv_len, arguments.block)
    if arguments.picture:
        found["picture"] = str(arguments.picture)
        _draw(mask, arguments)
    print_answer(arguments, found, _text(found))


def mask_statistics(mask, q_len: int, kv_len: int | None, block: tuple[int, int]) -> dict:
    """What a mask keeps at these lengths, and what its storage takes.

    Blocks are counted over all patterns, of which heads and batch entries may share some; "compile_seconds" is
    near 0 for a mask that this process compiled before.
    """
    started = time.perf_counter()
    compiled = mask.compile(q_len, kv_len, block)
    seconds = time.perf_counter() - started
    return {
        "mask": repr(mask),
        "q_len": compiled.q_len,
        "kv_len": compiled.kv_len,
        "block": [compiled.block_m, compiled.block_n],
        "batch": mask.batch,
        "heads": mask.heads,
        "patterns": compiled.n_patterns,
        "density": compiled.density,
        "block_density": compiled.block_density,
        "blocks": compiled.n_patterns * compiled.n_block_rows * compiled.n_block_cols,
        "listed": len(compiled.load_col_idx),
        "full": len(compiled.full_col_idx),
        "part": len(compiled.part_col_idx),
        "bytes": sum(array.nbytes for array in compiled.arrays.values()),
        "compile_seconds": seconds,
    }


def _text(found: dict) -> str:
    rows, columns = found["block"]
    lines = [
        f"{found['mask']}, {found['q_len']} queries × {found['kv_len']} keys",
        f"kept      {found['density']:.2%} of the elements",
        f"blocks    {found['listed']} of {found['blocks']} of {rows}×{columns} listed ({found['block_density']:.2%}): "
        f"{found['full']} full, {found['part']} part",
        f"storage   {found['bytes'] / 1e6:.2f} MB, compiled in {found['compile_seconds']:.2f} s",
    ]
    if found["patterns"] > 1:
        lines.insert(1, f"patterns  {found['patterns']} (batch {found['batch'] or 1}, heads {found['heads'] or 1})")
    if "picture" in found:
        lines.append(f"picture   {found['picture']}")
    return "\n".join(lines)


def _draw(mask, arguments) -> None:
    for name, number, count in (("batch", arguments.batch, mask.batch), ("head", arguments.head, mask.heads)):
        if not 0 <= number < (count or 1):
            raise InputError(f"--{name} {number} is not in 0…{(count or 1) - 1}, what the mask has")
    os.environ["MPLBACKEND"] = "Agg"  # no window, whatever display there is
    figure = mask.plot(arguments.q_len, arguments.kv_len, arguments.batch, arguments.head).figure
    try:
        with replacing(arguments.picture) as unfinished:
            # An opaque white ground: the ink stays readable on dark pages.
            figure.savefig(unfinished, dpi=DOTS_PER_INCH, bbox_inches="tight", facecolor="white", transparent=False)
    except OSError as error:
        raise InputError(f"the picture cannot be written: {error}") from None


def _block(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    return positive(height), positive(width or height)


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text} must end in .png or .svg")
    return path
