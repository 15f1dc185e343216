"""The loop that chooses tokens, inside of transformers' `generate`, which reads what a call asks for."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from transformers import EosTokenCriteria, GenerationConfig, GenerationMixin, MaxLengthCriteria, PreTrainedConfig
from transformers.generation import GenerationMode

from stof_tvm.generation.choosing.on_host import on_host
from stof_tvm.generation.prompts import check_padding
from tir_kernels.errors import UnsupportedError

if TYPE_CHECKING:
    from stof_tvm.generation.choosing.ahead import Ahead
    from stof_tvm.generation.generator import Generator

ON_THE_DEVICE = (MaxLengthCriteria, EosTokenCriteria)  # criteria that look at nothing but the tokens, and do not wait
MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
REFUSED = ("past_key_values", "position_ids", "inputs_embeds", "assistant_model", "custom_generate", "guidance_scale")


class _Caller(GenerationMixin):
    """What transformers' `generate` asks a model for before it chooses tokens."""

    main_input_name = "input_ids"
    base_model_prefix = ""
    _is_stateful = False

    def __init__(self, generation_config: GenerationConfig, vocabulary: int, device: torch.device):
        self.config = PreTrainedConfig(num_hidden_layers=1, vocab_size=vocabulary)
        self.generation_config = generation_config
        self.device = device

    def forward(self, input_ids, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None):
        raise NotImplementedError  # engines compute it

    def can_generate(self) -> bool:
        return True


def generated(
    ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    generation_config: GenerationConfig,
    vocabulary: int,
    generator_for: "Callable[[int, int], Generator | Ahead]",
    options: dict,
) -> torch.Tensor:
    """Prompts and the tokens chosen after them, int64 (batch, tokens).

    Parameters
    ----------
    ids, attention_mask : torch.Tensor
        As `Generator.generate` takes them.
    generation_config : GenerationConfig
        The model's own.
    vocabulary : int
        How many tokens there are to choose from.
    generator_for : callable
        Maps the number of sequences, and that of tokens of the longest result, to the engines.
    options : dict
        Those of transformers' `generate`.

    Raises UnsupportedError for beams and other ways to search, and for other inputs and results than tokens.
    """
    if given := [name for name in REFUSED if options.get(name) is not None]:
        raise UnsupportedError(f"generate does not take {given[0]}")

    if attention_mask is not None:
        check_padding(ids, attention_mask)  # transformers leaves one out that is 1 everywhere

    def loop(_caller, input_ids, logits_processor, stopping_criteria, generation_config, **model_arguments):
        _refuse(generation_config)
        most = _longest(input_ids.shape[1], stopping_criteria, generation_config)
        engines = generator_for(len(input_ids), most)
        with engines.turn():
            return _chosen(
                *(engines, input_ids, model_arguments.get("attention_mask"), logits_processor, stopping_criteria),
                *(generation_config, most, options.get("streamer")),
            )

    caller = _Caller(generation_config, vocabulary, ids.device)
    return caller.generate(ids, attention_mask=attention_mask, custom_generate=loop, **options)


def _refuse(generation_config: GenerationConfig) -> None:
    mode = generation_config.get_generation_mode()
    if mode not in MODES:
        raise UnsupportedError(f"generate chooses tokens greedily or by sampling, not by {mode.value}")
    if generation_config.return_dict_in_generate:
        raise UnsupportedError("generate returns tokens only: leave return_dict_in_generate out")


def _longest(prompt: int, criteria, generation_config: GenerationConfig) -> int:
    """Tokens of the result: a caller's own criterion of a length takes the place of the configuration's."""
    lengths = [criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)]
    return max(prompt + 1, min(lengths, default=generation_config.max_length))


def _chosen(engines, ids, attention_mask, processors, criteria, generation_config, most, streamer) -> torch.Tensor:
    """What transformers' `_sample` chooses.  Waits for the device only where a streamer or a criterion reads tokens.

    Where only the engines' device knows which tokens are chosen, and whether more are wanted, it is given the next step
    before the host reads either; a step that is not wanted after all is taken back.
    """
    batch, length = ids.shape
    tokens = ids.new_empty((batch, most))
    tokens[:, :length] = ids
    pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    reads_tokens = any(not isinstance(criterion, MaxLengthCriteria) for criterion in criteria)
    goes_ahead = engines.runs_beside and all(isinstance(criterion, ON_THE_DEVICE) for criterion in criteria)
    unfinished = torch.ones(batch, dtype=torch.bool, device=ids.device)
    logits = engines.prompt(ids, attention_mask)
    while True:
        scores = processors(tokens[:, :length], logits.to(torch.float32, copy=True)) if processors else logits
        if generation_config.do_sample:
            chosen = torch.multinomial(scores.float().softmax(-1), 1).squeeze(1)
        else:
            chosen = scores.argmax(-1)
        if pads:
            chosen = torch.where(unfinished, chosen, generation_config._pad_token_tensor)
        tokens[:, length] = chosen
        length += 1
        is_last = length == tokens.shape[1]
        if goes_ahead:
            if reads_tokens:
                unfinished = unfinished & ~criteria(tokens[:, :length], None)
            read = on_host([*([chosen] if streamer is not None else []), *([unfinished] if reads_tokens else [])])
            if not is_last:
                logits = engines.step(chosen[:, None])
            found = read()
            if streamer is not None:
                streamer.put(found[0])
            goes_on = not reads_tokens or bool(found[-1].any())
            if not (is_last or goes_on):
                engines.take_back()
        else:
            if streamer is not None:
                streamer.put(chosen.cpu())
            if reads_tokens:
                unfinished = unfinished & ~criteria(tokens[:, :length], None)
            goes_on = not reads_tokens or bool(unfinished.any())
            if not is_last and goes_on:
                logits = engines.step(chosen[:, None])
        if is_last or not goes_on:
            break
    if streamer is not None:
        streamer.end()
    return tokens[:, :length]
