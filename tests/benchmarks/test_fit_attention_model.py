"""The fit of the time model: what it prints for the committed sweep, and that it finds what made the times."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fit_attention_model as fit
from benchmarks.peers.cases import Case
from benchmarks.peers.results import read_rows
from tir_kernels.attention.block_wise.cost import TILES, WARPGROUP_TILES
from tir_kernels.attention.time_model import Coefficients


@pytest.fixture(scope="module")
def sweep():
    """Every third point of short inputs, with the times that the model itself gives."""
    rows = [row for row in read_rows([fit.ROWS]) if row["case"]["q_len"] <= 1024][::3]
    measured = fit.Sweep.of(rows)
    return fit.Sweep(measured.cases, measured.case, measured.configs, measured.work, measured.predict(fit.FITS))


def test_committed_sweep_covers_every_tile_and_the_grid():
    rows = read_rows([fit.ROWS])
    assert len({Case.from_row(row) for row in rows}) == 301 and {row["case"]["batch"] for row in rows} == {1, 8, 16}
    labels = {label for row in rows for label in row["median_us"]}
    for tiles, suffix in ((TILES, ""), (WARPGROUP_TILES, " wgmma")):
        for m, n, warps in tiles:
            assert f"{m}x{n} {warps} warps 2 stages{suffix}" in labels
    specialized = {label for label in labels if "warpgroups" in label}
    assert {label.split()[0] for label in specialized} == {"192x128", "128x128", "128x64", "64x128", "64x64"}


def test_the_page_has_the_committed_coefficients():
    page = (Path(fit.__file__).parents[1] / "docs" / "attention_model.md").read_text()
    for field in fields(Coefficients):
        given = [getattr(coefficients, field.name) for coefficients in fit.FITS]
        shown = " | ".join("0" if x < 1e-8 else f"{x:.3g}" for x in given)
        assert f"| `{field.name}` | {shown} |" in page, f"{field.name}: {shown}"


def test_the_models_own_times_are_found_again(sweep):
    fitted = sweep.fit(np.ones(len(sweep.cases), bool))
    np.testing.assert_allclose(sweep.predict(fitted), sweep.us, rtol=2e-2)
    candidate = np.array([fit.may_be_chosen(config) for config in sweep.configs])
    found = sweep.choices(fit.FITS, np.ones(len(sweep.cases), bool))
    for number, case in enumerate(sweep.cases):
        at = np.flatnonzero((sweep.case == number) & candidate)
        best = np.flatnonzero(sweep.case == number)
        assert found[case][0] == pytest.approx(sweep.us[at].min() / sweep.us[best].min())


def test_halves_are_about_half_and_differ(sweep):
    cuts = list(fit.halves(sweep.cases).values())
    for cut in cuts:
        assert 0.3 < cut.mean() < 0.7
    assert len({cut.tobytes() for cut in cuts}) == len(cuts)


@pytest.mark.slow  # twenty fits to thousands of times
def test_the_committed_coefficients_are_the_fit_and_choose_well(capsys):
    sweep = fit.Sweep.of(read_rows([fit.ROWS]))
    everything = np.ones(len(sweep.cases), bool)
    # Those of mma.sync are of the sweep before.  Fitted to this one they choose no better here, and worse where there
    # is no wgmma: 50 instead of 27 % off at worst.
    refitted = sweep.kind != fit.KINDS.index("warp")
    fitted = sweep.predict(sweep.fit(everything))
    np.testing.assert_allclose(fitted[refitted], sweep.predict(fit.FITS)[refitted], rtol=2e-2)
    regret = np.array([slowdown for slowdown, _, _ in sweep.choices(fit.FITS, everything).values()])
    # One of 301 choices is more than 20 % off: docs/attention_model.md names it.
    assert np.exp(np.log(regret).mean()) < 1.015 and regret.max() < 1.21 and (regret > 1.12).sum() <= 9
    alone = regret_among(sweep, "warp")
    assert np.exp(np.log(alone).mean()) < 1.045 and alone.max() < 1.3
    fit.report(sweep)
    printed = capsys.readouterr().out
    assert "every second shape, to the other" in printed and "worst choices" in printed


def regret_among(sweep, kind: str) -> np.ndarray:
    """The times of the choices over those of the best where there are no configurations but those of one kind."""
    predicted, kind = sweep.predict(fit.FITS), sweep.kind == fit.KINDS.index(kind)
    found = []
    for number in range(len(sweep.cases)):
        at = np.flatnonzero((sweep.case == number) & kind)
        chosen = min((i for i in at if fit.may_be_chosen(sweep.configs[i])), key=lambda i: predicted[i])
        found.append(sweep.us[chosen] / sweep.us[at].min())
    return np.array(found)
