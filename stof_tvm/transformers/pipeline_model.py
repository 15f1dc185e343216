"""`as_model`: an engine as the model of a transformers pipeline."""

from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from stof_tvm.engine import Engine
from tir_kernels.errors import InputError, UnsupportedError

# Arguments that tokenizers give and engines may lack, or the other way round: what a model takes where they are not
# given.
DEFAULTS = {"attention_mask": 1, "token_type_ids": 0}
# Arguments that choose how a model answers, with the only value that an engine of a pipeline has.
CHOICES = {"use_cache": False, "return_dict": True, "output_attentions": False, "output_hidden_states": False}


class EngineModel:
    """What pipelines read of a model of transformers, around an engine; `as_model` makes it.

    Attributes
    ----------
    engine : Engine
        What computes.
    config : PreTrainedConfig
        Labels, the kind of problem and what else a pipeline looks up.
    dtype : torch.dtype
        To which pipelines cast images and sounds.
    base_model_prefix, main_input_name, input_modalities
        As the model's class has them.
    """

    base_model_prefix = ""
    main_input_name = "input_ids"
    input_modalities: Any = "text"
    generation_config = None
    hf_device_map = None

    def __init__(self, engine: Engine, config: PreTrainedConfig, dtype: torch.dtype):
        self.engine, self.config, self.dtype = engine, config, dtype

    def __call__(self, *args, **kwargs):
        """What `forward` returns for the same arguments."""
        return self.forward(*args, **kwargs)

    def forward(self, **inputs):
        """The engine's result for what a tokenizer or an image processor gives, tensors by name.

        An attention mask of ones, token types of zeros and the usual ways to answer may be given or left out, whatever
        inputs the engine has.  InputError for others, and for lengths that the engine was not built for.
        """
        names = self.engine.argument_names
        for name in sorted(inputs.keys() - set(names)):
            self._check_without(name, inputs[name], names)
        given = {name: inputs[name] for name in names if name in inputs}
        for name in DEFAULTS:
            if name in names and given.get(name) is None:
                given[name] = self._default(name, inputs)
        return self.engine(**given)

    @property
    def device(self) -> torch.device:
        """Where the engine runs."""
        return self.engine.device

    def to(self, device) -> "EngineModel":
        """This model; InputError for a device that is not the engine's."""
        device = torch.device(f"cuda:{device}" if isinstance(device, int) else device)
        if device.type != self.device.type or device.index not in (None, self.device.index or 0):
            raise InputError(f"the engine runs on {self.device}, not on {device}: pass device={str(self.device)!r}")
        return self

    def eval(self) -> "EngineModel":
        """This model: engines know no other mode."""
        return self

    def can_generate(self) -> bool:
        """Whether the model generates: no, an engine computes one call."""
        return False

    def generate(self, *_args, **_kwargs):
        """Refused: UnsupportedError."""
        raise UnsupportedError(
            "an engine of one call does not generate: give the pipeline the model itself, with model.forward = "
            "torch.compile(model.forward, backend='stof') or attn_implementation='stof'"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.engine!r})"

    def _check_without(self, name: str, value, names) -> None:
        """InputError where an argument that the engine lacks would change the result."""
        if name in CHOICES and value in (None, CHOICES[name]) or value is None:
            return
        if name in DEFAULTS and isinstance(value, torch.Tensor) and bool((value == DEFAULTS[name]).all()):
            return
        usual = DEFAULTS.get(name, CHOICES.get(name))
        but = f", and it is not {usual} everywhere" if name in DEFAULTS else ""
        raise InputError(
            f"the engine was built without {name}{but}: it takes {', '.join(names)}; build it with {name} among the "
            "example inputs"
        )

    def _default(self, name: str, inputs: dict) -> torch.Tensor:
        tokens = inputs.get(self.main_input_name)
        if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:
            raise InputError(f"the engine needs {name}, which was not given")
        return torch.full(tokens.shape, DEFAULTS[name], dtype=torch.int64, device=tokens.device)


def as_model(engine: Engine, model: PreTrainedModel | PreTrainedConfig) -> EngineModel:
    """An engine as the model of a transformers pipeline: `pipeline(task, model=as_model(engine, model), tokenizer=…)`.

    Parameters
    ----------
    engine : Engine
        Built of this model, with keyword arguments as the tokenizer gives them, best for a range of lengths and batches
        (`dynamic_shapes`).  An engine of one shape takes texts that the pipeline pads to it.
    model : PreTrainedModel or PreTrainedConfig
        The model, of which only the configuration and the class's name are kept; or its configuration alone, as beside
        a saved engine, whose `architectures` then name the class.

    Raises InputError for other arguments.
    """
    if not isinstance(engine, Engine):
        raise InputError(f"as_model takes an Engine, got a {type(engine).__name__}")
    if isinstance(model, PreTrainedModel):
        kind, config, dtype = type(model), model.config, model.dtype
        name, known = kind.__name__, {n: getattr(kind, n) for n in ("base_model_prefix", "main_input_name")}
        known["input_modalities"] = kind.input_modalities
    elif isinstance(model, PreTrainedConfig):
        config, dtype = model, model.dtype or torch.float32
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        name, known = (config.architectures or [EngineModel.__name__])[0], {}
    else:
        raise InputError(f"as_model takes a model of transformers or its configuration, got a {type(model).__name__}")
    # Pipelines look up the class's name among those that a task knows.
    return type(name, (EngineModel,), known)(engine, config, dtype)
