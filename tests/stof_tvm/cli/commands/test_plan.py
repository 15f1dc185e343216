"""`stof plan`: text, --json, what is refused."""

import pytest

from tests.stof_tvm.cli.documented import fields

SMALL = ("--heads", 4, "--head-dim", 64, "--length", 2048)


def test_json(stof):
    status, found, errors = stof("plan", "--gpus", 4, "--mask", "sliding_window(8)", *SMALL, "--layers", 3, "--json")
    assert (status, errors) == (0, "")
    assert [(mesh["tensor"], mesh["context"]) for mesh in found["meshes"]] == [(1, 4), (2, 2), (4, 1)]
    assert found["one_gpu"]["tensor"] == found["one_gpu"]["context"] == 1
    for mesh in found["meshes"]:
        assert mesh["total_ms"] == pytest.approx(3 * mesh["layer_us"] / 1000)
        assert mesh["speedup"] == pytest.approx(found["one_gpu"]["total_ms"] / mesh["total_ms"])
    assert found["meshes"][0]["received_bytes"] == 16 * 4 * 2 * 64 * 2
    assert set(found) <= fields("plan") and set(found["meshes"][0]) <= fields("plan")


def test_text(stof):
    status, text, _ = stof("plan", "--gpus", 2, "--mask", "sliding_window(64)", *SMALL)
    lines = text.splitlines()
    assert status == 0 and lines[0].startswith("sliding_window(64), 2048 tokens, 2 GPUs (sm_90a)")
    assert [line.split()[:3] for line in lines[2:5]] == [["1", "×", "1"], ["1", "×", "2"], ["2", "×", "1"]]
    assert "efficiency" in lines[1] and "one GPU" in lines[5]


def test_meshes_that_are_left_out_are_told(stof):
    status, text, _ = stof("plan", "--gpus", 6, "--mask", "sliding_window(64)", *SMALL)
    assert status == 0 and "no 3 × 2: 3 does not divide the 4 key heads\n" in text
    _, found, _ = stof("plan", "--gpus", 8, "--mask", "causal", "--length", 32, "--heads", 8, "--json")
    assert (
        list(found["left_out"]) == ["1 × 8"]
        and "32 tokens are fewer than 8 for each of 8" in found["left_out"]["1 × 8"]
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--gpus", 2, "--mask", "causl", *SMALL), "did you mean 'causal'?"),
        (("--gpus", 2, "--mask", "document([5])", *SMALL), "sum to 5"),
        (("--gpus", 3, "--mask", "causal", "--length", 16), "no mesh of 3 GPUs"),
        (("--gpus", 5000, "--mask", "causal", "--length", 16), "more than 4096"),
        (("--gpus", 2, "--mask", "causal", *SMALL, "--target", "llvm"), "is no GPU"),
        (("--gpus", 2, "--mask", "causal", *SMALL, "--kv-heads", 3), "heads=4 must be a multiple of kv-heads=3"),
        (("--gpus", 2, "--mask", "causal", *SMALL, "--head-dim", 7), "error: head-dim=7 must be a multiple of 8: "),
        (("--gpus", 2, "--mask", "causal", *SMALL, "--head-dim", 12), "error: head-dim=12 must be a multiple of 8: "),
        (
            ("--gpus", 2, "--mask", "causal", *SMALL, "--head-dim", 6, "--dtype", "float32"),
            "error: head-dim=6 must be a multiple of 4: kernels copy rows of float32 16 bytes at a time",
        ),
        (("--gpus", 2, "--mask", "causal", *SMALL, "--head-dim", 264), "error: head-dim=264 is more than 256"),
        (
            ("--gpus", 2, "--mask", "causal", *SMALL, "--head-dim", 0),
            "--head-dim: '0' must be an integer of at least",
        ),
        (("--gpus", 2, "--mask", "causal", *SMALL, "--batch", -1), "--batch: '-1' must be an integer of at least 1"),
        (
            ("--gpus", 2, "--mask", "causal", *SMALL, "--heads", 10**6),
            "error: q of batch=1, heads=1000000, 1024 tokens of a GPU and head-dim=64 has 65536000000 elements: a "
            "kernel takes fewer than 2^31",
        ),
        (
            ("--gpus", 2, "--mask", "causal", *SMALL, "--batch", 10**6),
            "error: q of batch=1000000, heads=4, 1024 tokens of",
        ),
    ],
)
def test_what_is_refused(stof, arguments, why):
    status, text, errors = stof("plan", *arguments)
    assert status == 2 and text == "" and errors.startswith("usage: stof plan") and why in errors.splitlines()[-1]
