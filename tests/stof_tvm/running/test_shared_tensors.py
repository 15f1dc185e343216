"""Weights that are held once."""

import gc

import torch

from stof_tvm.running.cuda_program import CudaProgram
from stof_tvm.running.shared_tensors import SharedTensors, on_device

META = torch.device("meta")  # a copy to it costs nothing and is another tensor


def test_equal_content_is_one_tensor():
    store, first = SharedTensors(), torch.arange(40000.0)
    later = first.clone()
    later[-1] = 0  # beyond what the checksum reads
    others = [later, first.view(200, 200).clone(), first.view(torch.int32).clone(), first[:-1].clone()]
    assert store.shared([first])[0] is first
    assert store.shared([first.clone(), *others])[0] is first
    assert all(x is y for x, y in zip(store.shared([x.clone() for x in others]), others))
    nan = torch.tensor([torch.nan, -0.0])
    assert store.shared([nan])[0] is nan and store.shared([nan.clone()])[0] is nan
    zero = torch.tensor([torch.nan, 0.0])
    assert store.shared([zero])[0] is zero


def test_what_nobody_holds_is_forgotten():
    store = SharedTensors()
    store.shared([torch.ones(3)])
    gc.collect()
    later = torch.ones(3)
    assert store.shared([later])[0] is later
    assert len(store._known) == 1


def test_a_device_has_one_copy_while_somebody_holds_it():
    weight = torch.ones(3)
    copy = on_device(weight, META)
    assert copy.device == META and on_device(weight, META) is copy
    assert on_device(weight, torch.device("cpu")) is weight
    assert on_device(weight.clone(), META) is not copy


def test_programs_share_the_copies_of_a_weight():
    weight = torch.ones(3)
    programs = [CudaProgram(lambda: None, [], META, weights=[weight, torch.zeros(2)]) for _ in range(2)]
    (first, _), (second, _) = (program._weights for program in programs)
    assert first is second
