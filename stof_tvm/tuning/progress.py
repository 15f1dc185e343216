"""The progress bar of a search, on stderr."""

import sys

from tqdm import tqdm

from stof_tvm.tuning.search.state import Trial


class ProgressBar:
    """Trials, best latency of the model, trials that the log had; the bar itself shows rate and time left."""

    def __init__(self, max_trials: int, is_shown: bool):
        self.bar = tqdm(total=max_trials, desc="tune", unit="trial", file=sys.stderr, disable=not is_shown)
        self.cached = 0

    def __call__(self, trial: Trial) -> None:
        self.cached += trial.is_cached
        latency = "" if trial.model_us is None else f"model {trial.model_us:.1f} µs, "
        self.bar.set_postfix_str(f"{latency}{self.cached} from the log, {trial.task}", False)
        self.bar.update()

    def close(self) -> None:
        self.bar.close()
