"""The model of a case with random weights: made, computed in a wider dtype, divided by PyTorch."""

import torch
from torch import nn

from benchmarks.parallel.bert import Bert
from benchmarks.parallel.cases import BERT, Case
from benchmarks.parallel.llama import Llama

COLUMNS, ROWS = ("query", "key", "value", "gate", "up"), ("output", "down")  # of a block's products
WIDER = {"float16": torch.float32, "float32": torch.float64}


def model_of(case: Case, device: str) -> nn.Module:
    """The same model on every rank: weights are drawn with a fixed seed, small enough for half precision."""
    with torch.device("meta"):
        model = (Bert if case.model == BERT else Llama)(case).to(getattr(torch, case.dtype))
    model = model.to_empty(device=device).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for name, x in model.state_dict(keep_vars=True).items():
        if "norm" in name:
            x.data.fill_(float(name.endswith("weight")))
        elif name.endswith((".keys", ".values")):
            x.data.zero_()
        else:
            x.data.normal_(0, 0.02, generator=generator)
    return model


def inputs_of(case: Case, device: str) -> tuple[torch.Tensor, ...]:
    """The same inputs on every rank: ids (batch, length) and, with a cache, the token's position in its middle."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, case.vocabulary, (case.batch, case.q_len), generator=generator).to(device)
    return (ids, torch.tensor([case.cache // 2], device=device)) if case.cache else (ids,)


def widely(model: nn.Module, inputs: tuple, case: Case) -> torch.Tensor:
    """The model's result in WIDER: one block at a time has its weights so."""
    narrow, wide = getattr(torch, case.dtype), WIDER[case.dtype]

    def before(module, arguments):
        module.to(wide)
        return tuple(x.to(wide) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments)

    def after(module, arguments, result):
        module.to(narrow)

    parts = [part for name, part in model.named_children() if name != "blocks"] + [*model.blocks]
    handles = [part.register_forward_pre_hook(before) for part in parts]
    handles += [part.register_forward_hook(after) for part in parts]
    try:
        return model(*inputs)
    finally:
        for handle in handles:
            handle.remove()


def divided_by_pytorch(model: nn.Module, mesh) -> nn.Module:
    """The model with DTensor's tensor parallelism, in place."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for block in model.blocks:
        plan = {name: ColwiseParallel() for name in COLUMNS} | {name: RowwiseParallel() for name in ROWS}
        parallelize_module(block, mesh, {name: way for name, way in plan.items() if hasattr(block, name)})
        if getattr(block, "cache", 0):
            block.keys, block.values = (
                x.chunk(mesh.size(), 1)[mesh.get_local_rank()].contiguous() for x in (block.keys, block.values)
            )
    return model
