"""A workload and traces for tests of logs; as a program, adds records to a log beside other processes."""

import sys

from stof_tvm.tuning.logs.log import TuningLog
from tir_kernels.fusion.problem import RowProblem, Step
from tir_kernels.target import parse_target
from tir_kernels.tuning.template_space import fusion_spaces, trace_for
from tir_kernels.tuning.workload import fusion_workload

TARGET = parse_target("cuda -arch=sm_80")
GPU = "NVIDIA H200"
PROBLEM = RowProblem(64, 64, "float16", (Step("gelu"),))
WORKLOAD = fusion_workload(PROBLEM)
OTHER = fusion_workload(RowProblem(32, 64, "float16", (Step("gelu"),)))
(SPACE,) = fusion_spaces(PROBLEM, TARGET)


def trace(number: int = 0, workload=WORKLOAD):
    return trace_for(workload, SPACE, SPACE.configs[number])


if __name__ == "__main__":
    log = TuningLog(sys.argv[1], TARGET)
    for i in range(int(sys.argv[3])):
        log.add(fusion_workload(RowProblem(8 * (i + 1), 64, "float16")), trace(), 1.0 + i, sys.argv[2])
