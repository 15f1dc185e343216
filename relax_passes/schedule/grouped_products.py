"""Grouped products on CPUs: the kernel of tir_kernels/fusion/grouped/cpu.py in place of their tensor expressions."""

import tvm
from tvm import s_tir

from relax_passes.legalizations.grouped_products import problem_of_function
from relax_passes.schedule.cpu_rules.simd import Simd
from tir_kernels.fusion.grouped.cpu import grouped_product


def schedule_grouped(func: tvm.tirx.PrimFunc, simd: Simd) -> s_tir.Schedule | None:
    """The kernel as a schedule; None for any other function."""
    problem = problem_of_function(func)
    return None if problem is None else s_tir.Schedule(grouped_product(problem, simd.lanes, simd.registers))
