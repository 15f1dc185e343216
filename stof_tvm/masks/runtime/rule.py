"""A rule: a function of queries and keys to the blocks that are kept, and a static mask as its upper bound."""

import reprlib
from collections.abc import Callable, Hashable

import torch

from stof_tvm.masks.arguments import check_int
from stof_tvm.masks.mask import Mask, Or
from stof_tvm.masks.quality.weights import check_attention, without_autocast
from stof_tvm.masks.tensors import block_sparse
from stof_tvm.running.between_graphs import AT_ONCE, between_graphs
from tir_kernels.attention.rule_scale import rule_scale
from tir_kernels.errors import MaskError

ROWS, KEYS = 16, 32  # what the height and the width of a block are multiples of


class ByItself:
    """The identity of a rule whose function nothing but itself is known to equal, whatever it compares as.

    A copy of the rule has a copy of the function, and so another identity.
    """

    def __init__(self, function: Callable):
        self.function = function

    def __eq__(self, other):
        return isinstance(other, ByItself) and self.function is other.function

    def __hash__(self):
        return id(self.function)


class Rule:
    """Which blocks an attention keeps, found from its queries and keys in each call; made by `rule` and its kin.

    `rule & mask` keeps what both keep: the mask, static, is an upper bound that the rule's function does not see.

    Attributes
    ----------
    block : tuple of int
        Height and width of a block: query rows by keys.
    within : Mask or None
        The upper bound; None keeps everything.
    """

    def __init__(
        self,
        function: Callable,
        block: tuple[int, int],
        within: Mask | None,
        text: str,
        identity: Hashable | None = None,
        bounds: tuple[Mask, ...] = (),
    ):
        self.function, self.block, self.within, self.text = function, block, within, text
        self.identity = text if identity is None else identity  # rules of the same one compute the same map
        self.bounds = bounds  # masks that were joined to the rule after it was made, which `text` doesn't tell

    def __repr__(self):
        return " & ".join([self.text, *(f"({mask!r})" if isinstance(mask, Or) else repr(mask) for mask in self.bounds)])

    def __and__(self, mask) -> "Rule":
        if not isinstance(mask, Mask):
            hint = ""
            if isinstance(mask, Rule):
                hint = ": two rules are one where a rule of your own keeps what both keep (masks.runtime.rule)"
            elif isinstance(mask, torch.Tensor):
                hint = ": masks.from_tensor makes a mask of it"
            elif callable(mask):
                hint = f": is it {getattr(mask, '__name__', 'a mask')}() that is meant?"
            raise MaskError(f"a rule & a Mask is a rule; the other side is {type(mask).__name__}{hint}")
        within = mask if self.within is None else self.within & mask
        return Rule(self.function, self.block, within, self.text, self.identity, (*self.bounds, mask))

    __rand__ = __and__

    def __or__(self, other):
        raise MaskError(f"there is no union with {self!r}: a rule is joined to masks, by & alone")

    __ror__ = __or__

    def __invert__(self):
        raise MaskError(f"there is no complement of {self!r}: a rule is joined to masks, by & alone")

    __array_ufunc__ = None  # NumPy would combine each element of an array with the rule

    def __bool__(self):
        raise MaskError(f"{self!r} has no truth value; join a rule to masks by &, not by and, or, not")

    def block_map(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Boolean (B or 1, H or 1, query blocks, key blocks): the blocks that the function selects.

        Parameters
        ----------
        q, k : Tensor
            Floating point, (B, H, Sq, D) and (B, Hkv, Skv, D); H is a multiple of Hkv.

        Raises
        ------
        MaskError
            A function that gives no boolean tensor of that shape on the device of q, or writes into q or k.
        InputError
            Tensors that do not belong together.
        """
        check_attention(q, k)
        return self._checked(self._called(self.function, q, k), q, k, 0, self._block_rows(q))

    def maps_of_rows(self, q: torch.Tensor, k: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
        """A function of `first` and `end` to these rows of the block map, boolean (B or 1, H or 1, rows, key blocks).

        The whole map is made at once where the rule's function has no method `in_rows` (see `rule`).

        Parameters
        ----------
        q, k : Tensor
            As `block_map` takes them.

        Raises
        ------
        MaskError, InputError
            As `block_map` does, here or when rows are asked for.
        """
        in_rows = getattr(self.function, "in_rows", None)
        if in_rows is None:
            whole = self.block_map(q, k)
            return lambda first, end: whole[:, :, first:end]
        check_attention(q, k)
        found = self._called(in_rows, q, k)

        def rows(first: int, end: int) -> torch.Tensor:
            some = self._called(lambda q, k: found(first, end), q, k)
            return self._checked(some, q, k, first, end)

        return rows

    def _block_rows(self, q: torch.Tensor) -> int:
        return -(-q.shape[2] // self.block[0])

    def _called(self, function: Callable, q: torch.Tensor, k: torch.Tensor):
        """function(q, k); MaskError if it writes into them."""
        before = _versions(q, k)
        with torch.no_grad(), without_autocast(q.device):
            found = function(q, k)
        if _versions(q, k) != before:
            raise MaskError(f"{self.text} writes into q or k, which are the attention's own: let it compute on copies")
        return found

    def _checked(self, found, q: torch.Tensor, k: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """What the function gave for rows of blocks; MaskError unless it is that part of a block map."""
        blocks = end - first, -(-k.shape[2] // self.block[1])
        if not isinstance(found, torch.Tensor) or found.dtype != torch.bool or found.device != q.device:
            what = f"{found.dtype} on {found.device}" if isinstance(found, torch.Tensor) else type(found).__name__
            raise MaskError(f"{self.text} gave {what}; a rule's function gives a bool tensor on {q.device}")
        if found.layout is not torch.strided:
            raise MaskError(f"{self.text} gave a tensor of layout {found.layout}; a rule's function gives a dense one")
        leads = found.ndim == 4 and found.shape[0] in (1, q.shape[0]) and found.shape[1] in (1, q.shape[1])
        if not leads or found.shape[2:] != blocks:
            which = "" if blocks[0] == self._block_rows(q) else f" for the rows of blocks {first} to {end - 1}"
            raise MaskError(
                f"{self.text} gave a block map of shape {tuple(found.shape)}{which}; with blocks of {self.block[0]}x"
                f"{self.block[1]} it is (B or 1, H or 1, {blocks[0]}, {blocks[1]}) of (B, H) = {tuple(q.shape[:2])}"
            )
        return found

    @between_graphs(AT_ONCE)
    def mask(self, q: torch.Tensor, k: torch.Tensor) -> Mask:
        """The static mask of what the rule keeps for some q and k.

        Parameters
        ----------
        q, k : Tensor
            Floating point, (B, H, Sq, D) and (B, Hkv, Skv, D), as `block_map` takes them.

        Raises
        ------
        MaskError, InputError
            As `block_map` does.
        """
        found = block_sparse(self.block_map(q, k).cpu(), self.block)
        return found if self.within is None else found & self.within


def _versions(*tensors: torch.Tensor) -> list[int]:
    """How often PyTorch has seen each tensor written to; nothing of what stands for one while a graph is traced."""
    return [x._version for x in tensors if type(x) is torch.Tensor and not x.is_inference()]


def for_rule(q: torch.Tensor, k: torch.Tensor, scale: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """q (B, H, Sq, D) and k, floating point, as a rule takes them, whose scores have another scale than 1 / √D."""
    if scale is None:
        return q, k
    factor, dtype = rule_scale(scale, q.shape[3], str(q.dtype).removeprefix("torch."))
    if factor == 1:
        return q, k
    q, k = (x.to(getattr(torch, dtype)) for x in (q, k))
    return q * factor, k


def rule(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], block=64) -> Rule:
    """A rule of your own.

    Parameters
    ----------
    function : callable
        Of q, (B, H, Sq, D), and k, (B, Hkv, Skv, D), floating point, to a boolean tensor (B or 1, H or 1, query blocks,
        key blocks), True is kept; lengths that are no multiples of a block have a short last one.  If it has a method
        in_rows(q, k), which returns a function of `first` and `end` to these rows of the same map, `sparse_attention`
        never holds the maps of long inputs whole.
    block : int or tuple of two ints
        Height and width of a block, multiples of 16 query rows and 32 keys; one number is both.

    Raises
    ------
    MaskError
        A function that cannot be called, or blocks of other sizes.
    """
    if not callable(function) or isinstance(function, Rule | Mask):
        raise MaskError(f"a rule is made of a function of (q, k), got {reprlib.repr(function)}")
    name = getattr(function, "__name__", type(function).__name__)
    return Rule(function, check_block(block), None, f"rule({name})", identity=ByItself(function))


def check_block(block) -> tuple[int, int]:
    """Height and width of a block from one int or two; MaskError unless they are what kernels take."""
    height, width = block if isinstance(block, tuple | list) and len(block) == 2 else (block, block)
    for size, step, what in ((height, ROWS, "height"), (width, KEYS, "width")):
        if check_int(f"block {what}", size, least=1) % step:
            raise MaskError(f"block={block}: its {what}, {size}, must be a multiple of {step}")
    return height, width


def check_square(name: str, block) -> int:
    """The side of a square block; MaskError by the rule's name unless it is one number that kernels take."""
    height, width = check_block(block)
    if height != width:
        raise MaskError(f"{name} takes square blocks, got block={block}")
    return height
