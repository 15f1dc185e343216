"""Boxes of two ranks: where they lie, how long, and when there are none.  Two GPUs are not needed: memory is faked."""

import contextlib
import gc
import socket

import pytest
import torch
import tvm
import tvm_ffi

from stof_tvm.parallel import mailboxes
from stof_tvm.parallel.mailboxes import PeerMemory, why_no_mailboxes


class FakePeers:
    """Two ranks, of which this is one."""

    rank, seconds, group = 1, 12.0, None

    def __init__(self, said=()):
        self.count, self.begun, self.said = 2, 0, list(said)

    def begin(self):
        self.begun += 1

    def answering(self, name):
        return contextlib.nullcontext()


class FakeHandle:
    """Memory of both ranks on the CPU."""

    def __init__(self, nbytes: int):
        self.memory = torch.zeros(2, nbytes, dtype=torch.uint8)
        self.waits = []

    def get_buffer(self, rank, shape, dtype, offset):
        return self.memory[rank].view(dtype)[offset:][: torch.Size(shape).numel()].view(shape)

    def barrier(self, channel, timeout_ms):
        self.waits.append(timeout_ms)


@pytest.fixture
def handles(monkeypatch) -> list[FakeHandle]:
    """The handles of what is allocated."""
    made: list[FakeHandle] = []

    def symmetric(nbytes, group):
        made.append(FakeHandle(nbytes))
        return made[-1].memory, made[-1]

    monkeypatch.setattr(mailboxes, "_symmetric", symmetric)
    return made


def function(name: str):
    return tvm_ffi.get_global_func(name)


def test_boxes_are_apart_and_hold_what_is_sent(handles):
    memory = PeerMemory(FakePeers())
    names = memory.boxes(2, 1000)
    assert handles == []  # not before the first call
    first, second = (torch.full((3, 5), value, dtype=torch.bfloat16) for value in (1.5, 2.5))
    for number, x in enumerate((first, second)):
        function(names.send)(tvm_ffi.from_dlpack(x), number)
    (handle,) = handles
    assert handle.memory.shape == (2, 2048)  # each begins at a multiple of 256 bytes
    assert handle.waits == [12000, 12000]
    there = function(names.outbox)
    for number, x in enumerate((first, second)):
        assert torch.equal(torch.from_dlpack(there(number, (3, 5), "bfloat16")), x)
    handle.memory[1] = handle.memory[0]
    received = torch.empty(3, 5, dtype=torch.bfloat16)
    function(names.receive)(tvm_ffi.from_dlpack(received), 1)
    assert torch.equal(received, second)
    here = function(names.inbox)
    assert torch.equal(torch.from_dlpack(here(0, (15,), "bfloat16")), first.view(-1))
    assert here(0, (15,), "bfloat16").data_ptr() == handle.memory[1].data_ptr()


def test_every_wait_is_counted_as_an_exchange(handles):
    memory = PeerMemory(peers := FakePeers())
    names = memory.boxes(1, 8)
    function(names.arrive)()
    function(names.send)(tvm_ffi.from_dlpack(torch.zeros(2)), 0)
    assert peers.begun == 2 and handles[0].waits == [12000] * 2


def test_boxes_go_with_their_owner(handles):
    memory = PeerMemory(FakePeers())
    names = memory.boxes(1, 8)
    function(names.arrive)()
    del memory
    gc.collect()
    assert all(tvm.get_global_func(name, allow_missing=True) is None for name in names)


def test_boxes_of_two_programs_have_functions_of_their_own(handles):
    memory = PeerMemory(FakePeers())
    assert not {*memory.boxes(1, 8)} & {*memory.boxes(1, 8)}


@pytest.fixture
def gpus(monkeypatch, handles):
    """Two ranks with a GPU each, which say what they are given to say."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(mailboxes, "_said_by_all", lambda peers, value: [peers.said.pop(0), value])


@pytest.mark.parametrize(
    ("said", "reason"), [((None, ""), ""), (("elsewhere", ""), "two hosts"), ((None, "no way"), "no way")]
)
def test_ranks_agree_whether_there_are_boxes(said, reason, gpus):
    peers = FakePeers([socket.gethostname() if x is None else x for x in said])
    assert reason in why_no_mailboxes(peers) and bool(reason) == bool(why_no_mailboxes(peers))


def test_memory_that_cannot_be_shared_is_the_reason(gpus, monkeypatch):
    def failing(nbytes, group):
        raise RuntimeError("peer access\nis not supported")

    monkeypatch.setattr(mailboxes, "_symmetric", failing)
    peers = FakePeers([socket.gethostname(), ""])
    assert why_no_mailboxes(peers) == "RuntimeError: peer access is not supported"


def test_other_numbers_of_ranks_and_cpus_have_none(monkeypatch):
    three = FakePeers()
    three.count = 3
    assert why_no_mailboxes(three) == "there are 3 ranks"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert why_no_mailboxes(FakePeers()) == "there is no GPU"
