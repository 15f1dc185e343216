"""A small model with one attention and a few segments; as a program, the hash of the CUDA source that replaying a log
gives."""

import hashlib
import sys

import torch
from torch import nn

import stof_tvm
from relax_passes.pipeline import run_pipeline
from relax_passes.tuned_choices import TunedChoices
from stof_tvm import masks
from stof_tvm.frontend import import_model
from stof_tvm.site_masks import SiteMasks
from tir_kernels.target import parse_target

TARGET = parse_target("cuda -arch=sm_80")
MASK = masks.sliding_window(16)
LENGTH, WIDTH, HEADS = 128, 64, 2


class Model(nn.Module):
    """Attention on a projection, then a product with bias and activation, a residual sum and a norm."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        q, k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.norm(x + nn.functional.gelu(self.out(y)))


def model_and_input():
    torch.manual_seed(0)
    return Model().half().eval(), torch.randn(1, LENGTH, WIDTH).half()


class AskedFor:
    """A log without records that keeps what it was asked for."""

    def __init__(self):
        self.workloads, self.graphs = [], []

    def may_hold(self, problem):
        return True

    def ranked(self, workload, gpu):
        self.workloads.append(workload)
        return []

    def scheme(self, key, gpu):
        self.graphs.append(key)


def asked_for() -> AskedFor:
    """What a build of the model asks a log for."""
    log = AskedFor()
    model, x = model_and_input()
    run_pipeline(import_model(model, (x,)).mod, TARGET, SiteMasks(MASK), tuned=TunedChoices(log, TARGET))
    return log


def built(folder) -> stof_tvm.Engine:
    model, x = model_and_input()
    return stof_tvm.build(model, TARGET, (x,), mask=MASK, tuning_logs=folder)


def source_hash(engine) -> str:
    return hashlib.sha256(engine.cuda_source().encode()).hexdigest()


if __name__ == "__main__":
    print(source_hash(built(sys.argv[1])))
