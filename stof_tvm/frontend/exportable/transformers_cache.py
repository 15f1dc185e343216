"""The cache of keys and values that transformers' decoders return by default, turned off for an export.

An engine returns tensors and keeps no state, so it could neither return a cache nor go on from one.
"""

import contextlib
import sys

import torch

from stof_tvm.frontend.exportable.transformers_configs import Override

ARGUMENTS = ("use_cache", "past_key_values", "cache_params")  # a call that gives one decides about the cache
NOTE = "the model's cache of keys and values is turned off (config.use_cache=False): an engine computes a whole forward"
OFF = Override("use_cache", (True,), False)


def caching_configs(model: torch.nn.Module, kwargs: dict) -> list:
    """The configurations of transformers in `model` that ask for a cache; none where `kwargs` or `model` decide."""
    library = sys.modules.get("transformers")
    is_decided = getattr(model, "holds_cache", False) or any(kwargs.get(name) is not None for name in ARGUMENTS)
    if library is None or is_decided:
        return []
    found: dict[int, object] = {}
    for module in model.modules():
        _collect(getattr(module, "config", None), library.PretrainedConfig, found)
    return [config for config in found.values() if OFF.concerns(config)]


def _collect(config, kind: type, found: dict[int, object]) -> None:
    """Add a configuration and those nested in it to `found`, each once."""
    if isinstance(config, kind) and id(config) not in found:
        found[id(config)] = config
        for part in vars(config).values():
            _collect(part, kind, found)


def without_cache(model: torch.nn.Module, kwargs: dict) -> contextlib.AbstractContextManager[None]:
    """A context in which no configuration in `model` asks for a cache; any number of threads may be in it at once."""
    return OFF.context(lambda: caching_configs(model, kwargs))
