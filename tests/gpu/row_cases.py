"""The cases of the CUDA row kernels: norms, chains, embeddings, rotary; every configuration, ragged edges, all dtypes.

Only problem and configuration decide the generated source.
"""

from dataclasses import dataclass

import torch
from gemm_cases import step_label, torch_rest

from tir_kernels.fusion.problem import ACTIVATIONS, Norm, RowProblem, Step
from tir_kernels.fusion.rows import chain as row_chain_cuda
from tir_kernels.fusion.rows import embedding as row_embedding_cuda
from tir_kernels.fusion.rows import norm as row_norm_cuda
from tir_kernels.fusion.rows import rotary as row_rotary_cuda
from tir_kernels.fusion.rows.chain import ChainConfig
from tir_kernels.fusion.rows.embedding import EmbeddingProblem, Table
from tir_kernels.fusion.rows.geometry import RowConfig
from tir_kernels.fusion.rows.rotary import RotaryConfig, RotaryProblem
from tir_kernels.target import parse_target

BIAS, RESIDUAL, GATE = Step("add", "row"), Step("add", "matrix"), Step("multiply", "matrix")
LAYER_NORM, RMS_NORM = Norm("layer_norm", 1e-5), Norm("rms_norm", 1e-6, bias=False)
MEAN = 5.0  # of the source: a norm whose statistics cancel shows


@dataclass(frozen=True)
class RowCase:
    """`make_inputs` and `torch_sequence` are in the order of the kernel's arguments; outputs follow the inputs."""

    problem: RowProblem | EmbeddingProblem | RotaryProblem
    config: RowConfig | ChainConfig | RotaryConfig

    @property
    def template(self):
        if isinstance(self.problem, RotaryProblem):
            return row_rotary_cuda
        if isinstance(self.problem, EmbeddingProblem):
            return row_embedding_cuda
        return row_chain_cuda if self.problem.norm is None else row_norm_cuda

    @property
    def label(self) -> str:
        return f"{self.template.NAME} {_problem_label(self.problem)} | {self.config.label}"

    def make_inputs(self, seed: int, device: str = "cuda") -> list[torch.Tensor]:
        """Fresh and random; indices and both ends of each table among them, the rest normal."""
        generator = torch.Generator(device=device).manual_seed(seed)
        return _inputs(self.problem, generator, device)

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        if isinstance(self.problem, RotaryProblem):
            return self.problem.out_shapes
        return [(self.problem.m, self.problem.n)] * (1 + self.problem.keeps_sum)

    def torch_sequence(self, *inputs) -> tuple[torch.Tensor, ...]:
        """PyTorch's unfused operators, in the dtype of the inputs."""
        problem = self.problem
        if isinstance(problem, RotaryProblem):
            return _rotate(problem, *inputs)
        if isinstance(problem, EmbeddingProblem):
            count = 2 * len(problem.tables)
            gathered = [
                table[index.repeat(problem.m // len(index))]
                for index, table in zip(inputs[:count:2], inputs[1:count:2])
            ]
            x = sum(gathered[1:], gathered[0])
            return torch_rest(problem.of_sum, x, *inputs[count:])
        return torch_rest(problem, *inputs)


def _problem_label(p) -> str:
    if isinstance(p, RotaryProblem):
        source = "apart" if p.packed_heads is None else f"of {p.packed_heads}"
        tables = f"tables {p.table_batch} {p.table_dtype}"
        return (
            f"b{p.batch} s{p.length} h{p.heads}/{p.kv_heads} {source} d{p.head_dim} {p.dtype} {tables} {p.out_layout}"
        )
    text = f"{p.m}x{p.n} {p.dtype}"
    if isinstance(p, EmbeddingProblem):
        for table in p.tables:
            text += f" table-{table.rows}" + (f"-every-{table.period}" if table.period else "")
        text += f" {p.index_dtype}"
    else:
        text += "".join(f" {step_label(step)}" for step in p.steps)
    if p.norm is not None:
        text += f" {p.norm.kind}" + "-weight" * p.norm.weight + "-bias" * p.norm.bias + " sum" * p.keeps_sum
    return text


def _inputs(problem, generator, device) -> list[torch.Tensor]:
    def normal(shape, dtype):
        return torch.randn(shape, generator=generator, device=device).to(getattr(torch, dtype))

    if isinstance(problem, RotaryProblem):
        angles = torch.rand(problem.table_shape, generator=generator, device=device) * 6.3
        tables = [x.to(getattr(torch, problem.table_dtype)) for x in (angles.cos(), angles.sin())]
        return [*(normal(shape, problem.dtype) for shape in problem.source_shapes), *tables]
    if isinstance(problem, EmbeddingProblem):
        found = []
        for i, table in enumerate(problem.tables):
            index = torch.randint(table.rows, problem.index_shape(i), generator=generator, device=device)
            index[0], index[-1] = 0, table.rows - 1
            found += [index.to(getattr(torch, problem.index_dtype)), normal((table.rows, problem.n), problem.dtype)]
        return [*found, *(normal(shape, problem.dtype) for shape in problem.of_sum.operand_shapes)]
    source = normal((problem.m, problem.n), problem.dtype) + MEAN
    return [source, *(normal(shape, problem.dtype) for shape in problem.operand_shapes)]


def _rotate(problem: RotaryProblem, *inputs) -> tuple[torch.Tensor, ...]:
    *sources, cos, sin = inputs
    if problem.packed_heads is not None:
        sources = sources[0].split(
            (problem.heads, problem.kv_heads, sources[0].shape[2] - problem.heads - problem.kv_heads), 2
        )[:2]
    cos, sin = (table.to(sources[0].dtype)[:, :, None] for table in (cos, sin))

    def turned(x):
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-high, low], dim=-1) * sin

    results = [turned(x) for x in sources]
    return tuple(results if problem.out_layout == "bshd" else [x.transpose(1, 2).contiguous() for x in results])


def row_cases() -> list[RowCase]:
    target = parse_target("cuda -arch=sm_80")

    def every_config(template, problem):
        return [RowCase(problem, config) for config in template.configs(problem, target)]

    def default(template, problem):
        return every_config(template, problem)[0]

    cases = []
    for n in (768, 1024, 4096, 776, 2056):
        cases += every_config(row_norm_cuda, RowProblem(131, n, "float16", (BIAS, RESIDUAL), LAYER_NORM))
    for n in (8, 24, 64, 200, 8192, 16384, 16392, 32768):
        for norm in (LAYER_NORM, RMS_NORM):
            cases.append(default(row_norm_cuda, RowProblem(1025, n, "bfloat16", (RESIDUAL,), norm, keeps_sum=True)))
    for dtype in ("float16", "bfloat16", "float32"):
        for norm in (LAYER_NORM, RMS_NORM, Norm("layer_norm", 1e-5, False, False), Norm("rms_norm", 1e-6)):
            for m in (1, 4096):
                cases.append(default(row_norm_cuda, RowProblem(m, 768, dtype, (BIAS, RESIDUAL), norm, keeps_sum=True)))
    cases.append(default(row_norm_cuda, RowProblem(100, 1000, "float16", (Step("gelu"), GATE, BIAS), LAYER_NORM)))
    cases += every_config(row_chain_cuda, RowProblem(131, 776, "float16", (Step("silu"), GATE)))
    for dtype in ("float16", "bfloat16", "float32"):
        for kind in ACTIVATIONS if dtype != "float32" else ("relu",):
            cases.append(default(row_chain_cuda, RowProblem(97, 200, dtype, (BIAS, Step(kind), RESIDUAL))))
    cases.append(default(row_chain_cuda, RowProblem(8192, 4096, "float16", (Step("silu"), GATE))))
    cases.append(default(row_chain_cuda, RowProblem(3, 8, "float16", (Step("scale", value=0.125), RESIDUAL))))
    clip = Step("clip", value=0.5)
    cases.append(default(row_chain_cuda, RowProblem(97, 200, "float32", (RESIDUAL, clip))))
    cases.append(default(row_norm_cuda, RowProblem(131, 768, "float16", (RESIDUAL, clip), RMS_NORM, keeps_sum=True)))
    bert = (Table(30522), Table(512, 128), Table(2))
    for dtype in ("float16", "bfloat16", "float32"):
        for tables in (bert, bert[:2], bert[:1]):
            for norm in (LAYER_NORM, None):
                problem = EmbeddingProblem(384, 768, dtype, tables, norm=norm, keeps_sum=norm is not None)
                cases.append(default(row_embedding_cuda, problem))
    cases += every_config(
        row_embedding_cuda, EmbeddingProblem(131, 776, "float16", (Table(50), Table(3)), "int32", RMS_NORM)
    )
    for dtype, table_dtype in (("float16", "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")):
        for packed in (None, 24):
            for layout in ("bshd", "bhsd"):
                problem = RotaryProblem(2, 131, 16, 4, 64, dtype, packed, 1, table_dtype, layout)
                cases.append(default(row_rotary_cuda, problem))
    cases += every_config(row_rotary_cuda, RotaryProblem(3, 77, 5, 2, 128, "float16", 9, 3))
    cases += [default(row_rotary_cuda, RotaryProblem(1, 300, 1, 1, dim, "float16")) for dim in (16, 48, 80, 256)]
    return list(dict.fromkeys(cases))
