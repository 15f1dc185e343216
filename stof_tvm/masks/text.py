"""Masks and rules written as text, as they print themselves: `sliding_window(64) | global_tokens([0, 512])`."""

import ast
import difflib
import inspect
import operator
import warnings
from collections.abc import Callable, Mapping

from stof_tvm import masks
from stof_tvm.masks import runtime
from stof_tvm.masks.mask import And, Grid, Leaf, Mask, Not, Or, spell
from stof_tvm.masks.runtime.per_head import OfHeads
from stof_tvm.masks.runtime.rule import Rule
from tir_kernels.errors import MaskError

# What takes a function, an object of PyTorch's or a permutation cannot be written as text.
UNWRITTEN = {"from_block_mask", "from_mask_mod", "reordered"}
FUNCTIONS = {name: function for name, function in vars(masks).items() if inspect.isfunction(function)}
MAKERS = {name for name in masks.__all__ if name in FUNCTIONS and FUNCTIONS[name].__annotations__["return"] is Mask}
NAMES = sorted(MAKERS - UNWRITTEN)
DEPTH = 50
SHOWN = 80  # characters of a text in a message
OPERATORS = {ast.BitAnd: operator.and_, ast.BitOr: operator.or_}
Makers = Mapping[str, Callable]


def _per_head(rules) -> Mask | Rule:
    """What `per_head` means in the text of a rule."""
    maker = runtime.per_head if any(isinstance(entry, Rule) for entry in rules) else masks.per_head
    return maker(rules)


MASKS: Makers = {name: FUNCTIONS[name] for name in NAMES}
RULES: Makers = {
    **MASKS,
    **{name: getattr(runtime, name) for name in runtime.__all__ if name not in ("Rule", "rule")},
    "per_head": _per_head,
}


class RuleGivenError(MaskError):
    """The text of a rule, or nearly that of one, where the text of a mask is wanted."""


def parse_mask(text: str) -> Mask:
    """The mask of a text: constructors of `stof_tvm.masks` with literal arguments, joined by &, |, ~ and parentheses.

    A constructor that needs no argument may stand without parentheses: "bigbird".  Nothing is evaluated: the text is
    parsed, names are looked up in a list.  MaskError for everything else, RuleGivenError for a rule.
    """
    found = _mask(_tree(text, "mask"), DEPTH, MASKS)
    assert isinstance(found, Mask)
    return found


def parse_rule(text: str) -> Rule:
    """The rule of a text: constructors of `stof_tvm.masks.runtime`, and of masks that are joined to them by &.

    Where both have a name, it is the rule's.  MaskError as `parse_mask`, and for the text of a mask.
    """
    found = _mask(_tree(text, "rule"), DEPTH, RULES)
    if not isinstance(found, Rule):
        raise MaskError(f"{text[:SHOWN]!r} is a mask that is known in advance, no rule of stof_tvm.masks.runtime")
    return found


def _tree(text: str, what: str) -> ast.expr:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MaskError(f"{what} {text[:SHOWN]!r} cannot be read: {getattr(error, 'msg', None) or error}") from None


def mask_text(mask: Mask) -> str:
    """The text of a mask, which `parse_mask` reads: what it prints, with all numbers of long sequences.

    MaskError where there is none: for masks of tensors, functions and permutations, and of more than DEPTH levels.
    """
    _check_levels(mask)
    text = _written(mask)
    try:
        same = parse_mask(text) == mask
    except MaskError:
        same = False
    if not same:
        raise MaskError(f"{mask!r} has no text: masks of tensors, functions and orders have none")
    return text


def rule_text(rule: Rule) -> str:
    """The text of a rule, which `parse_rule` reads.

    MaskError where there is none: for rules of one's own, for those joined to masks that have none, and where a mask
    has a name that in the text of a rule is the rule's.
    """
    joined = [f"({mask_text(bound)})" for bound in rule.bounds]
    if isinstance(rule.function, OfHeads):
        entries = [rule_text(entry) if isinstance(entry, Rule) else mask_text(entry) for entry in rule.function.entries]
        text = " & ".join([f"per_head([{', '.join(entries)}])", *joined])
    else:
        text = " & ".join([rule.text, *joined])
    try:
        read = parse_rule(text)
    except MaskError:
        raise MaskError(f"{rule!r} has no text: rules of one's own, and masks named like a rule, have none") from None
    if not _is_same(read, rule):
        raise MaskError(f"{rule!r} has no text that is read as the same rule")
    return text


def _is_same(read: Mask | Rule, rule: Mask | Rule) -> bool:
    """Whether what was read is the rule, or the mask of a head of one."""
    if not isinstance(read, Rule) or not isinstance(rule, Rule):
        return read == rule
    if isinstance(rule.function, OfHeads) and isinstance(read.function, OfHeads):
        pairs = zip(read.function.entries, rule.function.entries, strict=True)
        return read.within == rule.within and all(_is_same(*pair) for pair in pairs)
    return read.identity == rule.identity and read.within == rule.within


def _check_levels(mask: Mask) -> None:
    level = [mask]
    for _ in range(DEPTH):
        level = list({id(part): part for whole in level for part in _parts(whole)}.values())
        if not level:
            return
    raise MaskError(
        f"the mask has no text: it is nested more than {DEPTH} levels deep, the most that are read again (a chain of n "
        "operators without parentheses has n + 1; parentheses that join halves make it flatter)"
    )


def _parts(mask: Mask) -> list[Mask]:
    """The masks whose texts are part of a mask's text."""
    if isinstance(mask, And | Or):
        return [mask.a, mask.b]
    if isinstance(mask, Not):
        return [mask.a]
    return list(mask.entries[0]) if isinstance(mask, Grid) and len(mask.entries) == 1 else []


def _written(mask: Mask) -> str:
    if isinstance(mask, And | Or):
        return f"({_written(mask.a)}) {mask.symbol} ({_written(mask.b)})"
    if isinstance(mask, Not):
        return f"~({_written(mask.a)})"
    if isinstance(mask, Grid) and len(mask.entries) == 1:
        return f"per_head([{', '.join(map(_written, mask.entries[0]))}])"
    return spell(mask.constructor, mask.arguments, repr) if isinstance(mask, Leaf) else repr(mask)


def _mask(node: ast.expr, depth: int, makers: Makers) -> Mask | Rule:
    if depth == 0:
        raise MaskError(f"a mask has at most {DEPTH} levels")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return _joined(node, operator.invert, _mask(node.operand, depth - 1, makers))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        sides = (_mask(side, depth - 1, makers) for side in (node.left, node.right))
        return _joined(node, OPERATORS[type(node.op)], *sides)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _made(node, node.func.id, node.args, node.keywords, depth, makers)
    if isinstance(node, ast.Name):
        return _made(node, node.id, [], [], depth, makers)
    raise MaskError(f"{_shown(node)} is no mask; masks are written like 'bigbird(random_fill=0.2) & causal()'")


def _joined(node: ast.expr, joins: Callable, *sides: Mask | Rule) -> Mask | Rule:
    rules = sum(isinstance(side, Rule) for side in sides)
    if rules > 1 or (rules and joins is not operator.and_):
        raise MaskError(f"{_shown(node)} is no rule: a rule is joined to masks, by & alone")
    return joins(*sides)


def _made(node, name: str, arguments: list, keywords: list, depth: int, makers: Makers) -> Mask | Rule:
    """The mask or rule that the constructor of a name makes of argument nodes."""
    if name not in makers:
        raise _unknown(name, makers)
    constructor = makers[name]
    if name == "per_head":
        values = [_list_of_masks(value, depth, makers) for value in arguments]
    else:
        values = [_literal(value) for value in arguments]
    named = {keyword.arg: _literal(keyword.value) for keyword in keywords}
    signature = inspect.signature(constructor)
    try:
        signature.bind(*values, **named)
        return constructor(*values, **named)
    except MaskError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        unknown = [word for word in named if word is not None and word not in signature.parameters]
        why = str(error)
        if unknown:
            why = f"there is no argument {unknown[0][:SHOWN]!r}{_meant(unknown[0], signature.parameters)}"
        raise MaskError(f"{_shown(node)} does not fit {name}{_parameters(signature)}: {why}") from None


def _unknown(name: str, makers: Makers) -> MaskError:
    """The error for a name that is not among the makers."""
    is_rule = "is a rule of stof_tvm.masks.runtime, which finds its blocks in each call"
    if name in RULES:
        return RuleGivenError(f"{name!r} {is_rule}")
    what = "mask" if makers is MASKS else "rule or mask"
    meant, near = _meant(name, RULES), _nearest(name, RULES)
    message = f"there is no {what} {name[:SHOWN]!r}; there are {', '.join(sorted(makers))}{meant}"
    return MaskError(message) if near is None or near in makers else RuleGivenError(f"{message} That {is_rule}")


def _meant(name: str, names) -> str:
    """A suggestion for a message about an unknown name: the nearest of the known ones, if any is near."""
    near = _nearest(name, names)
    return f"; did you mean {near!r}?" if near else ""


def _nearest(name: str, names) -> str | None:
    return next(iter(difflib.get_close_matches(name[:SHOWN], list(names), n=1)), None)


def _list_of_masks(node: ast.expr, depth: int, makers: Makers) -> list[Mask | Rule]:
    if not isinstance(node, ast.List):
        raise MaskError(f"per_head takes a list of masks, got {_shown(node)}")
    return [_mask(entry, depth - 1, makers) for entry in node.elts]


def _literal(node: ast.expr):
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        raise MaskError(f"argument {_shown(node)} must be a number, a string, or a list of numbers") from None


def _parameters(signature: inspect.Signature) -> str:
    return f"({', '.join(str(p.replace(annotation=p.empty)) for p in signature.parameters.values())})"


def _shown(node: ast.expr) -> str:
    return ast.unparse(node)[:SHOWN]
