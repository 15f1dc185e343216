"""The fit of the products' time model: the committed sweeps, what is chosen of them, and that a fit finds it back."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks import fit_gemm_model as fit
from tir_kernels.fusion.gemm.sizes.configs import MEASURED

HARD = "random_rows", "behind_in_turns"  # sweeps: rows that nothing divides, and what cuBLAS was faster at


@pytest.fixture(scope="module")
def groups():
    return [fit.Group(entry["problem"], entry["us"]) for entry in json.loads(fit.ROWS.read_text())]


def test_committed_sweeps_name_their_configurations(groups):
    entries = json.loads(fit.ROWS.read_text())
    for entry, group in zip(entries, groups, strict=True):
        assert [config.label for config in group.configs] == list(entry["us"])
    timed = {config for group in groups for config in group.configs}
    assert {"mma", "wgmma", "tma", "cluster"} == {fit.kind_of(config) for config in timed}
    assert {c.splits for c in timed if c.tma} >= {1, 2, 4} and {c.sets for c in timed} == {1, 2}
    assert {c.label for c in MEASURED if c.tma and c.splits > 1} <= {c.label for c in timed}


def test_the_committed_coefficients_choose_well(groups):
    entries = json.loads(fit.ROWS.read_text())
    is_comparable = lambda entry: entry.get("weight", 1) == 1 and entry["sweep"] not in HARD
    comparable = [group for entry, group in zip(entries, groups, strict=True) if is_comparable(entry)]
    found = np.array(list(fit.regrets(comparable, fit.COMMITTED, warpgroup=True).values()))
    # 11 % at 32760 × 8960 × 1536, where the fastest tiles of all are within 5 % of one another; else 10 %.
    assert len(found) >= 80 and np.exp(np.log(found).mean()) < 1.015 and found.max() < 1.12
    hard = [group for entry, group in zip(entries, groups, strict=True) if entry["sweep"] in HARD]
    found = np.array(list(fit.regrets(hard, fit.COMMITTED, warpgroup=True).values()))
    assert len(found) == 48 and np.exp(np.log(found).mean()) < 1.02 and found.max() < 1.12
    few_rows = [g for entry, g in zip(entries, groups) if g.problem.m < 4096 and entry["sweep"] != "in-models"]
    found = np.array(list(fit.regrets(few_rows, fit.COMMITTED, warpgroup=True).values()))
    assert len(found) >= 30 and np.exp(np.log(found).mean()) < 1.01 and found.max() < 1.1
    found = np.array(list(fit.regrets(groups, fit.COMMITTED, warpgroup=True).values()))  # with those at the power limit
    assert len(found) >= 320 and np.exp(np.log(found).mean()) < 1.035
    found = np.array(list(fit.regrets(groups, fit.COMMITTED, warpgroup=False).values()))
    assert len(found) > 30 and np.exp(np.log(found).mean()) < 1.03


def test_the_models_own_times_are_found_again(groups):
    some = [group for group in groups[::4] if any(c.warpgroup for c in group.configs)]
    made = [
        fit.Group(entry["problem"], dict(zip(entry["us"], group.predicted(fit.COMMITTED))))
        for entry, group in zip(json.loads(fit.ROWS.read_text()), groups)
        if group in some
    ]
    slower = {kind: replace(c, product=1.2 * c.product, wait=0.8 * c.wait) for kind, c in fit.COMMITTED.items()}
    fitted = fit.fit(made, slower)
    for group in made:
        wgmma = np.array([c.warpgroup for c in group.configs])
        np.testing.assert_allclose(group.predicted(fitted)[wgmma], group.us[wgmma], rtol=6e-2)
        # A rate of its own is found less well for a tile that was timed at few problems, where it was slow.
        proposed = wgmma & np.array([c in MEASURED for c in group.configs])
        np.testing.assert_allclose(group.predicted(fitted)[proposed], group.us[proposed], rtol=5e-2)


def test_sweeps_are_kept_by_problem(groups, tmp_path, monkeypatch):
    group = groups[0]
    config = group.configs[0]
    rows = [
        {"template": "gemm", "problem": repr(group.problem), "config": repr(config), "label": config.label, "us": 7.0},
        {"template": "gemm", "problem": repr(group.problem), "config": "", "label": "failed", "failed": "why"},
        {"template": "cublas", "problem": repr(group.problem), "config": "", "label": "cublas", "us": 5.0},
    ]
    (tmp_path / "some.json").write_text(json.dumps(rows))
    monkeypatch.setattr(fit, "ROWS", tmp_path / "kept.json")
    fit.keep([tmp_path / "some.json"])
    (entry,) = json.loads(fit.ROWS.read_text())
    assert entry["sweep"] == "some" and entry["us"] == {config.label: 7.0}
    assert fit.Group(entry["problem"], entry["us"]).problem == group.problem


def test_products_of_the_models_are_kept_too(tmp_path, monkeypatch):
    case = {"m": 4096, "n": 768, "k": 512, "bias": True}
    label = "128x256x64 8x1 warps 4 stages wgmma tma"
    rows = [
        {"case": case, "system": "stof", "variant": f"gemm {label}", "median_us": 8.0},
        {"case": case | {"batch": 4, "matrices": 2}, "system": "stof-best", "medians_us": {f"gemm {label}": 1.0}},
        {"case": case, "system": "stof-best", "medians_us": {f"gemm {label}": 7.0, "gemv 4 warps": 9.0}},
    ]
    (tmp_path / "some.json").write_text(json.dumps(rows))
    monkeypatch.setattr(fit, "ROWS", tmp_path / "kept.json")
    fit.keep([tmp_path / "some.json"], weight=0.1)
    (entry,) = json.loads(fit.ROWS.read_text())
    assert entry["weight"] == 0.1 and entry["us"] == {label: 7.0}
    group = fit.Group(entry["problem"], entry["us"], entry["weight"])
    assert group.problem.steps and group.weights.tolist() == [0.1]
