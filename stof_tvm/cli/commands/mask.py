"""`stof mask`: what a mask or rule keeps, of a length or of saved tensors, its storage, and a picture of it."""

import argparse
import contextlib
import math
import time
from pathlib import Path

from stof_tvm.cli.command import (
    UsageError,
    check_output,
    new_command,
    picture_file,
    positive,
    print_answer,
    usage,
    use_no_display,
)
from tir_kernels.errors import InputError

FOR_RULES = "give --rule --from-tensors Q K"


def add_command(commands) -> None:
    mask = new_command(
        commands,
        "mask",
        _mask,
        "statistics and a picture of a mask",
        'stof mask "bigbird(random_fill=0.2) & causal()" 4096 --picture bigbird.png',
        "A mask is written as in Python, with the names of stof_tvm.masks; a rule, with --rule, with those of "
        "stof_tvm.masks.runtime, too.",
    )
    mask.add_argument("mask", help='such as bigbird, or "sliding_window(64) | global_tokens([0])"')
    mask.add_argument("q_len", type=positive, nargs="?", help="number of queries; left out with --from-tensors")
    mask.add_argument("kv_len", type=positive, nargs="?", help="number of keys (default: q_len)")
    mask.add_argument("--block", type=_block, metavar="HEIGHTxWIDTH", help="block size (default: 64x64, or the rule's)")
    mask.add_argument(
        "--from-tensors",
        nargs=2,
        type=Path,
        metavar=("Q", "K"),
        help="q and k, (batch, heads, length, size), of torch.save: tell how much of their softmax the mask keeps",
    )
    mask.add_argument(
        "--rule",
        action="store_true",
        help='with --from-tensors: the mask is a rule of stof_tvm.masks.runtime, such as "sparge(0.9) & causal"',
    )
    mask.add_argument("--within", metavar="MASK", help="with --from-tensors: what counts as the whole, such as causal")
    mask.add_argument("--scale", type=float, help="with --from-tensors: of the scores (default: 1/sqrt(size))")
    mask.add_argument("--picture", type=picture_file, metavar="FILE", help="draw its blocks into a .png or .svg file")
    mask.add_argument("--batch", type=int, default=0, help="batch entry in the picture (default: %(default)s)")
    mask.add_argument("--head", type=int, help="head in the picture (default: a panel for each)")


def _mask(arguments) -> None:
    if arguments.picture:
        check_output(arguments.picture)
    elif arguments.head is not None or arguments.batch:
        raise UsageError("--head and --batch choose what a picture shows: give --picture FILE")
    _check_given(arguments)
    mask, name, q_len, kv_len, found = _found(arguments)
    with usage() if arguments.from_tensors is None else contextlib.nullcontext():
        found = mask_statistics(mask, q_len, kv_len, arguments.block or (64, 64)) | {"mask": name} | found
    if arguments.picture:
        found["picture"] = str(arguments.picture)
        _draw(mask, name, found, arguments)
    print_answer(arguments, found, _text(found))


def _check_given(arguments) -> None:
    """UsageError unless something says the lengths, and options have what they are about."""
    if arguments.from_tensors is not None:
        if arguments.q_len is not None:
            raise UsageError("--from-tensors has lengths of its own: leave q_len out")
    elif arguments.rule:
        raise UsageError("--rule is about tensors, from which a rule finds its blocks: give --from-tensors Q K")
    elif arguments.q_len is None:
        raise UsageError("give q_len, the number of queries, or --from-tensors Q K")
    elif arguments.within is not None or arguments.scale is not None:
        raise UsageError("--within and --scale are about tensors: give --from-tensors Q K")


def _found(arguments) -> tuple:
    """The mask, its name and lengths, and what it keeps of the softmax of tensors that are given."""
    from stof_tvm.cli.named.masks import mask_of, rule_of
    from stof_tvm.cli.named.tensors import doubt, load_q_and_k
    from stof_tvm.masks.mask import Mask
    from stof_tvm.masks.quality.recall import recall
    from stof_tvm.masks.runtime.rule import Rule, for_rule

    given: Mask | Rule = rule_of(arguments.mask) if arguments.rule else mask_of(arguments.mask, FOR_RULES)
    if arguments.from_tensors is None:
        return given, repr(given), arguments.q_len, arguments.kv_len, {}
    within = None if arguments.within is None else mask_of(arguments.within)
    q, k = load_q_and_k(*arguments.from_tensors)
    if isinstance(given, Rule):
        mask, arguments.block = given.mask(*for_rule(q, k, arguments.scale)), arguments.block or given.block
    else:
        mask = given
    found = recall(mask, q, k, arguments.scale, within)
    if math.isnan(found.mean):
        raise InputError("the softmax of {}·{}ᵀ is NaN: they hold NaN or infinities".format(*arguments.from_tensors))
    kept = {
        "recall": found.mean,
        "recall_by_head": found.heads.mean(0).tolist(),
        "recall_of": "all pairs" if within is None else repr(within),
        "q_shape": list(q.shape),
        "k_shape": list(k.shape),
        "note": doubt(q, k),
    }
    return mask, repr(given), q.shape[2], k.shape[2], kept


def mask_statistics(mask, q_len: int, kv_len: int | None, block: tuple[int, int]) -> dict:
    """Statistics of a mask at these lengths: what it keeps, and the size of its storage.

    Blocks are counted over all distinct patterns; heads and batch entries may share one.  "compile_seconds" is
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
        f"{found['full']} full, {found['part']} partial",
        f"storage   {found['bytes'] / 1e6:.2f} MB, compiled in {found['compile_seconds']:.2f} s",
    ]
    if found["patterns"] > 1:
        lines.insert(1, f"patterns  {found['patterns']} (batch {found['batch'] or 1}, heads {found['heads'] or 1})")
    if "recall" in found:
        (batch, q_heads, q_len, size), (_, k_heads, kv_len, _) = found["q_shape"], found["k_shape"]
        read = f"q: batch {batch}, {q_heads} heads, {q_len} tokens, head size {size}"
        lines.insert(1, f"read as   {read}; k: {k_heads} heads, {kv_len} tokens")
        if found["note"]:
            lines.insert(2, f"note      {found['note']}")
        heads = ", ".join(f"{share:.2%}" for share in found["recall_by_head"])
        lines.append(f"recall    {found['recall']:.2%} of the softmax of {found['recall_of']}; by head: {heads}")
    if "picture" in found:
        lines.append(f"picture   {found['picture']}")
    return "\n".join(lines)


def _draw(mask, name: str, found: dict, arguments) -> None:
    from stof_tvm import pictures

    use_no_display()
    lengths, block = (found["q_len"], found["kv_len"]), tuple(found["block"])
    with usage():
        figure = pictures.block_mask(mask, *lengths, block, arguments.batch, arguments.head, name)
    pictures.save(figure, arguments.picture)


def _block(text: str) -> tuple[int, int]:
    height, cross, width = text.partition("x")
    try:
        return positive(height), positive(width if cross else height)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text!r} must be HEIGHTxWIDTH, such as 64x128, or one number") from None
