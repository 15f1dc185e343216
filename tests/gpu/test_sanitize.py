"""What the compute-sanitizer run covers, and that it sees what the tool prints; the run itself needs a GPU."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import sanitize  # noqa: E402
from attention_cases import problem  # noqa: E402

from tir_kernels.attention.block_wise import cost as cuda_cost
from tir_kernels.attention.block_wise import kernel as block_wise_cuda  # noqa: E402
from tir_kernels.attention.block_wise.work import plan_work  # noqa: E402
from tir_kernels.cuda.device import H200  # noqa: E402
from tir_kernels.target import parse_target  # noqa: E402

OUTPUT = """========= COMPUTE-SANITIZER
case random b1 h2 150x203
case causal b1 h2 150x150
========= Invalid __global__ read of size 16 bytes
=========     at main_kernel+0x1b30
========= Invalid __global__ read of size 16 bytes
========= ERROR SUMMARY: 2 errors
"""


@pytest.mark.parametrize("arch", sanitize.ARCHES)
def test_every_configuration_that_may_be_chosen_has_a_case_with_split_rows(arch):
    target = parse_target(f"cuda -arch={arch}")
    for dim, _ in sanitize.HEAD_SIZES[:2]:
        configs = set(cuda_cost.shortlist(block_wise_cuda.configs(problem(150, dim=dim), target)))
        split = {
            case.config
            for case in sanitize.cases()
            if case.problem.head_dim == case.problem.v_head_dim == dim
            and case.template is block_wise_cuda
            and (plan_work(case.block_sparse_mask(), case.problem, H200)[0][:, 6] > 1).any()
        }
        assert configs and configs <= split


def test_messages_are_counted_by_case():
    assert sanitize.findings(OUTPUT) == {"causal b1 h2 150x150": ["Invalid __global__ read of size 16 bytes"] * 2}
    assert sanitize.findings(OUTPUT.replace("Invalid", "nothing")) == {}


def test_the_planted_error_is_one_of_heads_that_are_not_there():
    case = next(case for case in sanitize.cases() if case.template is block_wise_cuda)
    heads = plan_work(case.block_sparse_mask(), case.problem, H200)[0][:, sanitize.HEAD_COLUMNS[block_wise_cuda.NAME]]
    assert set(heads) == set(range(case.problem.batch * case.problem.q_heads))


def test_a_text_that_no_case_has(monkeypatch, capsys):
    """A run without a planted error would say that all is clean."""
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "--only", "no such case"])
    with pytest.raises(SystemExit):
        sanitize.main()
    assert "none of the 0 cases with 'no such case' can have an error planted" in capsys.readouterr().err
