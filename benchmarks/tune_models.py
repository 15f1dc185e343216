"""Tune models that `gpu_models.py` measures, into the tuning logs that come with the package, or models of the zoo.

usage: python benchmarks/tune_models.py [--model bert …] [--shape 1x128 …] [--seconds 30] [--logs tuning_logs]
       python benchmarks/tune_models.py --zoo Swin-tiny … --shape 16x224 --logs FOLDER
       python benchmarks/tune_models.py --dry-run        one narrow layer of each model on the CPU, few trials

Cases come one after another; several processes, each with a GPU of its own, may share the folder of the logs.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.models.cases import MODELS, SHAPES, model_cases, tiny  # noqa: E402
from benchmarks.zoo.cases import ZooCase, zoo_cases  # noqa: E402
from benchmarks.zoo.models import MODELS as ZOO  # noqa: E402


def main() -> int:
    options = parse_arguments()
    cases: list = [case for case in model_cases() if case.model in options.model and case.shape in options.shape]
    if options.dry_run:
        cases = list(dict.fromkeys(map(tiny, cases)))
        options.logs, options.trials, options.target = tempfile.mkdtemp(), 4, "llvm"
    if options.zoo:
        cases = [case for case in zoo_cases() if case.model in options.zoo and case.shape in options.shape]
    for case in cases:
        print(json.dumps(tune_case(case, options)), flush=True)
    return 0


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=MODELS, choices=MODELS, help="only these")
    parser.add_argument("--zoo", nargs="+", choices=ZOO, metavar="MODEL", help="models of the zoo instead")
    parser.add_argument("--shape", nargs="+", default=[f"{b}x{s}" for b, s in SHAPES], help="only these, as 8x512")
    parser.add_argument("--target", help="default: the GPU present")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a search (default: %(default)s)")
    parser.add_argument("--trials", type=int, default=2000, help="of a search (default: %(default)s)")
    parser.add_argument("--logs", default="tuning_logs", help="folder (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="one narrow layer of each model on the CPU")
    return parser.parse_args()


def tune_case(case, options) -> dict:
    """One line of what a search found."""
    import torch

    import stof_tvm
    from benchmarks.models.families import make_inputs, make_model
    from benchmarks.peers.patterns import shared_pattern
    from benchmarks.zoo import make as zoo

    started = time.perf_counter()
    if isinstance(case, ZooCase):
        model, example, mask = zoo.make_model(case), zoo.make_inputs(case, 1, "cpu"), None
    else:
        model, example = make_model(case, small=options.dry_run), make_inputs(case, 1, "cpu")
        mask = shared_pattern(case.mask, case.sequence, case.sequence, "cpu").stof_mask()
    with torch.no_grad():
        result = stof_tvm.tune(
            model,
            options.target,
            tuple(example),
            mask,
            work_dir=options.logs,
            max_trials=options.trials,
            max_seconds=options.seconds,
            progress=False,
        )
    seconds = {name: round(value, 2) for name, value in result.report.seconds.items()}
    failed = {task.name: task.failures for task in result.report.tasks if task.failures}
    return {
        "case": case.label,
        **result.best,
        "trials": len(result.history),
        "from_log": sum(trial.is_cached for trial in result.history),
        "failed": failed,
        "wall_s": round(time.perf_counter() - started, 1),
        **seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
