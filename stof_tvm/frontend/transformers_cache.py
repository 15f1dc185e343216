"""The cache of keys and values that transformers' decoders return by default, turned off for an export.

An engine returns tensors and keeps no state, so it could neither return a cache nor go on from one.
"""

import contextlib
import sys
from collections.abc import Iterator

import torch

ARGUMENTS = ("use_cache", "past_key_values", "cache_params")  # whoever gives one has a cache in mind
NOTE = "the model's cache of keys and values is turned off (config.use_cache=False): an engine computes a whole forward"


def caching_configs(model: torch.nn.Module, kwargs: dict) -> list:
    """The configurations of transformers in `model` that ask for a cache; none where the call decides itself."""
    library = sys.modules.get("transformers")
    if library is None or any(kwargs.get(name) is not None for name in ARGUMENTS):
        return []
    found: dict[int, object] = {}
    for module in model.modules():
        _collect(getattr(module, "config", None), library.PretrainedConfig, found)
    return [config for config in found.values() if getattr(config, "use_cache", None) is True]


def _collect(config, kind: type, found: dict[int, object]) -> None:
    """The configuration and those in it, each once."""
    if isinstance(config, kind) and id(config) not in found:
        found[id(config)] = config
        for part in vars(config).values():
            _collect(part, kind, found)


@contextlib.contextmanager
def without_cache(configs: list) -> Iterator[None]:
    """Within, these configurations ask for no cache."""
    for config in configs:
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs:
            config.use_cache = True
