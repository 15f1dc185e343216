"""The demo: a Hugging Face BERT with a BigBird mask, compiled, verified, timed, saved and loaded."""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from stof_tvm import masks
from stof_tvm.cli.measuring.ratio import ratio_of, ratio_text
from stof_tvm.cli.measuring.timing import time_calls
from stof_tvm.compiler import build
from stof_tvm.running.needs_transformers import needs_transformers
from stof_tvm.saving.loading import load
from tir_kernels.errors import DeviceError, StofError
from tir_kernels.target import parse_target

LAYERS, HIDDEN, HEADS, LENGTH = 4, 256, 4, 1024
TOLERANCE = {torch.float32: 2e-3, torch.float16: 2e-2}  # allowed error of a layer-normed output; weights are random


def run_demo(target=None, repeats: int = 10, progress: bool = True) -> dict:
    """Build, verify, time, save, load in a fresh process and verify again; returns the numbers.

    `progress` shows a bar on stderr.
    Raises StofError where an output is further from PyTorch's than the tolerance.
    """
    target = parse_target(target)
    if target.kind.name == "cuda" and not torch.cuda.is_available():
        raise DeviceError("there is no CUDA GPU here, and the demo runs what it compiles")
    steps = tqdm(total=5, desc="demo", file=sys.stderr, disable=not progress)

    def step(name):
        steps.set_postfix_str(name)
        steps.update()

    model, (ids,), mask = demo_call(target)
    device, dtype = ids.device, next(model.parameters()).dtype
    step("building")
    started = time.perf_counter()
    engine = build(model, target=target, example_inputs=(ids,), mask=mask, progress=progress)
    build_seconds = time.perf_counter() - started

    step("verifying")
    dense = mask.dense(LENGTH)[None, None].to(device)
    with torch.no_grad():
        expected = model(ids, attention_mask=dense).last_hidden_state
        error = _check(engine(ids).last_hidden_state, expected, "engine")
        step("timing")
        calls = {"engine": lambda: engine(ids), "torch": lambda: model(ids, attention_mask=dense)}
        ours, torchs = time_calls(calls, device.type, repeats)

    step("saving and loading in a fresh process")
    with tempfile.TemporaryDirectory(prefix="stof_demo_") as folder:
        path = Path(folder, "bert.stof")
        engine.save(path)
        size = path.stat().st_size
        np.savez(Path(folder, "case.npz"), ids=ids.cpu().numpy(), expected=expected.float().cpu().numpy())
        command = [sys.executable, "-m", "stof_tvm.demo", folder, str(device)]
        fresh = subprocess.run(command, capture_output=True, text=True)
        if fresh.returncode:
            raise StofError(f"the saved engine failed in a fresh process:\n{fresh.stderr}")
        fresh_error = json.loads(fresh.stdout)["error"]
    step("done")
    steps.close()
    return {
        "report": engine.report(),
        "error": error,
        "fresh_process_error": fresh_error,
        "build_seconds": build_seconds,
        "artifact_bytes": size,
        "engine_ms": ours["median_ms"],
        "engine_quartiles_ms": ours["quartiles_ms"],
        "torch_ms": torchs["median_ms"],
        "torch_quartiles_ms": torchs["quartiles_ms"],
        "ratio": ratio_of(ours, torchs),
        "speedup": torchs["median_ms"] / ours["median_ms"],
        "dtype": str(dtype).removeprefix("torch."),
    }


def demo_call(target=None) -> tuple:
    """(model, example inputs, mask) of the demo, in the dtype that suits a target, on its device if there is one."""
    is_cuda = parse_target(target).kind.name == "cuda"
    device = torch.device("cuda" if is_cuda and torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if is_cuda else torch.float32
    model = bert_encoder().to(device, dtype)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (1, LENGTH), generator=generator).to(device)
    return model, (ids,), masks.bigbird()


def bert_encoder():
    """A BERT encoder from a configuration, with seeded random weights: nothing is downloaded."""
    with needs_transformers("the demo"):
        from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        num_hidden_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        intermediate_size=4 * HIDDEN,
        max_position_embeddings=LENGTH,
        attn_implementation="sdpa",
    )
    return BertModel(config, add_pooling_layer=False).eval()


def demo_text(result: dict) -> str:
    """The result as text for people."""
    return "\n".join(
        (
            str(result["report"]),
            f"built in {result['build_seconds']:.1f} s; saved as one file of {result['artifact_bytes'] / 1e6:.1f} MB",
            f"largest error against PyTorch ({result['dtype']}): {result['error']:.1e}",
            f"largest error of the saved engine in a fresh process: {result['fresh_process_error']:.1e}",
            f"milliseconds a forward, same mask, median (quartiles): {_time(result, 'engine')}, PyTorch "
            f"{_time(result, 'torch')}; PyTorch / ours: {ratio_text(result['ratio'])}",
        )
    )


def _check(actual: torch.Tensor, expected: torch.Tensor, name: str) -> float:
    error = (actual.float() - expected.float()).abs().max().item()
    if not error <= TOLERANCE[actual.dtype]:
        raise StofError(f"the {name}'s output is off by {error:.2e}; at most {TOLERANCE[actual.dtype]:.0e} is allowed")
    return error


def _time(result: dict, system: str) -> str:
    low, high = result[f"{system}_quartiles_ms"]
    return f"{result[f'{system}_ms']:.1f} ({low:.1f} … {high:.1f})"


def _verify_saved(folder: str, device: str) -> None:
    """In the fresh process: load the engine, without the PyTorch model, and compare."""
    case = np.load(Path(folder, "case.npz"))
    engine = load(Path(folder, "bert.stof"))
    actual = engine(torch.from_numpy(case["ids"]).to(device)).last_hidden_state
    print(json.dumps({"error": _check(actual.cpu(), torch.from_numpy(case["expected"]), "loaded engine")}))


if __name__ == "__main__":
    _verify_saved(*sys.argv[1:])
