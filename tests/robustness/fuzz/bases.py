"""The whole inputs that are mutated: a tuning log of two GPUs, a saved engine, texts of masks, schemes and problems."""

import functools
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from tvm.s_tir import Schedule

from relax_passes.attention.attention_site import AttentionSite
from relax_passes.attention.replaceable_masks import ReplaceableMask
from stof_tvm.mask_arrays import MaskArrays
from stof_tvm.saving.artifact import save_artifact
from stof_tvm.saving.weights_file import Weights
from stof_tvm.tuning.logs.log import TuningLog
from tests.stof_tvm.tuning.logged import GPU, OTHER, PROBLEM, TARGET, WORKLOAD, trace
from tir_kernels.attention.cpu import row_wise
from tir_kernels.attention.problem import AttentionProblem, Layouts, View
from tir_kernels.fusion.problem import GemmProblem, Norm, RowProblem, Step
from tir_kernels.target import parse_target
from tir_kernels.tuning.workload import primfunc_workload

A100 = "NVIDIA A100"
ARCH = "sm_80"
LIBRARY = bytes(range(256)) * 64  # stands for machine code: nothing may be loaded that is not this
WEIGHTS = Weights([torch.arange(300, dtype=torch.float32).reshape(3, 100), torch.arange(65, dtype=torch.uint8)])

HOST = json.dumps({"kind": "llvm", "keys": ["cpu"], "mcpu": "x86-64"})
LEAF = {"type": None, "context": None, "children_spec": []}
NO_ARGUMENTS = {"type": "builtins.dict", "context": "[]", "children_spec": []}
SIGNATURE = {
    "inputs": [
        {"name": "x", "shape": [1, 24, 16], "dtype": "float32"},
        {"name": "ids", "shape": [3], "dtype": "int64"},
    ],
    "outputs": [{"name": "y", "shape": [1, 24, 16], "dtype": "float16"}],
    "in_leaves": [
        {"name": "x", "tensor": 0},
        {"name": "ids", "tensor": 1},
        {"name": "flag", "tensor": None, "value": 3},
    ],
    "out_leaves": [{"name": "y", "tensor": 0, "value": None}, {"name": "again", "tensor": 0, "value": None}],
    "in_spec": json.dumps(
        [
            1,
            {
                "type": "builtins.tuple",
                "context": "null",
                "children_spec": [
                    {"type": "builtins.tuple", "context": "null", "children_spec": [LEAF, LEAF, LEAF]},
                    NO_ARGUMENTS,
                ],
            },
        ]
    ),
    "out_spec": json.dumps([1, {"type": "builtins.dict", "context": '["y", "z"]', "children_spec": [LEAF, LEAF]}]),
    "names": ["x", "ids", "flag"],
    "positional": ["x", "ids", "flag", "more"],
    "defaults": {"more": None, "scale": 0.5},
    "states": [
        {"name": "x", "shape": [1, 24, 16], "dtype": "float32", "input": 0, "result": 1, "output": None},
    ],
}
SITE = {
    "site": "layer.0.attention",
    "spelling": "sdpa",
    "rewritten": True,
    "kernel": "block-wise",
    "config": "32x32",
    "block": [32, 32],
    "mask": "causal() | global_tokens(2)",
    "mask_digest": "7631d84dc8c206cb",
    "density": 0.5989583333333334,
    "block_density": 1.0,
    "shape": {"batch": 1, "heads": 2, "kv_heads": 2, "q_len": 24, "kv_len": 24, "head_dim": 16, "dtype": "float32"},
    "layouts": ["bshd", "sbhd"],
    "predicted_us": 1.85,
    "measured_us": None,
    "reason": "predicted 2 µs against 7 µs row-wise",
    "notes": ["no static mask: nothing to skip"],
}
DENSE = {"site": "layer.1", "spelling": "softmax", "rewritten": False, "reason": "q has the symbolic shape [s0]"}
SEGMENT = {
    "segment": 0,
    "operators": ["matmul", "add"],
    "kernel": "default",
    "config": "",
    "reason": "no templates for llvm",
    "predicted_us": None,
    "measured_us": 3,
}
REPORT = {
    "target": HOST,
    "sites": [SITE, DENSE],
    "segments": [SEGMENT, SEGMENT | {"segment": 1}],
    "fusion_scheme": "0x487f",
    "tuning": ["log llvm-x86-64; fusion scheme: no record"],
}

MASKS = [
    "bigbird(random_fill=0.2) & causal()",
    "sliding_window(3) | global_tokens([0, 5])",
    "~(prefix_lm(3) | strided(4)) & fixed(8, 2)",
    "per_head([causal(), ~padding([3, 4])])",
    "vertical_slash((1, 2), (0, 3)) | document([8, 9])",
    "dilated_window(2, 3) | a_shape(2, 4) | longformer(window=2, global_tokens=1)",
    "block_sparse([[1, 0], [0, 1]], 9) & from_tensor([[0.0]])",
    "causal(align='bottom-right')",
    "sliding_tile((3, 3), (1, 2), (1, 4), text=1) | radial((5, 2), least=2)",
    "neighborhood((2, 5), 1, (1, 3), tile=2)",
]
RULES = [
    "xattention(8, 0.5) & causal()",
    "per_head([top_blocks(3), a_shape(2, 4) | causal]) & document([8, 9])",
    "flex_prefill(gamma=0.5, least=0, block=32) & ~strided(3)",
    "sparge(similarity=-1, block=(32, 64)) & flash_prefill(0.5, sinks=1)",
    "low_rank(k=3, bits=2) & vertical_slash(20, 30)",
]
MASK_WORDS = (
    "causal bigbird strided per_head ( ) [ ] , & | ~ = () window= seed= global_tokens True None lambda **".split()
)
CONSTRUCTORS = [
    *(("causal", 0), ("sliding_window", 1), ("sliding_window", 2), ("dilated_window", 2), ("global_tokens", 1)),
    *(("longformer", 2), ("bigbird", 5), ("strided", 1), ("fixed", 2), ("prefix_lm", 1), ("document", 1)),
    *(("padding", 1), ("a_shape", 2), ("vertical_slash", 2), ("block_sparse", 2), ("from_tensor", 1)),
    *(("sliding_tile", 3), ("sliding_tile", 4), ("neighborhood", 2), ("neighborhood", 4), ("radial", 3)),
]
ARGUMENTS = [
    0,
    1,
    2,
    3,
    5,
    9,
    17,
    40,
    -1,
    2**40,
    2**62,
    10**20,
    0.5,
    1.5,
    None,
    True,
    "'x'",
    "[8, 9]",
    "[17]",
    "(0, 3)",
]
ARGUMENTS += ["[]", "{2, 0}", "[[1, 0]]", "[[True]]", "[0.0, 1]", "[[0.0, -1e999]]", "[1] * 2", "[[[1]]]", "-0", "0x9"]
SCHEMES = ["0x487f", "00 11111 0", "0x4d", "0101010"]
COMPILATION_TARGETS = [
    "llvm",
    "llvm -mcpu=x86-64 -num-cores=2",
    "cuda -arch=sm_90a",
    '{"kind": "cuda", "arch": "sm_80", "max_threads_per_block": 1024}',
]
STEPS = (Step("add", "row"), Step("gelu"), Step("scale", value=0.1))
PROBLEMS = [
    PROBLEM,
    RowProblem(3, 8, "float16", STEPS, Norm("rms_norm", 1e-6, bias=False), keeps_sum=True),
    GemmProblem(3, 8, "bfloat16", STEPS, k=16, w_layout="kn"),
    AttentionProblem(
        1, 2, 2, 8, 8, 16, 16, "float16", 0.25, layouts=Layouts("bshd", View(999, 1, 0, 16, 96), out="bshd")
    ),
]


@functools.cache
def log_files() -> dict[str, bytes]:
    """The files of a log: three workloads, times and a failure of two GPUs, a schedule of MetaSchedule's kind."""
    with tempfile.TemporaryDirectory() as folder:
        log = TuningLog(folder, TARGET)
        for number in range(3):
            log.add(WORKLOAD, trace(number), 12.5 - number, GPU)
            log.add(WORKLOAD, trace(number), 20.0 + number, A100)
        log.add(WORKLOAD, trace(3), "it hung", GPU)
        log.add(OTHER, trace(0, OTHER), 7.0, A100)
        plain = primfunc_workload(WORKLOAD["main"].without_attr("stof.problem"))
        schedule = Schedule(plain)
        schedule.parallel(schedule.get_loops(schedule.get_sblock("out"))[0])
        log.add(plain, schedule.trace, 5.0, GPU)
        for gpu, scheme in ((GPU, "0x4f"), (A100, "0x4d")):
            log.save_scheme("0123456789abcdef", scheme, 99.5, gpu, "2026-01-31")
        return {path.name: path.read_bytes() for path in log.folder.iterdir() if path.name != ".lock"}


@functools.cache
def engine_file() -> bytes:
    """A saved engine whose code is none."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.stof")
        save_artifact(
            path,
            target=HOST,
            device="cpu",
            masks=["7631d84dc8c206cb"],
            memory=[1024, 0],
            weights=WEIGHTS,
            signature=json.dumps(SIGNATURE),
            report=REPORT,
            export_library=lambda library: Path(library).write_bytes(LIBRARY),
            mask_kernels=mask_kernels(),
        )
        return path.read_bytes()


def mask_kernels() -> list[dict]:
    """What a saved engine says of a kernel whose mask may be replaced; its one array is the last of `WEIGHTS`."""
    problem, target = AttentionProblem(1, 2, 2, 24, 24, 8, 8, "float32", 0.5), parse_target(HOST)
    site = AttentionSite("layer", "top-left", np.tri(24, dtype=bool)[None, None], (1, 2, 24, 24))
    config = row_wise.configs(problem, target)[0]
    return MaskArrays([ReplaceableMask(site, row_wise, problem, config, 0, 1)], target).to_json()
