"""A mask_mod read as a formula keeps what `create_mask` computes, and most of its blocks need no look."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

from stof_tvm import masks
from stof_tvm.masks import flex, pattern
from stof_tvm.masks.formulas.formula import formula_pattern
from stof_tvm.masks.walking import block_rows
from tir_kernels.errors import MaskError

OWNER = torch.arange(400) // 37
OWNER_OF_BATCH = torch.stack([OWNER, OWNER.flip(0)])
TABLE = torch.rand(30, 30, generator=torch.Generator().manual_seed(0)) < 0.4
TABLES = torch.stack([TABLE, ~TABLE])
ENDS = torch.tensor([40, 90, 250])
NEAR = torch.rand(400, generator=torch.Generator().manual_seed(1))
INFINITE = torch.tensor([1.0, float("inf"), -float("inf"), 2.0]).repeat(100)
SMALL = torch.arange(400, dtype=torch.uint8)

FORMULAS = {
    "causal": lambda b, h, q, k: q >= k,
    "bottom right": lambda b, h, q, k: q + 13 >= k,
    "shifted by a tensor": lambda b, h, q, k: q + ENDS[0] >= k - 3,
    "window": lambda b, h, q, k: (q - k).abs() <= 9,
    "dilated": lambda b, h, q, k: ((k - q) % 5 == 0) & (q >= k),
    "documents": lambda b, h, q, k: (OWNER[q] == OWNER[k]) & (q >= k),
    "other documents": lambda b, h, q, k: OWNER[q] != OWNER[k],
    "documents of b": lambda b, h, q, k: OWNER_OF_BATCH[b, q] == OWNER_OF_BATCH[b, k],
    "prefix": lambda b, h, q, k: (q >= k) | (k < 20),
    "rows": lambda b, h, q, k: NEAR[q] < 0.3,
    "columns": lambda b, h, q, k: (k % 7 == 0) & (k > 11),
    "everything": lambda b, h, q, k: q >= 0 * k,
    "a number": lambda b, h, q, k: b == 0,
    "of the head": lambda b, h, q, k: (q - k) < 2 ** (h + 3),
    "where": lambda b, h, q, k: torch.where(q < 100, k <= q, k % 3 == 0) | ~(q > k),
    "where of numbers": lambda b, h, q, k: torch.where(q - k > 20, q, k) % 2 == 0,
    "filled": lambda b, h, q, k: q.new_ones((), dtype=torch.bool) & (q >= k) | k.new_zeros(()).bool() | (k == 7),
    "filled like": lambda b, h, q, k: (q - k).abs() < torch.full_like(k, 9) * torch.ones_like(q, dtype=torch.float32),
    "logical": lambda b, h, q, k: torch.logical_or(q == 0, torch.logical_and(k != 0, torch.logical_not(q > k))),
    "xor": lambda b, h, q, k: (q >= k) ^ (k < 50),
    "bits": lambda b, h, q, k: (q & k) == 0,
    "bits of bits": lambda b, h, q, k: ((q | k) & 3) > (k ^ q) % 4,
    "products of booleans": lambda b, h, q, k: (q >= k) * (k > 3) + (q < 10),
    "sums of booleans": lambda b, h, q, k: (q >= k).int() + (q < 100).int() > 1,
    "table": lambda b, h, q, k: TABLE[q // 16, k // 16],
    "table of h": lambda b, h, q, k: TABLES[h, q // 16, k // 16],
    "table of tiles": lambda b, h, q, k: TABLE[q // 13, k // 17] & (q >= k),
    "table by offset": lambda b, h, q, k: NEAR[(q - k).abs()] > 0.4,
    "table of both": lambda b, h, q, k: (NEAR > 0.5)[(q % 16) + (k % 16)],
    "chained table": lambda b, h, q, k: TABLE[q // 16][k // 16],
    "search": lambda b, h, q, k: torch.searchsorted(ENDS, q, right=True) == torch.bucketize(k, ENDS, right=True),
    "circle": lambda b, h, q, k: (q % 16 - k % 16) ** 2 + (q // 16 - k // 16) ** 2 <= 9,
    "circle of floats": lambda b, h, q, k: (
        torch.sqrt(((q % 16 - k % 16) ** 2).float() + (q // 16 - k // 16) ** 2) <= 3.3
    ),
    "real slope": lambda b, h, q, k: (q / 3 - k).abs() < 7.5,
    "rounded": lambda b, h, q, k: torch.div(q - k, 8, rounding_mode="trunc") == torch.div(k, 8, rounding_mode="floor"),
    "clamped": lambda b, h, q, k: k <= (q - k).clamp(min=5, max=30) + q.clamp(max=200),
    "extremes": lambda b, h, q, k: torch.minimum(q, k) * 3 > torch.maximum(q, k) + 5,
    "product": lambda b, h, q, k: q * k % 7 < 3,
    "negative product": lambda b, h, q, k: (q - 200) * (k - 200) > 900,
    "overflow": lambda b, h, q, k: (q + (2**62)) + (k + 2**62) < 0,
    "overflow of a product": lambda b, h, q, k: (q * 2**40) * (k * 2**30) > 0,
    "small integers": lambda b, h, q, k: SMALL[q] + SMALL[k] > 100,
    "narrowed": lambda b, h, q, k: (q + k).to(torch.uint8) > 100,
    "NaN": lambda b, h, q, k: ((q - k) / (q - k)) + k > 5,
    "infinity": lambda b, h, q, k: (q / (k - 30)) < 2,
    "exponential": lambda b, h, q, k: torch.exp(-(q - k).abs() / 10) * NEAR[k] > 0.2,
    "third power": lambda b, h, q, k: (q - 2 * k) ** 3 < 1000,
    "odd steps": lambda b, h, q, k: (q + 2 * k) // 3 % 4 == 1,
    "negative divisor": lambda b, h, q, k: (q + k) % -5 == -2,
    "signs": lambda b, h, q, k: torch.sign(q - 2 * k) + torch.sign(k - 40) == 0,
    "difference of one and two": lambda b, h, q, k: torch.sub(q, k, alpha=2) > 3,
    "sum of one and three": lambda b, h, q, k: torch.add(q, k, alpha=3) > 50,
    "infinite sums": lambda b, h, q, k: INFINITE[q] + INFINITE[k] >= -float("inf"),
    "infinite products": lambda b, h, q, k: INFINITE[q] * (k - 5) >= -float("inf"),
    "infinite differences": lambda b, h, q, k: INFINITE[q] - INFINITE[k] != 0,
    "halves": lambda b, h, q, k: (q + k) % 0.5 == 0,
    "remainder of small integers": lambda b, h, q, k: torch.minimum(SMALL[q], SMALL[k]) % 1000 == 3,
    "fifth power": lambda b, h, q, k: (q - k * 1.5) ** 5 < 100.0,
    "isin": lambda b, h, q, k: torch.isin(q, ENDS) | (q >= k),
}
LENGTHS = [(130, 130), (70, 203), (257, 64), (1, 90), (90, 1)]


def expected(formula, q_len, kv_len, b=0, h=0):
    at = lambda b_, h_, q, k: formula(torch.tensor(b), torch.tensor(h), q, k)
    return create_mask(at, 1, 1, q_len, kv_len, device="cpu")[0, 0]


@pytest.mark.parametrize(  # two lengths for each, by turns
    "name, lengths",
    [(name, LENGTHS[(n + more) % len(LENGTHS)]) for n, name in enumerate(FORMULAS) for more in (0, 2)],
    ids=str,
)
def test_a_formula_keeps_what_its_function_keeps(name, lengths):
    formula = FORMULAS[name]
    mask = masks.from_mask_mod(formula, batch=2, heads=2)
    for b, h in ((0, 0), (1, 1)):
        wanted = expected(formula, *lengths, b, h).numpy()
        np.testing.assert_array_equal(mask.at(b, h).dense(*lengths).numpy(), wanted)
        for block, stride in (((16, 32), 1), ((64, 64), 1), ((128, 16), 1), ((16, 16), 3)):
            compiled = mask.at(b, h).compile(*lengths, block=block, token_stride=stride)
            np.testing.assert_array_equal(compiled.to_dense()[0, 0], wanted, err_msg=f"{block}, stride {stride}")


@pytest.mark.parametrize("name", FORMULAS)
def test_bounds_give_the_lists_that_elements_give(name, monkeypatch):
    lengths, block = (150, 201), (32, 16)
    by_bounds = masks.from_mask_mod(FORMULAS[name]).compile(*lengths, block=block)
    monkeypatch.setattr(flex, "formula_pattern", lambda *_: None)
    looked_at = masks.from_mask_mod(lambda *x: FORMULAS[name](*x)).compile(*lengths, block=block)
    assert by_bounds.digest == looked_at.digest


@pytest.mark.parametrize("blocks", [1, 100])
def test_a_table_of_three_axes_some_block_rows_at_a_time(blocks, monkeypatch):
    """Where a chunk is one block row, the number of its rows in the table is one for all of its blocks."""
    table = torch.rand(3, 30, 30, generator=torch.Generator().manual_seed(1)) < 0.4
    formula = lambda b, h, q, k: table[(q // 64) % 3, q // 16, k // 16]
    monkeypatch.setattr(block_rows, "CHUNK_BLOCKS", blocks)
    compiled = masks.from_mask_mod(lambda *x: formula(*x)).compile(480, 480, block=(16, 32))
    np.testing.assert_array_equal(compiled.to_dense()[0, 0], expected(formula, 480, 480, 0, 0).numpy())


def test_a_large_table_decides_blocks():
    """2,048 x 2,048 cells, as of 131,072 tokens in blocks of 64."""
    table = torch.rand(2048, 2048, generator=torch.Generator().manual_seed(0)) < 0.1
    formula = formula_pattern(lambda b, h, q, k: table[q // 64, k // 64], 0, 0, 131072, 131072, "cpu")
    assert formula is not None
    rows, columns = 64 * np.array([0, 5, 2047]), np.arange(0, 131072, 64)
    state = formula.blocks(rows, rows + 63, columns, columns + 63, 1)
    np.testing.assert_array_equal(state, np.where(table[rows // 64].numpy(), pattern.FULL, pattern.EMPTY))


NO_FORMULA = {"chained table", "isin"}
VECTORS = {"causal", "bottom right", "shifted by a tensor", "window", "dilated", "rows", "columns", "of the head"}


@pytest.mark.parametrize("name, block", zip(FORMULAS, itertools.cycle([(16, 16), (64, 32)])), ids=str)
def test_bits_packed_on_a_device_are_the_same(name, block, monkeypatch):
    """ "cpu:0" is a device of its own to patterns: it takes the path of a GPU.  Its blocks come in several calls."""
    monkeypatch.setattr(pattern, "ON_DEVICE_AT_ONCE", 5 * 64 * 32)
    mask = masks.from_mask_mod(FORMULAS[name], device="cpu:0").compile(383, 203, block=block)
    usual = masks.from_mask_mod(FORMULAS[name]).compile(383, 203, block=block)
    for array in ("full_row_ptr", "full_col_idx", "part_row_ptr", "part_col_idx", "bitmap"):
        np.testing.assert_array_equal(getattr(mask, array), getattr(usual, array), err_msg=array)


def test_most_functions_have_a_formula():
    found = {name: formula_pattern(formula, 0, 0, 130, 130, "cpu") for name, formula in FORMULAS.items()}
    assert {name for name, formula in found.items() if formula is None} == NO_FORMULA
    kinds = pattern.Offsets, pattern.Rows, pattern.Columns
    assert all(isinstance(found[name], kinds) for name in VECTORS)


@pytest.mark.parametrize(
    "name, share",
    [("documents", 0.2), ("prefix", 0.1), ("table", 0.0), ("table of tiles", 0.9), ("circle", 0.5), ("clamped", 0.2)]
    + [("real slope", 0.2), ("negative product", 0.1), ("where", 0.7), ("xor", 0.2), ("search", 0.3)],
)
def test_few_blocks_are_looked_at(name, share):
    formula = formula_pattern(FORMULAS[name], 0, 0, 384, 384, "cpu")
    assert formula is not None
    first = np.arange(0, 384, 16)
    state = formula.blocks(first, first + 15, first, first + 15, 1)
    assert (state == pattern.PART).mean() <= share


def test_a_function_that_fails_says_so():
    with pytest.raises(MaskError, match="index 500 is out of bounds|out of range|failed"):
        masks.from_mask_mod(lambda b, h, q, k: OWNER[q] == OWNER[k]).compile(500)
    with pytest.raises(MaskError, match="failed: IndexError"):  # found where elements are computed
        masks.from_mask_mod(lambda b, h, q, k: TABLE[q // 16, k // 16]).compile(600)
    with pytest.raises(MaskError, match="failed: IndexError"):
        masks.from_mask_mod(lambda b, h, q, k: TABLES[h, q // 16, k // 16], heads=3).compile(100)
    with pytest.raises(MaskError, match="must return a boolean"):
        masks.from_mask_mod(lambda b, h, q, k: q - k).compile(64)


def random_formula(seed: int):
    """A function of random operators, and its text."""
    draw = random.Random(seed)

    def number(depth: int) -> str:
        if depth == 0 or draw.random() < 0.15:
            leaves = ["q", "k", "q", "k", "h", str(draw.randint(-5, 60)), "OWNER[q]", "OWNER[k]", "NEAR[k] * 9"]
            return draw.choice(leaves)
        a, b, n = number(depth - 1), number(depth - 1), draw.choice([1, 2, 3, 7, 16, 64])
        forms = [f"({a} + {b})", f"({a} - {b})", f"({a} * {b})", f"({a} // {n})", f"({a} % {n})", f"({a} - {n})"]
        forms += [
            f"abs({a})",
            f"torch.minimum(T({a}), T({b}))",
            f"(-{a})",
            f"torch.where({comparison(depth - 1)}, {a}, {b})",
        ]
        return draw.choice(forms)

    def comparison(depth: int) -> str:
        return f"T({number(depth)} {draw.choice(['<', '<=', '>', '>=', '==', '!='])} {number(depth)})"

    def truth(depth: int) -> str:
        if depth == 0:
            return comparison(2)
        a, b = truth(depth - 1), truth(depth - 1)
        return draw.choice([f"({a} & {b})", f"({a} | {b})", f"({a} ^ {b})", f"(~{a})", a])

    text = f"lambda b, h, q, k: {truth(2)} | (q < 0) | (k < 0)"
    names = {"OWNER": OWNER, "NEAR": NEAR, "torch": torch, "T": torch.as_tensor}
    return eval(text, names), text


@pytest.mark.parametrize("seeds", range(3))
def test_random_formulas(seeds):
    had = 0
    for seed in range(25 * seeds, 25 * seeds + 25):
        formula, text = random_formula(seed)
        try:
            wanted = expected(formula, 70, 90, h=1).numpy()
        except (RuntimeError, TypeError):  # numbers of a constant's own, a float divided by zero
            continue
        mask = masks.from_mask_mod(formula, heads=2).at(0, 1)
        for block in ((16, 16), (64, 32)):
            np.testing.assert_array_equal(mask.compile(70, 90, block=block).to_dense()[0, 0], wanted, err_msg=text)
        had += formula_pattern(formula, 0, 1, 70, 90, "cpu") is not None
    assert had >= 10
