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


def test_the_beginning_of_a_tensor_is_a_view_of_it():
    store, table = SharedTensors(with_parts=True), torch.arange(40000.0).view(400, 100)
    rows, other = table[:300].clone()[None], table[:300].clone()
    other[-1, -1] = 0
    assert store.shared([table])[0] is table
    part, same, unlike, short = store.shared([rows, rows[0], other, table[:10].clone()])
    assert part.data_ptr() == same.data_ptr() == table.data_ptr() and part.shape == (1, 300, 100)
    assert torch.equal(part, rows) and torch.equal(same, rows[0])
    assert unlike is other and short.data_ptr() != table.data_ptr(), "too small to look for"
    assert store.shared([rows.clone()])[0] is part
    (longer,) = store.shared([torch.cat([table, table])])
    assert longer.data_ptr() != table.data_ptr() and store.shared([table[:200].clone()])[0].shape == (200, 100)
    without = SharedTensors()
    assert without.shared([table, rows])[1] is rows


def test_the_copy_of_a_part_is_a_view_of_the_copy_of_the_whole():
    store, table = SharedTensors(with_parts=True), torch.arange(40000.0).view(400, 100)
    part = store.shared([table, table[:300].clone()])[1]
    del table
    gc.collect()
    copies = [on_device(part, META) for _ in range(2)]
    assert copies[0].shape == part.shape and copies[0].untyped_storage().nbytes() == 160000
    assert copies[0].untyped_storage()._cdata == copies[1].untyped_storage()._cdata


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
