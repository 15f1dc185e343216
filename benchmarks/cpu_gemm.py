"""Are the dense operators on the CPU fast enough?  GFLOP/s of linear layers, and a BERT layer without its attention.

    python benchmarks/cpu_gemm.py

Prints the least time of several runs, this compiler's and PyTorch's in turn, on all cores of this machine.
"""

import argparse
import time

import torch
import torch.nn.functional as F
import tvm
from torch import nn
from tvm import relax

from relax_passes.schedule.cpu import cpu_passes
from stof_tvm.frontend import import_model
from tir_kernels.compiling.cpu_threads import use_all_cores
from tir_kernels.target import parse_target

# (rows, columns, depth)
SHAPES = [(1024, 1024, 256), (1024, 3072, 768), (1024, 768, 3072), (128, 768, 768), (97, 1000, 80), (1, 3072, 768)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class LayerWithoutAttention(nn.Module):
    """The linear layers, activation and norms of a BERT layer; the sum of q, k and v stands in for their attention."""

    def __init__(self, hidden: int):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.norm, self.last_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)

    def forward(self, x):
        x = self.norm(x + self.out(self.query(x) + self.key(x) + self.value(x)))
        return self.last_norm(x + self.down(F.gelu(self.up(x))))


def compile_model(model, x, target):
    """A function of x that runs the model as `stof_tvm.build` lowers its dense operators."""
    with target:
        mod = tvm.transform.Sequential(cpu_passes(target))(import_model(model, (x,)).mod)
        machine = relax.VirtualMachine(tvm.compile(mod, target=target), tvm.cpu())
    return lambda: machine["main"](x)


def least_seconds(function, repeats: int) -> float:
    function()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - start)
    return best


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=20)
    repeats = parser.parse_args().repeats
    target = parse_target("llvm")
    print(f"{target.attrs['mcpu']}, {use_all_cores()} threads, PyTorch {torch.__version__}: {torch.get_num_threads()}")
    print(f"\n{'linear (rows x columns x depth)':34}{'dtype':10}{'stof':>8}{'torch':>8}  GFLOP/s")
    for rows, columns, depth in SHAPES:
        for dtype in DTYPES:
            torch.manual_seed(0)
            model, x = nn.Linear(depth, columns).to(dtype).eval(), torch.randn(rows, depth).to(dtype)
            ours = least_seconds(compile_model(model, x, target), repeats)
            theirs = least_seconds(lambda model=model, x=x: model(x), repeats)
            work = 2e-9 * rows * columns * depth
            name = f"{rows} x {columns} x {depth}"
            print(f"{name:34}{str(dtype)[6:]:10}{work / ours:8.0f}{work / theirs:8.0f}")
    print(f"\n{'BERT layer without attention':34}{'dtype':10}{'stof':>8}{'torch':>8}  ms")
    for hidden in (256, 768):
        for dtype in DTYPES:
            torch.manual_seed(0)
            model, x = LayerWithoutAttention(hidden).to(dtype).eval(), torch.randn(1, 1024, hidden).to(dtype)
            ours = least_seconds(compile_model(model, x, target), repeats)
            theirs = least_seconds(lambda model=model, x=x: model(x), repeats)
            name = f"hidden {hidden}, length 1024"
            print(f"{name:34}{str(dtype)[6:]:10}{ours * 1e3:8.2f}{theirs * 1e3:8.2f}")


if __name__ == "__main__":
    main()
