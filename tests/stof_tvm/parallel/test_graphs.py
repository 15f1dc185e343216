"""CUDA graphs with a group's collectives are gone before the group is: NCCL would wait for them for ever."""

import gc
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from stof_tvm.engine import Engine
from stof_tvm.parallel import graphs
from stof_tvm.parallel.context.attention import _Call
from stof_tvm.parallel.context.engine import ContextEngine
from stof_tvm.parallel.ranks import Peers
from stof_tvm.running.cuda_program import CudaProgram


class Program(CudaProgram):
    """Says when its graph is dropped, and whether the group was still there."""

    def __init__(self, group, seen: list):
        super().__init__(lambda *given: given[0], [8], torch.device("cpu"))
        self.group, self.seen = group, seen

    def drop_graph(self):
        """Note it."""
        self.seen.append(dist.get_world_size(self.group))
        super().drop_graph()


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    if dist.is_initialized():
        dist.destroy_process_group()


def test_graphs_are_dropped_before_their_group_ends(group):
    seen, other = [], []
    programs = [Program(group, seen), Program(group, seen)]
    for program in (*programs, programs[0], lambda x: x):
        graphs.end_with(group, program)
    part = dist.new_group([0])
    one = Program(part, other)
    graphs.end_with(part, one)
    dist.destroy_process_group(part)
    assert (seen, other) == ([], [1])
    dist.destroy_process_group()
    assert (seen, other) == ([1, 1], [1])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    assert len(seen) == 2, "another group's end is none of theirs"


def test_programs_are_not_kept(group):
    seen = []
    graphs.end_with(group, Program(group, seen))
    gc.collect()
    dist.destroy_process_group()
    assert not seen


@pytest.mark.parametrize("kind", [Engine, ContextEngine])
def test_an_engine_of_ranks_ends_with_its_group(kind, group):
    seen: list = []
    program, peers, engine = Program(group, seen), Peers(group), kind.__new__(kind)
    engine._program, engine._load_program, engine._peers, engine._device_type = None, lambda: program, peers, "cpu"
    engine._row, engine._ranks = SimpleNamespace(prepare=lambda: program), peers
    assert [engine.prepare() for _ in range(2)] == [program, program]
    dist.destroy_process_group()
    assert seen == [1]


def test_a_captured_call_keeps_its_indices(monkeypatch):
    """The graph reads them, whatever the cache of calls drops."""
    from stof_tvm.parallel.context import attention

    kept: set = set()
    monkeypatch.setattr(attention, "_in_graphs", kept)
    monkeypatch.setattr(attention, "attend", lambda *given: ())
    call = _Call.__new__(_Call)
    call.exchange, call.joined, call.own, call.runs = type("No", (), {"is_needed": False}), None, object(), []
    k = torch.zeros(1, 1, 1, 8)
    for captured in (False, True):
        monkeypatch.setattr(attention, "is_captured", lambda device: captured)
        call(k, k, k, None, attention.Options(), None)
        assert kept == ({call} if captured else set())
