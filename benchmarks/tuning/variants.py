"""The searches that are compared, and one run of one of them, in a process of its own."""

import json

from benchmarks.tuning.rewards import PublishedReward, Uniform
from benchmarks.tuning.strategies import evolutionary, replay_trace
from stof_tvm.tuning.search.state import Options

VARIANTS = {
    "stof": Options(),
    "published-reward": Options(reward=PublishedReward),
    "no-reward": Options(reward=Uniform),
    "no-stage-one": Options(stage_one=False),
    "no-cost-model": Options(cost_model=False),
    "again": Options(),
    "no-cache": Options(cache=False),
    # MetaSchedule's strategies as they are, and with the analytical defaults to begin with.
    "evolutionary": Options(strategy=evolutionary, stage_one=False, defaults=False),
    "random": Options(strategy=replay_trace, stage_one=False, defaults=False),
    "evolutionary-from-defaults": Options(strategy=evolutionary, stage_one=False),
    "random-from-defaults": Options(strategy=replay_trace, stage_one=False),
}

FROM_LOG = ("again", "no-cache")  # these begin with the log that the search "stof" of the same shape has written


def run_variant(name: str, batch: int, length: int, target, trials: int, seconds: float, log: str, seed: int) -> dict:
    """Tune BERT-base with a BigBird mask into the log in a folder; the report's data as it is.

    Seconds count from the call, with the model in memory; the processes that compile start within.
    """
    import torch

    import stof_tvm
    from benchmarks.tuning.bert import bert_call
    from tir_kernels.target import parse_target

    device = "cuda" if parse_target(target).kind.name == "cuda" else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.float32
    layers = 12 if device == "cuda" else 1
    model, inputs = bert_call(batch, length, device, dtype, layers)
    result = stof_tvm.tune(
        model,
        target,
        inputs,
        stof_tvm.masks.bigbird(),
        work_dir=log,
        max_trials=trials,
        max_seconds=seconds,
        seed=seed,
        progress=False,
        options=VARIANTS[name],
    )
    data = json.loads(json.dumps(result.report.to_dict()))
    data["options"] = {name: getattr(x, "__name__", x) for name, x in vars(VARIANTS[name]).items()}
    if name == "stof":
        data["page"] = result.report.html()
    return data
