"""`set_mask`: a user's mask for the attentions of a model of transformers, and where in the sequence it applies."""

import inspect

import torch

from relax_passes.attention.site_names import matches, named
from stof_tvm.given_masks import GivenAsMask, given_mask
from stof_tvm.masks.identity import Identity
from stof_tvm.masks.mask import Mask
from stof_tvm.masks.part import Part
from stof_tvm.site_masks import SiteMasks
from tir_kernels.errors import InputError, MaskError

NAME = "stof"
MASK = "_stof_mask"  # the attribute of an attention that holds its GivenToSite
MOST_SIZES = 8  # sizes for which a mask is kept


def set_mask(model: torch.nn.Module, mask: "GivenAsMask | dict[str, GivenAsMask] | None") -> None:
    """Give the attentions of a model a mask, which holds in addition to the model's own; it replaces an earlier one.

    Rows and columns are positions in the whole sequence, also while tokens are generated: a step's query is the row of
    its position, in the mask at the length of the keys (of the whole cache, where that has a fixed length).

    Raises MaskError for what is no mask, a path that matches no attention, a model without attentions, and an attention
    whose implementation is not "stof"; InputError if `model` is no module.  A call raises MaskError if the mask does
    not fit its lengths, if the implementation was changed since, if an attention's queries have no known positions
    (cross attention), and where a graph is traced: `build` and `torch.compile` take a mask of their own.

    Parameters
    ----------
    model : torch.nn.Module
        A model of transformers whose attention implementation is "stof", or a module that contains such models.
    mask : Mask, bool tensor or array (True is kept), BlockMask, mask_mod function, dict or None
        One mask for every attention, or masks by module path as `stof_tvm.build` takes them: {"model.layers.0": mask},
        with shell wildcards; where several match, the last one counts.  A tensor must broadcast to (B, H, S, S).  None
        takes all masks away.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"set_mask needs a model, got {type(model).__name__}")
    found = {path: module for path, module in model.named_modules() if _is_attention(module)}
    given = SiteMasks(mask)
    if not found:
        raise MaskError(f"{type(model).__name__} has no attention that dispatches by attn_implementation")
    for pattern in given.by_pattern:
        if not any(matches(pattern, path) for path in found):
            known = ", ".join(map(named, found))
            raise MaskError(f"mask path {named(pattern)} matches no attention of the model; there are: {known}")
    chosen = {path: pattern for path in found if (pattern := given.pattern_of(path)) is not None}
    for path in chosen:
        _check_implementation(found[path], named(path))
    made = {pattern: GivenToSite(pattern, given.by_pattern[pattern]) for pattern in chosen.values()}
    for path, module in found.items():
        _take_away(module)
        if path in chosen:
            setattr(module, MASK, made[chosen[path]])
            module.register_forward_pre_hook(_Guard(named(path)))


def mask_given_to(module: torch.nn.Module) -> "GivenToSite | None":
    """What `set_mask` gave to an attention."""
    return getattr(module, MASK, None)


class GivenToSite:
    """A user's mask, made for the sizes of each call; a tensor that was written to is read again."""

    def __init__(self, pattern: str, mask: GivenAsMask):
        self.pattern, self.mask = pattern, mask
        self._made: dict[tuple, tuple[Identity | None, Mask]] = {}

    def at(self, sizes: tuple[int, int, int, int], q_offset: int, kv_offset: int) -> Mask:
        """The mask of an attention of sizes (B, H, Sq, Skv), whose first query and first key have these positions.

        MaskError where the mask does not fit.
        """
        batch, heads, q_len, kv_len = sizes
        length = max(q_offset + q_len, kv_offset + kv_len)
        is_part = (q_len, kv_len) != (length, length)
        whole = self._whole((batch, heads, length, length))
        return Part(whole, q_offset, kv_offset, length) if is_part else whole

    def _whole(self, sizes) -> Mask:
        try:
            given = given_mask(self.mask, sizes)
            known = self._made.pop(sizes, None)
            mask = known[1] if known is not None and known[0] == given.identity else given.make()
        except MaskError as error:
            raise MaskError(f"the mask that set_mask gave to {named(self.pattern)}: {error}") from None
        assert mask is not None  # only None is no mask
        self._made[sizes] = given.identity, mask
        if len(self._made) > MOST_SIZES:
            self._made.pop(next(iter(self._made)))
        return mask


class _Guard:
    """A hook before an attention: its mask must not be lost when somebody sets another implementation."""

    def __init__(self, path: str):
        self.path = path

    def __call__(self, module, args):
        _check_implementation(module, self.path)


def _check_implementation(module, path: str) -> None:
    used = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if used != NAME:
        raise MaskError(
            f"attention {path} runs by attn_implementation={used!r}, where a mask of set_mask has no effect: "
            f"call model.set_attn_implementation({NAME!r}), or set_mask(model, None)"
        )


def _take_away(module: torch.nn.Module) -> None:
    """Remove what an earlier call left; a copy of a model has copies of the hooks, but not their handles."""
    module.__dict__.pop(MASK, None)
    for number, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, _Guard):
            del module._forward_pre_hooks[number]


def _is_attention(module: torch.nn.Module) -> bool:
    """Whether a module's own code asks transformers for the attention function."""
    kinds = [kind for kind in type(module).__mro__ if kind.__module__.partition(".")[0] not in ("torch", "builtins")]
    methods = (inspect.unwrap(method) for kind in kinds for method in vars(kind).values() if inspect.isfunction(method))
    return any({"ALL_ATTENTION_FUNCTIONS", "get_interface"} <= {*method.__code__.co_names} for method in methods)
