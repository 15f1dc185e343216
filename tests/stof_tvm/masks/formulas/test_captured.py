"""What a function reads is part of its identity: whatever changes, by whatever way, is seen."""

import functools
import threading
import types
from collections import deque

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from stof_tvm import masks
from stof_tvm.masks.formulas.captured import device_of, identity_of

GLOBAL = torch.arange(10)
SETTINGS = types.ModuleType("settings")
SETTINGS.width = 5


class Config:
    shared = 3

    def __init__(self):
        self.ids, self.unread = torch.arange(10), torch.arange(10)

    def limit(self):
        return self.shared

    def mod(self, b, h, q, k):
        return (self.ids[q] == self.ids[k]) & (q - k < self.limit())

    def inner(self):
        return lambda b, h, q, k: self.ids[q] == self.ids[k]


class Callable:
    def __init__(self):
        self.ids = torch.arange(10)

    def __call__(self, b, h, q, k):
        return self.ids[q] == self.ids[k]


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("ids", torch.arange(10))
        self.large = torch.nn.Linear(2, 2)

    def mod(self, b, h, q, k):
        return self.ids[q] == self.ids[k]


def reader(value):
    return lambda b, h, q, k: value[q] == value[k]


def rebound():
    value = torch.arange(10)

    def mod(b, h, q, k):
        return value[q] == value[k]

    def change():
        nonlocal value
        value = value + 1

    return mod, change


def in_closure(value, change):
    return reader(value), lambda: change(value)


def with_default():
    def mod(b, h, q, k, ids=GLOBAL.clone()):  # noqa: B008
        return ids[q] == ids[k]

    return mod, lambda: mod.__defaults__[0].add_(1)


def with_attribute():
    def mod(b, h, q, k):
        return mod.ids[q] == mod.ids[k]

    mod.ids = torch.arange(10)
    return mod, lambda: setattr(mod, "ids", torch.zeros(10))


def of_object(kind, change):
    made = kind()
    return (made if kind is Callable else made.mod), lambda: change(made)


def composed():
    ids = torch.arange(10)
    return and_masks(reader(ids), reader(torch.ones(10))), lambda: ids.add_(1)


def partial():
    ids = torch.arange(10)
    return functools.partial(lambda t, b, h, q, k: t[q] == t[k], ids), lambda: ids.add_(1)


def of_global(name, value):
    mods = {"GLOBAL": lambda b, h, q, k: GLOBAL[q] == GLOBAL[k], "SETTINGS": lambda b, h, q, k: q - k < SETTINGS.width}
    return mods[name], value


def bump(x):
    x += 1


CHANGES = {
    "in place": lambda: in_closure(torch.arange(10), lambda x: x.add_(1)),
    "in place, uncounted": lambda: in_closure(torch.arange(10), lambda x: bump(x.numpy())),
    "a view's base": lambda: (lambda x: (reader(x[::2]), lambda: x.add_(1)))(torch.arange(20)),
    "assigned anew": rebound,
    "bfloat16": lambda: in_closure(torch.ones(10, dtype=torch.bfloat16), lambda x: x.mul_(2)),
    "an expanded view's base": lambda: (lambda x: (reader(x.expand(10)), lambda: x.add_(1)))(torch.ones(1)),
    "array": lambda: in_closure(np.arange(10), bump),
    "list": lambda: in_closure([torch.arange(3)], lambda x: x.append(1)),
    "dict of tensors": lambda: in_closure({1: torch.arange(3)}, lambda x: x[1].add_(1)),
    "deque": lambda: in_closure(deque([1, 2]), lambda x: x.append(3)),
    "default argument": with_default,
    "attribute of the function": with_attribute,
    "object": lambda: of_object(Callable, lambda x: x.ids.add_(1)),
    "method": lambda: of_object(Config, lambda x: setattr(x, "ids", torch.zeros(10))),
    "attribute of a class": lambda: of_object(Config, lambda _: setattr(Config, "shared", Config.shared + 1)),
    "buffer": lambda: of_object(Layer, lambda x: x.ids.add_(1)),
    "composed": composed,
    "partial": partial,
    "global": lambda: of_global("GLOBAL", lambda: GLOBAL.add_(1)),
    "a module's": lambda: of_global("SETTINGS", lambda: setattr(SETTINGS, "width", SETTINGS.width + 1)),
}


@pytest.mark.parametrize("way", CHANGES)
def test_a_change_is_seen(way):
    mod, change = CHANGES[way]()
    mask = masks.from_mask_mod(mod)
    before, of_mask = identity_of(mod), mask.identity
    composed = (mask & masks.causal() | ~mask).identity
    assert identity_of(mod) == before and mask.identity == of_mask
    change()
    assert identity_of(mod) != before and mask.identity != of_mask
    assert (mask & masks.causal() | ~mask).identity != composed


def test_equal_contents_are_equal():
    first, second = reader(torch.arange(9)), reader(torch.arange(9))
    assert identity_of(first) == identity_of(second)
    assert identity_of(first) != identity_of(reader(torch.arange(9).int()))
    assert masks.from_mask_mod(first, batch=2) == masks.from_mask_mod(second, batch=2)
    assert identity_of(lambda b, h, q, k: q >= k) != identity_of(lambda b, h, q, k: q > k)


def test_only_what_is_named_is_read():
    """A method, or an inner function that captured self, does not read all of a model."""
    config, layer = Config(), Layer()
    for function, unread in (
        (config.mod, config.unread),
        (config.inner(), config.unread),
        (layer.mod, layer.large.weight.data),
    ):
        before = identity_of(function)
        unread.add_(1)
        assert identity_of(function) == before


def test_identities_keep_no_contents_but_what_has_none():
    lock, ids = threading.Lock(), torch.arange(10)
    identity = identity_of(lambda b, h, q, k: (ids[q] == 0, lock))
    assert identity.held == (lock,)


def test_device():
    assert device_of(reader(torch.arange(3))) == "cpu" == device_of(lambda b, h, q, k: q >= k)
    assert device_of(reader(torch.empty(3, device="meta"))) == "meta"
