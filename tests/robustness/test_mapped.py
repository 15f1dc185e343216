"""What loading an engine takes: its file, mapped once."""

import gc
from pathlib import Path

import pytest
import torch

import stof_tvm
from tests.models.quick_llvm import QUICK_LLVM
from tests.robustness.test_sharing import GROWTH, resident

ROWS, WIDTH = 8000, 1024  # 33 MB
SLACK = 8 << 20


class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, WIDTH)

    def forward(self, ids):
        return self.table(ids)


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    path, ids = tmp_path_factory.mktemp("mapped") / "table.stof", torch.arange(ROWS).reshape(1, -1)
    model = Table().eval()
    stof_tvm.build(model, QUICK_LLVM, (ids,), tuning_logs=False, verify=False).save(path)
    stof_tvm.load(path)  # what the first load of a process takes beside its file
    return path, ids[:, :], model(ids).detach()


def peak_of(work) -> int:
    """Bytes that the process took most at a time beyond what it has now."""
    before = resident()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    work()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024 - before


def test_loading_takes_no_more_than_the_file(case):
    path, ids, expected = case
    size, engines = path.stat().st_size, []
    assert size > 30e6
    assert peak_of(lambda: engines.append(stof_tvm.load(path))) < 1.2 * size
    assert torch.equal(engines[0](ids), expected)


def test_calling_reads_the_file_where_it_is(case):
    """Beside the output, which is as large as the table here."""
    path, ids, expected = case
    engine = stof_tvm.load(path)
    assert peak_of(lambda: engine(ids)) < 1.2 * path.stat().st_size + expected.nbytes + SLACK


def test_an_engine_that_is_gone_gives_all_back(case):
    path, ids, _ = case
    stof_tvm.load(path)(ids)
    before = resident()
    for _ in range(3):
        stof_tvm.load(path)(ids)
        gc.collect()
    assert resident() - before < 2 * GROWTH
