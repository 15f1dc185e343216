"""The short form of the random-program tester, and that it finds what there is to find."""

import ast
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

import stof_tvm
from stof_tvm.errors import CompileError, MaskError
from tests.robustness.spellings import check as checking
from tests.robustness.spellings import pool
from tests.robustness.spellings.check import Verdict, check, misses
from tests.robustness.spellings.generate import FEATURES, make_program
from tests.robustness.spellings.program import Model, Program
from tests.robustness.spellings.rounding import Rounding
from tests.robustness.spellings.shrink import shrink

SEED, PROGRAMS, PART = 20261122, 60, 30


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, PROGRAMS, PART))
def test_nothing_is_found(first):
    """In a process of its own, whose threads nobody forks."""
    options = ["--seed", str(SEED), "--first", str(first), "--programs", str(PART), "--shrink", "0"]
    ran = subprocess.run(
        [sys.executable, "-m", "tests.robustness.spellings", *options], capture_output=True, text=True, timeout=280
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert f"{PART} programs" in ran.stdout


def test_a_seed_makes_the_same_programs():
    for index in range(30):
        assert make_program(3, index) == make_program(3, index)
    assert make_program(3, 0).body != make_program(4, 0).body


@pytest.mark.parametrize("only", FEATURES)
def test_a_feature_has_programs_that_pytorch_runs(only):
    programs = [make_program(1, index, only) for index in range(4)]
    for program in programs:
        model = Model(program)
        assert all(isinstance(x, torch.Tensor) for x in model.run(model.inputs()))
        ast.parse(program.source("llvm"))
    if only == "masks":
        assert all(program.mask for program in programs)


def wrong_engine(monkeypatch, spoil, when=lambda text: True):
    """Let `build` give engines that run PyTorch, spoiled where the statements say so."""

    def build(module, target, inputs, mask=None, **options):
        text = "\n".join(module.lines)

        def engine(*inputs):
            with torch.no_grad():
                result = module(*inputs)
            return spoil(result) if when(text) else result

        return engine

    monkeypatch.setattr(stof_tvm, "build", build)
    initial = Model.__init__

    def remembered(self, program):
        initial(self, program)
        self.module.lines = program.body

    monkeypatch.setattr(Model, "__init__", remembered)


def program_of(*body, setup=(), inputs=(("x1", "torch.randn(B, C)"),), **more) -> Program:
    sizes = (("B", 3), ("H", 2), ("D", 4), ("C", "H * D"))
    return Program(sizes, inputs, setup, body, (body[-1].partition(" =")[0],), **more)


STEPS = ("v1 = x1 * 2", "v2 = F.silu(v1 + 0.5)", "v3 = v2.flip(-1)", "v4 = v3 - v1")


@pytest.mark.parametrize(
    "spoil",
    [
        lambda y: y * 1.0001,
        lambda y: y.clone().index_fill_(0, torch.tensor(0), torch.nan),
        lambda y: y.double(),
        lambda y: y[:1],
    ],
    ids=["values", "nan", "dtype", "shape"],
)
def test_what_is_wrong_is_found_and_made_small(monkeypatch, spoil):
    wrong_engine(monkeypatch, spoil, lambda text: "F.silu" in text)
    program = program_of(*STEPS)
    verdict = check(program)
    assert verdict.kind == "wrong"
    small, _ = shrink(program, verdict, check)
    assert len(small.body) == 1 and "F.silu" in small.body[0] and dict(small.sizes)["B"] <= 2
    assert check(program_of("v1 = x1 * 2")).kind == "right"


def test_errors_and_refusals_are_told_apart(monkeypatch):
    raised = {"error": KeyError("x"), "refused": MaskError("no"), "error of the compiler": CompileError("x")}
    for kind, error in raised.items():

        def build(*arguments, error=error, **options):
            raise error

        monkeypatch.setattr(stof_tvm, "build", build)
        assert check(program_of(*STEPS)).kind == kind.partition(" ")[0]
    assert check(program_of("v1 = x1 @ x1")).kind == "skipped"


def row(*values, dtype=torch.float32):
    return torch.tensor([values], dtype=dtype)


NAN, INF = torch.nan, torch.inf


@pytest.mark.parametrize(
    ("got", "own", "exact", "allowed"),
    [
        ((1.0, 2.0), (1.0, 2.0), (1.0, 2.0), True),
        ((1.0, 2.000001), (1.0, 2.0), (1.0, 2.0), True),
        ((1.0, 2.00001), (1.0, 2.0), (1.0, 2.0), False),
        ((1.0, 2.00001), (1.0, 2.000005), (1.0, 2.0), True),  # as PyTorch itself
        ((1e-30, 0.0), (1e-30, 0.0), (1e-30, 0.0), True),
        ((0.0, 0.0), (1e-30, 0.0), (1e-30, 0.0), False),
        ((1.0, NAN), (1.0, NAN), (1.0, NAN), True),
        ((1.0, 0.0), (1.0, NAN), (1.0, NAN), False),
        ((1.0, NAN), (1.0, 0.0), (1.0, 0.0), False),
        ((1.0, INF), (1.0, INF), (1.0, 1e39), True),  # overflows in float32
        ((1.0, -INF), (1.0, INF), (1.0, INF), False),
    ],
)
def test_what_is_allowed(got, own, exact, allowed):
    assert allowed is not misses(row(*got), row(*own), row(*exact, dtype=torch.float64), []).any().item()


def test_integers_equal_one_of_the_references():
    integers = lambda *values: torch.tensor([values])
    assert not misses(integers(1, 2), integers(1, 2), integers(1, 3), []).any()
    assert misses(integers(1, 4), integers(1, 2), integers(1, 3), []).any()
    assert not misses(integers(1, 4), integers(1, 2), integers(1, 3), [integers(1, 4)]).any()


def test_a_discontinuity_within_rounding_is_no_finding(monkeypatch):
    """1 - 1/3 · 3 is 0 or 1e-8, and its sign whatever rounding makes of it; a sum of other terms is not."""
    wrong_engine(monkeypatch, lambda y: -y)
    ill = program_of("v1 = ((x1 * 0 + 1) / 3 * 3 - 1).sign()")
    with Rounding(1e-7, 0):
        model = Model(ill)
        assert model.reference(model.inputs())[0].unique().numel() > 1
    wrong_engine(monkeypatch, lambda y: (y != 0).to(y.dtype))
    assert check(ill).kind in ("right", "rounding")
    assert check(program_of("v1 = (x1.abs() + 1).sign()")).kind == "right"
    wrong_engine(monkeypatch, lambda y: -y)
    assert check(program_of("v1 = (x1.abs() + 1).sign()")).kind == "wrong"


def test_the_users_mask_in_the_reference():
    """Rows that it empties give 0, rows that the model empties are NaN."""
    program = program_of(
        "v1 = x1.masked_fill(torch.arange(3)[:, None] == 1, -math.inf)",
        "v2 = restricted(v1)",
        "v3 = unless_emptied(v2.softmax(-1), v1)",
        inputs=(("x1", "torch.randn(1, 1, 3, 3)"),),
        mask="masks.from_mask_mod(lambda b, h, q, k: (q > 0) & (k > 0))",
    )
    model = Model(program)
    (weights,) = model.reference(model.inputs())
    assert torch.equal(weights[0, 0, 0], torch.zeros(3).double()) and weights[0, 0, 1].isnan().all()
    assert weights[0, 0, 2, 0] == 0 and weights[0, 0, 2].sum() == pytest.approx(1)
    (plain,) = model.run(model.inputs())
    assert (plain[0, 0, 0] > 0).all()


def test_fills_and_the_users_mask_leave_a_row_empty_or_do_not():
    """Row 0 is filled but for key 0, which the user's mask leaves out: uniform over keys 1 and 2, or 0."""
    program = program_of(
        "v1 = x1.masked_fill(torch.arange(3) > 0, -1e9)",
        "v2 = unless_emptied(restricted(v1).softmax(-1), v1)",
        "v3 = with_mask(x1 * 0 - 1e9 * (torch.arange(3) > 0), x1, x1)",
        "v4 = F.scaled_dot_product_attention(x1, x1, x1, attn_mask=v3)",
        inputs=(("x1", "torch.randn(1, 1, 3, 3)"),),
        mask="masks.from_mask_mod(lambda b, h, q, k: (q > 0) | (k > 0))",
    ).replace(results=("v2", "v4"))
    model = Model(program)
    inputs = model.inputs()
    exact, other = (model.reference(inputs, filled) for filled in (-torch.inf, checking.FILLED[0]))
    assert exact[0][0, 0, 0].tolist() == pytest.approx([0, 0.5, 0.5]) and torch.equal(
        exact[0][:, :, 1:], other[0][:, :, 1:]
    )
    assert torch.equal(other[0][0, 0, 0], torch.zeros(3).double()) and torch.equal(
        other[1][0, 0, 0], torch.zeros(3).double()
    )
    assert (exact[1][0, 0, 0] != 0).all()


def double_or_die(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 5:
        time.sleep(60)
    return 2 * number


def test_the_pool_survives_crashes_and_hangs():
    done = dict(pool.run(double_or_die, range(8), 2, lambda how: how, seconds=0.2))
    assert done == {**{n: 2 * n for n in (0, 1, 2, 4, 6, 7)}, 3: "crash: status -9", 5: "hang"}


def test_the_verdict_names_no_sizes():
    causes = {checking._shortened(ValueError(f"a tensor of shape ({n}, 3) has no 'x{n}'")) for n in range(3)}
    assert len(causes) == 1 and Verdict("error", *causes).cause.startswith("ValueError: a tensor")
