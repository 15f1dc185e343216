"""Models whose blocks see their tokens tile by tile: one permutation before the first block, one after the last."""

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.utils import _pytree as pytree

from stof_tvm.masks.canvas.layout import check_canvas
from stof_tvm.masks.canvas.order import tile_order
from tir_kernels.errors import InputError


@contextlib.contextmanager
def in_tiles(
    blocks: Iterable[torch.nn.Module],
    canvas,
    tile,
    tokens: str,
    axis: int = 1,
    *,
    tables: Mapping[str, int | None] | None = None,
    result: int = 0,
    text: int = 0,
    text_first: bool = False,
) -> Iterator[None]:
    """While the context is open, the blocks of a model see the tokens of a canvas tile by tile.

    Tokens are put in the order of `tile_order` before the first block and back after the last one, whatever is in
    between: blocks must do the same to each token, but for attention, whose masks are then those of tiles
    (`sliding_tile`), and for what `tables` names.  So an engine that is built in the context computes what the model
    does, with two gathers:

        with masks.in_tiles(model.blocks, canvas, tile, "hidden_states", tables={"rotary_emb": 1}):
            engine = stof_tvm.build(model, "llvm", inputs, mask={"blocks.*.attn1": masks.sliding_tile(canvas, tile, w)})

    Parameters
    ----------
    blocks : sequence of Module
        The blocks in the order of their calls, such as a ModuleList, or the blocks of two in one list.
    canvas, tile : tuple of int
        Sizes of the canvas and of a tile in tokens, as `sliding_tile` takes them.
    tokens : str
        The argument of the blocks that holds the tokens: floating point, of any shape that has the canvas's tokens, or
        these and the text's, along `axis`.
    axis : int
        The axis of its tokens.
    tables : dict of str to int or None, optional
        Other arguments, of any of the blocks, that hold something for each token, or tuples of such tensors, and the
        axes of tokens: rotary tables, modulations by token, masks of keys.  None leaves an argument as it is that only
        happens to have a size like the canvas's.
    result : int
        Which of a block's results are the tokens, where it returns several.
    text : int
        Number of tokens besides those of the canvas in a joint sequence; they stay where they are.
    text_first : bool
        Whether they come before the canvas.

    Raises
    ------
    InputError
        Blocks without such an argument or result, or called out of turn; at a call, a tensor that has no such number of
        tokens along its axis, and one that has and is named neither in `tokens` nor in `tables`; at the next call or at
        the end of the context, a call of the model that left before its last block: its tokens stayed in tile order.
    MaskError
        Sizes that are no positive integers.
    """
    moves = _Moves(check_canvas(canvas), tile, text, text_first)
    named = dict(tables or {}) | {tokens: axis}
    if isinstance(blocks, torch.nn.Module) and not isinstance(blocks, Iterable):
        raise InputError(f"in_tiles takes the blocks of a model, such as model.blocks, got a {type(blocks).__name__}")
    blocks = list(blocks)
    if not blocks or not all(isinstance(block, torch.nn.Module) for block in blocks):
        raise InputError("in_tiles takes the blocks of a model, a sequence of modules")
    if len({id(block) for block in blocks}) < len(blocks):
        raise InputError("a block is there twice: in_tiles takes blocks that are called once each")
    known = [list(inspect.signature(block.forward).parameters) for block in blocks]
    for name in named:
        if not (all if name == tokens else any)(name in arguments for arguments in known):
            block, arguments = next((b, names) for b, names in zip(blocks, known, strict=True) if name not in names)
            raise InputError(f"{type(block).__name__} has no argument {name!r}; there are {', '.join(arguments)}")
    # (id of a tensor, axis) -> the tensor itself, its version and what became of it
    moved: dict[tuple[int, int], tuple] = {}
    inside: list[torch.nn.Module] = []  # the blocks that are called, from the first one to the last one's result

    def table(name: str, x, at: int):
        if not isinstance(x, torch.Tensor):
            return x
        version = _version(x)
        if version is None:
            return moves.to_tiles(name, x, at)
        if moved.get((id(x), at), (x, None))[1] != version:  # the blocks share their tables, until one is written
            moved[id(x), at] = x, version, moves.to_tiles(name, x, at)
        return moved[id(x), at][2]

    def enter(block, args, kwargs):
        if block is blocks[0] and inside:
            raise unfinished(f"{type(block).__name__} is called out of turn: it is the first block, and ")
        if block is not blocks[0] and not inside:
            raise InputError(
                f"{type(block).__name__} is called out of turn: the first block comes once, before all others, and the "
                "last one once, after them"
            )
        if block is blocks[0]:
            moved.clear()
        inside.append(block)
        try:
            return moved_call(block, args, kwargs)
        except InputError:
            inside.clear()
            raise

    def unfinished(begin: str) -> InputError:
        reached = blocks.index(inside[-1])
        inside.clear()
        return InputError(
            f"{begin}block {len(blocks) - 1}, {type(blocks[-1]).__name__}, the last one, has not returned since the "
            f"first one was called (block {reached} was the last that was called): the model left early, or failed, "
            "and its tokens stayed in tile order"
        )

    def moved_call(block, args, kwargs):
        call = inspect.signature(block.forward).bind(*args, **kwargs)
        for name, value in call.arguments.items():
            at = named.get(name)
            if name not in named:
                moves.check_free_of_tokens(name, value)
            elif name == tokens:
                if block is blocks[0]:
                    call.arguments[name] = moves.to_tiles(name, value, axis)
            elif at is not None:
                call.arguments[name] = pytree.tree_map(lambda x, name=name, at=at: table(name, x, at), value)
        return call.args, call.kwargs

    def leave(block, args, found):
        moved.clear()
        inside.clear()
        if isinstance(found, torch.Tensor):
            return moves.to_rows(found, axis)
        if not isinstance(found, tuple) or not -len(found) <= result < len(found):
            raise InputError(f"result={result}: {type(block).__name__} returns {type(found).__name__}, no such tuple")
        at = result % len(found)
        return (*found[:at], moves.to_rows(found[at], axis), *found[at + 1 :])

    with contextlib.ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_pre_hook(enter, with_kwargs=True).remove)
        hooks.callback(blocks[-1].register_forward_hook(leave).remove)
        yield
    if inside:
        raise unfinished("in_tiles ends within a call of the model: ")


def _version(x: torch.Tensor) -> int | None:
    """A number that grows with each write to the tensor; None where nothing tells of writes.

    Inference tensors have none, and TorchDynamo's are values of the graph, which Python cannot compare.
    """
    return None if torch.compiler.is_dynamo_compiling() or x.is_inference() else x._version


class _Moves:
    """Permutations of tensors that have the tokens of a canvas along an axis, or those and the text's."""

    def __init__(self, canvas, tile, text: int, text_first: bool):
        self.canvas, self.text = canvas, text
        orders = tile_order(canvas, tile), tile_order(canvas, tile, text, text_first)
        self.orders = {len(each.order): each for each in orders}

    def to_tiles(self, name: str, x, axis: int) -> torch.Tensor:
        return x.index_select(axis, self._orders(f"argument {name!r}", x, axis).order.to(x.device))

    def to_rows(self, x, axis: int) -> torch.Tensor:
        return x.index_select(axis, self._orders("the last block's result", x, axis).inverse.to(x.device))

    def _orders(self, what: str, x, axis: int):
        if not isinstance(x, torch.Tensor) or not -x.ndim <= axis < x.ndim or x.shape[axis] not in self.orders:
            shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            text = f" and text={self.text}" if self.text else ""
            raise InputError(
                f"{what}, {shape}, does not have the {' or '.join(map(str, self.orders))} tokens of "
                f"canvas={self.canvas}{text} along axis {axis}"
            )
        return self.orders[x.shape[axis]]

    def check_free_of_tokens(self, name: str, value) -> None:
        for x in pytree.tree_leaves(value):
            if isinstance(x, torch.Tensor) and any(size in self.orders for size in x.shape):
                raise InputError(
                    f"argument {name!r}, {tuple(x.shape)}, has a size like the canvas's number of tokens: name it in "
                    f"tables, with the axis of its tokens, or with None if these are no tokens"
                )
