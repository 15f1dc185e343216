"""The experts of transformers' mixtures, computed by grouped products while a model is exported.

An implementation that goes through the experts which tokens chose ("eager") depends on values, so torch.export refuses
it.  Experts that transformers can also compute by grouped products are switched to these: the same numbers, summed in
another order.
"""

import contextlib

import torch

from stof_tvm.frontend.exportable.transformers_configs import Override

NOTE = "the model's experts are computed by grouped products (experts_implementation='grouped_mm'), not one by one"
GROUPED = Override("_experts_implementation_internal", (None, "eager"), "grouped_mm")
# What transformers' `use_experts_implementation` sets in every instance of a class that has several implementations.
MARKS = ("is_transposed", "has_gate", "has_bias", "config")


def looping_configs(model: torch.nn.Module) -> list:
    """The configurations of experts in `model` that are computed one by one and could be by grouped products."""
    experts = (module for module in model.modules() if all(hasattr(module, mark) for mark in MARKS))
    configs = {id(module.config): module.config for module in experts}
    return [config for config in configs.values() if GROUPED.concerns(config)]


def grouped_experts(model: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """A context in which these experts are computed by grouped products; any number of threads may be in it at once."""
    return GROUPED.context(lambda: looping_configs(model))
