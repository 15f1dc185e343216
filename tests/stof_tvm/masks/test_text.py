"""Masks as text: what prints itself is read back, and nothing is evaluated."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stof_tvm import masks
from stof_tvm.errors import MaskError
from stof_tvm.masks.mask import Mask
from stof_tvm.masks.text import DEPTH, NAMES, RULES, RuleGivenError, mask_text, parse_mask, parse_rule

PRINTED = [
    masks.bigbird(random_fill=0.2),
    masks.causal(align="bottom-right"),
    masks.sliding_window(128) & masks.causal() | masks.global_tokens([0, 5]),
    ~(masks.prefix_lm(3) | masks.strided(4)) & masks.fixed(8, 2),
    masks.per_head([masks.causal(), ~masks.padding([3, 4])]),
    masks.sliding_tile((4, 8, 8), (2, 4, 4), (2, 12, 4), text=7, order="row-major", text_first=True),
    masks.sliding_tile((16, 8), 4, 12) | masks.neighborhood((16, 8), 3),
    masks.neighborhood((4, 8, 8), (2, 3, 5), (1, 2, 1), (True, False, False), tile=(1, 4, 4), text=3),
    masks.radial((4, 8, 8), 0.5, least=64, sink=0, text=7) & ~masks.radial((4, 64)),
    masks.everything() & ~masks.causal(),
    masks.vertical_slash((1, 2), (0, 3)) & (masks.document([8, 8]) | masks.dilated_window(2, 3)),
]


@pytest.mark.parametrize("mask", PRINTED, ids=repr)
def test_what_a_mask_prints_is_read_back(mask):
    assert parse_mask(repr(mask)) == mask


printable = st.recursive(
    st.one_of(
        st.sampled_from(["top-left", "bottom-right"]).map(masks.causal),
        st.builds(masks.sliding_window, st.integers(0, 2**62), st.booleans()),
        st.builds(masks.global_tokens, st.sets(st.integers(0, 99), max_size=5)),
        st.builds(masks.bigbird, st.none() | st.integers(0, 9), st.integers(0, 9), st.floats(0, 1), st.integers(1, 40)),
        st.lists(st.integers(0, 70), min_size=1, max_size=5).map(masks.document),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
        st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
        inner.map(lambda mask: ~mask),
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.one_of(printable, st.lists(printable, min_size=1, max_size=3).map(masks.per_head)))
def test_every_composition_is_read_back(mask):
    read = parse_mask(repr(mask))
    assert read == mask and hash(read) == hash(mask) and repr(read) == repr(mask)


def test_short_forms():
    assert parse_mask(" longformer ") == masks.longformer()
    assert parse_mask("block_sparse([[1, 0], [0, 1]], 8)") == masks.block_sparse([[1, 0], [0, 1]], 8)
    assert parse_mask("sliding_window(window=-0)") == masks.sliding_window(0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "cannot be read"),
        ("bigbird(", "cannot be read"),
        ("causal()\0", "cannot be read"),
        ("(" * 500 + "causal" + ")" * 500, "cannot be read"),
        ("~" * (DEPTH + 1) + "causal", f"at most {DEPTH} levels"),
        ("~" * 100_000 + "causal", "cannot be read|levels"),
        ("bigbrid(3)", "there is no mask 'bigbrid'; there are a_shape, bigbird, "),
        ("from_mask_mod(print)", "there is no mask 'from_mask_mod'"),
        ("__import__('os').system('true')", "is no mask"),
        ("masks.causal()", "is no mask"),
        ("causal() + causal()", "is no mask"),
        ("7", "is no mask"),
        ("strided", r"does not fit strided\(stride\): missing a required argument: 'stride'"),
        ("causal(aline='x')", r"does not fit causal\(align='top-left'\)"),
        ("sliding_window(wndow=3)", r"causal=False\): there is no argument 'wndow'; did you mean 'window'\?$"),
        ("sliding_window(3, zzz=1)", "there is no argument 'zzz'$"),
        ("causal(*[1])", "must be a number"),
        ("causal(**{'align': 'x'})", "causal"),
        ("sliding_window(open('x'))", "argument open.* must be a number"),
        ("sliding_window(-1)", "must be an integer of at least 0"),
        ("dilated_window(2, 10000000000000000000000)", "dilation=10000000000000000000000 must be at most"),
        ("bigbird(seed=18446744073709551616)", "seed=18446744073709551616 must be at most 18446744073709551615"),
        ("global_tokens([[1], 2])", "global_tokens"),
        ("per_head(causal())", "takes a list of masks"),
        ("per_head([3])", "3 is no mask"),
    ],
)
def test_what_is_no_mask(text, why):
    with pytest.raises(MaskError, match=why):
        parse_mask(text)


def test_what_makes_masks_of_numbers_is_known():
    no_text = {"from_block_mask", "from_mask_mod", "reordered"}
    makers = {
        name for name in masks.__all__ if getattr(getattr(masks, name), "__annotations__", {}).get("return") is Mask
    }
    assert set(NAMES) == makers - no_text


@pytest.mark.parametrize("grow", [lambda m: m | masks.strided(3), lambda m: masks.strided(3) & m, lambda m: ~m & m])
def test_masks_that_are_too_deep_for_a_text_say_so(grow):
    flat = deep = masks.causal()
    for _ in range(4):
        flat = grow(flat)
    assert parse_mask(mask_text(flat)) == flat
    for _ in range(2000):
        deep = grow(deep)
    with pytest.raises(MaskError, match=f"has no text: it is nested more than {DEPTH} levels deep"):
        mask_text(deep)


def test_the_deepest_text():
    chain = masks.causal()
    for _ in range(DEPTH - 1):
        chain = masks.per_head([chain | masks.strided(3)]).at(0, 0)
    assert parse_mask(mask_text(chain)) == chain
    with pytest.raises(MaskError, match="nested more than"):
        mask_text(masks.per_head([chain]))


def test_one_head_with_long_numbers():
    mask = masks.per_head([masks.global_tokens(range(40))])
    assert parse_mask(mask_text(mask)) == mask


runtime = masks.runtime
RULES_PRINTED = [
    runtime.top_blocks(3, block=(32, 64), causal=True),
    runtime.vertical_slash(20, 30) & masks.document([8, 8]),
    runtime.xattention(8, 0.5) & (masks.sliding_window(7) | ~masks.causal()),
    runtime.flex_prefill(least=0),
    runtime.sparge(causal=True) & masks.per_head([masks.causal(), masks.bigbird()]),
    runtime.flash_prefill(0.5) & masks.causal(),
    runtime.low_rank(bits=3),
    runtime.low_rank(k=3, causal=False),
    runtime.per_head([runtime.top_blocks(3) & masks.causal(), masks.a_shape(3, 4)]) & masks.sliding_window(7),
]


@pytest.mark.parametrize("rule", RULES_PRINTED, ids=repr)
def test_what_a_rule_prints_is_read_back(rule):
    read = parse_rule(repr(rule))
    assert repr(read) == repr(rule) and (read.block, read.within) == (rule.block, rule.within)


def test_short_forms_of_rules():
    assert repr(parse_rule("sparge & causal")) == repr(runtime.sparge() & masks.causal())
    assert repr(parse_rule("causal & xattention")) == repr(runtime.xattention() & masks.causal())
    assert set(RULES) == set(NAMES) | set(runtime.__all__) - {"Rule", "rule"}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("causal", "'causal' is a mask that is known in advance, no rule"),
        ("per_head([causal])", "is a mask that is known in advance"),
        ("rule(print)", "there is no rule or mask 'rule'; there are a_shape, "),
        ("xatention", "did you mean 'xattention'"),
        ("sparge(", "rule 'sparge\\(' cannot be read"),
        ("~sparge", "~sparge is no rule: a rule is joined to masks, by & alone"),
        ("sparge | causal", "sparge | causal is no rule"),
        ("causal & sparge & xattention", "by & alone"),
        ("sparge(mass=2)", "mass=2 must be a number above 0, at most 1"),
        (
            "top_blocks",
            r"does not fit top_blocks\(k, block=64, causal=False, pool='mean'\): missing a required argument: 'k'",
        ),
        ("per_head([sparge, 3])", "3 is no mask"),
    ],
)
def test_texts_that_are_no_rules(text, why):
    with pytest.raises(MaskError, match=why):
        parse_rule(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("xattention(8)", "^'xattention' is a rule of stof_tvm.masks.runtime, which finds its blocks in each call$"),
        ("causal & ~sparge(no=3)", "^'sparge' is a rule"),
        ("xatention", "there is no mask 'xatention'; .*; did you mean 'xattention'[?] That is a rule"),
    ],
)
def test_a_rule_is_no_mask(text, why):
    with pytest.raises(RuleGivenError, match=why):
        parse_mask(text)


@pytest.mark.parametrize("text", ["casual", "nothing_like_it", "vertical_slash(block=3)"])
def test_what_is_no_rule_either(text):
    """Names that masks and rules have in common are the mask's."""
    with pytest.raises(MaskError) as raised:
        parse_mask(text)
    assert not isinstance(raised.value, RuleGivenError) and "is a rule" not in str(raised.value)
