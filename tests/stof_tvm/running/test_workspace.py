"""Memory that several programs compute in."""

import torch

from stof_tvm.running.cuda_program import CudaProgram
from stof_tvm.running.workspace import Workspace

CPU = torch.device("cpu")


def blocks_of(sizes, workspace) -> list[torch.Tensor]:
    return CudaProgram(lambda: None, sizes, CPU, workspace=workspace)._blocks


def test_programs_have_their_blocks_in_the_same_memory():
    workspace = Workspace()
    workspace.reserve([100, 300])
    workspace.reserve([1000])
    small, large = blocks_of([100, 300], workspace), blocks_of([1000], workspace)
    assert [len(block) for block in small] == [100, 300] and [len(block) for block in large] == [1000]
    assert small[0].data_ptr() == large[0].data_ptr()
    assert small[1].data_ptr() == small[0].data_ptr() + 256
    assert small[0].untyped_storage().nbytes() == 1024


def test_a_program_that_came_too_late_has_its_own():
    workspace = Workspace()
    first = blocks_of([100], workspace)
    late = blocks_of([5000], workspace)
    assert first[0].data_ptr() != late[0].data_ptr() and len(late[0]) == 5000


def test_without_one_a_program_has_its_own():
    assert blocks_of([100], None)[0].data_ptr() != blocks_of([100], None)[0].data_ptr()
