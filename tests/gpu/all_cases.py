"""Every CUDA kernel case, of all kernel templates: what the manifest lists, in this order."""

import attention_cases
from float32_cases import float32_cases
from gemm_cases import gemm_cases
from group_cases import group_cases
from grouped_cases import grouped_cases
from mlp_cases import mlp_cases
from reduce_cases import reduce_cases
from row_cases import row_cases
from row_wise_cases import row_wise_cases
from sorting_cases import sorting_cases

CASES = [
    *attention_cases.CASES,
    *row_wise_cases(),
    *gemm_cases(),
    *mlp_cases(),
    *row_cases(),
    *group_cases(),
    *grouped_cases(),
    *sorting_cases(),
    *reduce_cases(),
    *float32_cases(),
]
