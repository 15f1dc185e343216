"""Masks and rules as arguments name them: texts, or files of masks by path."""

from stof_tvm.cli.command import UsageError, usage
from stof_tvm.masks.mask import Mask
from stof_tvm.masks.quality.assignment import Assignment, load
from stof_tvm.masks.runtime.rule import Rule
from stof_tvm.masks.text import RuleGivenError, parse_mask, parse_rule


def mask_of(text: str, for_rules: str = "") -> Mask:
    """The mask of a text; UsageError for what is none, which says what is `for_rules` where it is a rule."""
    with usage():
        try:
            return parse_mask(text)
        except RuleGivenError as error:
            raise UsageError(f"{error}{for_rules and ': '}{for_rules}") from None


def rule_of(text: str) -> Rule:
    """The rule of a text; UsageError for what is none."""
    with usage():
        return parse_rule(text)


def masks_of(text: str) -> Mask | Assignment:
    """The mask of a text, or the masks and rules by path of a file that ends in .json.

    UsageError for a text that is no mask, InputError and MaskError for a file that holds none.
    """
    if text.endswith(".json"):
        return load(text)
    return mask_of(text, 'give --mask a .json file, in which rules are {"rule": TEXT}')
