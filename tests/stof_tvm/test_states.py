"""Engines of models that update buffers or inputs: right as PyTorch is, in place where they can be, kept and saved."""

import threading

import pytest
import torch
from torch import nn

import stof_tvm
from stof_tvm import masks
from stof_tvm.engine import Engine
from stof_tvm.errors import ExportError, InputError, UnsupportedError

BATCH, HEADS, KV_HEADS, LENGTH, SIZE = 2, 4, 2, 32, 16
WIDTH = HEADS * SIZE


class Decoder(nn.Module):
    """One attention over a cache that grows by the tokens of each call; `write` says how it is written."""

    def __init__(self, write="index_copy"):
        super().__init__()
        self.write = write
        self.q, self.kv = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * KV_HEADS * SIZE)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(BATCH, KV_HEADS, LENGTH, SIZE))
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        tokens = x.shape[1]
        at = torch.arange(tokens) + self.position
        q = self.q(x).view(BATCH, tokens, HEADS, SIZE).transpose(1, 2)
        k, v = self.kv(x).view(BATCH, tokens, 2, KV_HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0)
        for cache, new in ((self.keys, k), (self.values, v)):
            if self.write == "index_copy":
                cache.index_copy_(2, at, new)
            elif self.write == "index":
                cache[:, :, at] = new
            elif self.write == "view":
                slots = (torch.arange(BATCH * KV_HEADS)[:, None] * LENGTH + at).flatten()
                cache.view(-1, SIZE).index_copy_(0, slots, new.reshape(-1, SIZE))
            else:
                cache[:, :, 3 : 3 + tokens] = new
        self.position.add_(tokens)
        keep = torch.arange(LENGTH)[None] <= at[:, None]
        y = nn.functional.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=keep, enable_gqa=True)
        return y.transpose(1, 2).reshape(BATCH, tokens, WIDTH)


def token(seed=0, count=1):
    return torch.randn(BATCH, count, WIDTH, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    return Decoder().eval()


@pytest.fixture(scope="module")
def saved(decoder, tmp_path_factory):
    path = tmp_path_factory.mktemp("states") / "decoder.stof"
    stof_tvm.build(decoder, "llvm", (token(),)).save(path)
    return path


@pytest.fixture
def engine(saved):
    return stof_tvm.load(saved)


def copied(engine) -> set[str]:
    """The states that are copied after each call."""
    return {state.name for state in engine.signature.states if state.result is not None}


@torch.no_grad()
def test_a_cache_grows_from_call_to_call(decoder):
    """What `build` verified left no trace, in the engine or in the model."""
    engine = stof_tvm.build(decoder, "llvm", (token(),))
    assert engine.report().verification.result == "passed"
    assert not decoder.keys.any() and not engine.state["keys"].any()
    model = Decoder().eval()
    model.load_state_dict(decoder.state_dict())
    for step in range(3):
        torch.testing.assert_close(engine(token(step)), model(token(step)), atol=1e-5, rtol=1e-5)
        assert set(engine.state) == {"keys", "values", "position"}
        for name, tensor in engine.state.items():
            torch.testing.assert_close(tensor, getattr(model, name))
    assert not decoder.keys.any()


@pytest.mark.parametrize("target", ["llvm", "cuda -arch=sm_80"])
@pytest.mark.parametrize("write", ["index_copy", "index", "slice", "view"])
def test_no_cache_is_copied(write, target):
    engine = stof_tvm.build(Decoder(write).eval(), target, (token(),), verify=False)
    assert copied(engine) == {"position"}
    assert "2 updated in place (keys, values); 1 copied after each call (position int64[])" in str(engine.report())


@torch.no_grad()
@pytest.mark.parametrize("write", ["index", "slice", "view"])
def test_other_ways_to_write_a_cache(write):
    model = Decoder(write).eval()
    engine = stof_tvm.build(model, "llvm", (token(0, 3),))
    for step in range(2):
        torch.testing.assert_close(engine(token(step, 3)), model(token(step, 3)), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(engine.state["keys"], model.keys)


def test_a_copy_of_a_state_into_itself():
    def function(self, x):
        self.a.copy_(self.a)
        self.b.mul_(2)
        return x + self.a

    engine = stof_tvm.build(Buffers(function), "llvm", (torch.zeros(1, 4),))
    assert torch.equal(engine(torch.zeros(1, 4)), torch.arange(24.0).view(6, 4))


@torch.no_grad()
def test_a_mask_holds_beside_another_state():
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(HEADS))

        def forward(self, x):
            self.calls.add_(1)
            return nn.functional.scaled_dot_product_attention(x, x, x) * self.calls[0]

    mask, x = masks.sliding_window(2), torch.randn(1, 2, 16, SIZE)
    engine = stof_tvm.build(Counted(), "llvm", (x,), mask)
    engine(x)
    expected = nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask.dense(16))
    torch.testing.assert_close(engine(x), 2 * expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_states_are_set_and_reset(engine, decoder):
    first = engine(token())
    assert engine.state["position"].item() == 1
    engine(token(1))
    engine.state["position"].zero_()
    torch.testing.assert_close(engine(token()), first)
    engine.reset_state()
    assert engine.state["position"].item() == 0 and not engine.state["values"].any()
    with pytest.raises(TypeError):
        engine.state["position"] = torch.ones(())


def test_a_saved_engine_begins_as_it_was_built(engine, saved, tmp_path):
    engine(token())
    engine.save(tmp_path / "again.stof")
    again = stof_tvm.load(tmp_path / "again.stof")
    assert again.state["position"].item() == 0 and engine.state["position"].item() == 1
    assert again.signature == engine.signature
    torch.testing.assert_close(again(token()), stof_tvm.load(saved)(token()))


def test_calls_of_threads_follow_one_another(engine):
    threads = [threading.Thread(target=lambda: [engine(token()) for _ in range(5)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.state["position"].item() == 15


# -- inputs ----------------------------------------------------------------------------------------------------------


class Update(nn.Module):
    """Writes rows of a caller's cache, and returns it."""

    def forward(self, cache, at, rows):
        cache.index_copy_(0, at, rows)
        return cache, cache.sum(-1)


AT, ROWS = torch.tensor([1, 4]), torch.randn(2, 8)


@pytest.fixture(scope="module")
def update():
    return stof_tvm.build(Update(), "llvm", (torch.zeros(6, 8), AT, ROWS))


def test_an_input_is_updated_itself(update):
    cache = torch.randn(6, 8)
    expected = cache.clone()
    version = cache._version
    returned, sums = update(cache, AT, ROWS)
    expected[AT] = ROWS
    torch.testing.assert_close(cache, expected, rtol=0, atol=0)
    torch.testing.assert_close(sums, expected.sum(-1))
    assert returned.data_ptr() == cache.data_ptr() and cache._version > version and not copied(update)


@pytest.mark.parametrize(
    "cache",
    [
        lambda: torch.randn(8, 6).T,
        lambda: torch.randn(6, 16)[:, ::2],
        lambda: torch.randn(49)[1:].view(6, 8),
        lambda: torch.randn(6, 8, requires_grad=True),
        lambda: torch.randn(6, 8, dtype=torch.complex64).conj().imag,
    ],
    ids=["transposed", "strided", "unaligned", "with gradient", "negated"],
)
def test_an_input_of_any_layout_is_updated(update, cache):
    cache = cache()
    expected = cache.detach().clone()
    expected[AT] = ROWS
    update(cache, AT, ROWS)
    torch.testing.assert_close(cache.detach(), expected, rtol=0, atol=0)


def test_inputs_that_meet_in_memory_are_refused(update):
    memory = torch.randn(8, 8)
    with pytest.raises(InputError, match="cache, which the model updates, shares memory with rows: pass a copy"):
        update(memory[:6], AT, memory[4:6])
    update(memory[:6], AT, memory[6:])


def test_an_expanded_input_is_refused(update):
    with pytest.raises(InputError, match="cache, which the model updates, is expanded: its elements share memory"):
        update(torch.zeros(1, 8).expand(6, 8), AT, ROWS)


def test_views_that_are_made_dense_still_meet():
    class Add(nn.Module):
        def forward(self, x, y):
            x.add_(1)
            return x + y

    engine, x = stof_tvm.build(Add(), "llvm", (torch.zeros(4, 4), torch.zeros(4, 4))), torch.zeros(4, 4)
    for y in (x.T, x[:1].expand(4, 4)):
        with pytest.raises(InputError, match="x, which the model updates, shares memory with y"):
            engine(x, y)
    assert not x.any()


def test_a_state_is_no_input_of_its_engine(engine):
    with pytest.raises(InputError, match="x shares memory with the engine's state 'keys'"):
        engine(engine.state["keys"].flatten()[: BATCH * WIDTH].view(BATCH, 1, WIDTH))


def test_first_calls_in_inference_mode(saved):
    engine = stof_tvm.load(saved)
    with torch.inference_mode():
        engine(token())
    engine(token())
    engine.state["keys"].zero_()
    engine.reset_state()
    assert engine.state["position"].item() == 0


@torch.no_grad()
@pytest.mark.parametrize(
    "dtype, write",
    [
        (torch.int64, lambda c, x: c.copy_(x)),
        (torch.float16, lambda c, x: c.copy_(x)),
        (torch.float32, lambda c, x: c.copy_(x[0])),
        (torch.bool, lambda c, x: c.copy_(x.relu())),
        (torch.float32, lambda c, x: c.fill_(x.sum())),
        (torch.int32, lambda c, x: c.__setitem__(slice(None), x.sum())),
    ],
    ids=["int64", "float16", "a row", "bool", "fill", "assigned"],
)
@pytest.mark.parametrize("exported", [False, True])
def test_copies_of_another_dtype_or_shape(dtype, write, exported):
    class Copies(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("c", torch.zeros(6, 6, dtype=dtype))

        def forward(self, x):
            write(self.c, x)
            return self.c * 1000, self.c.sum(0), x * 2

    model, x = Copies(), 5 * torch.randn(6, 6)
    program = torch.export.export(model, (x,), strict=False) if exported else model
    before = str(program.graph) if exported else ""
    engine = stof_tvm.build(program, "llvm", (x,), verify=False)
    for ours, theirs in zip(engine(x), model(x), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(engine.state["c"], model.c)
    assert not exported or str(program.graph) == before


def test_the_last_of_two_writes_stays_and_places_count_from_the_end(update):
    cache = torch.zeros(6, 8)
    update(cache, torch.tensor([2, 2]), ROWS)
    assert torch.equal(cache[2], ROWS[1])

    class Index(nn.Module):
        def forward(self, cache, at, rows):
            cache[at] = rows
            return rows + 1

    engine = stof_tvm.build(Index(), "llvm", (torch.zeros(6, 8), AT, ROWS))
    engine(cache, torch.tensor([-1, 0]), ROWS)
    assert torch.equal(cache[[5, 0]], ROWS) and not copied(engine)


def test_a_place_outside_is_poison(update):
    cache = torch.zeros(6, 8)
    update(cache, torch.tensor([1, 6]), ROWS)
    assert torch.equal(cache[1], ROWS[0]) and cache[5].isnan().all() and not cache[2:5].any()


# -- what must not be written in place -------------------------------------------------------------------------------


class Buffers(nn.Module):
    """Two buffers and a function of them and of an input."""

    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        self.function = function
        self.register_buffer("a", torch.arange(24, dtype=torch.float32).view(6, 4).to(dtype))
        self.register_buffer("b", torch.ones(6, 4).to(dtype))

    def forward(self, x):
        return self.function(self, x)


ONE = torch.tensor([1])


def old_value_is_read(self, x):
    before = self.a * 2
    self.a.index_copy_(0, ONE, x)
    return before + self.a


def old_value_is_returned(self, x):
    before = self.a.clone()
    self.a.index_copy_(0, ONE, x)
    return before


def old_view_is_returned(self, x):
    before = self.a.clone().view(3, 8)
    self.a[1:2] = x
    return before, self.a.view(2, 12)


def buffers_are_swapped(self, x):
    a = self.a.clone()
    self.a.copy_(self.b)
    self.b.copy_(a)
    return self.a + x


def one_takes_the_others_new_value(self, x):
    self.a.index_copy_(0, ONE, x)
    self.b.copy_(self.a * 2)
    return self.b * 1


def rows_move_up(self, x):
    self.a[0:5] = self.a[1:6].clone()
    self.a[5:6] = x
    return self.a.sum()


def two_writes_with_a_read_between(self, x):
    self.a.index_copy_(0, ONE, x)
    between = self.a.sum(0)
    self.a.index_copy_(0, ONE + 1, x * 2)
    return between, self.a.sum(0)


def one_write_reads_the_other(self, x):
    self.a.index_copy_(0, ONE, x)
    self.b.index_copy_(0, ONE, self.a[1:2])
    self.a.index_copy_(0, ONE + 2, self.b[1:2])
    return x + 0


def whole(self, x):
    self.a.mul_(2).add_(x)
    return self.a


def columns(self, x):
    self.a[:, 1] = x[0, 0]
    self.a[:, ::2] += 1
    return x * 1


def mask_of_rows(self, x):
    self.a.masked_fill_(self.a > 10, 0)
    return x * 1


def sums(self, x):
    self.a.index_add_(0, torch.tensor([1, 1]), torch.cat([x, x]))
    return x * 1


FUNCTIONS = [
    old_value_is_read,
    old_value_is_returned,
    old_view_is_returned,
    buffers_are_swapped,
    one_takes_the_others_new_value,
    rows_move_up,
    two_writes_with_a_read_between,
    one_write_reads_the_other,
    whole,
    columns,
    mask_of_rows,
    sums,
]
IN_PLACE = {
    old_value_is_read: {"a"},
    two_writes_with_a_read_between: {"a"},
    one_write_reads_the_other: {"a", "b"},
    one_takes_the_others_new_value: {"a"},
}


@torch.no_grad()
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_update_is_pytorchs(function):
    model, x = Buffers(function).eval(), torch.full((1, 4), 100.0)
    engine = stof_tvm.build(model, "llvm", (x,))
    for _ in range(3):
        ours, theirs = engine(x), model(x)
        for mine, right in zip(*(y if isinstance(y, tuple) else (y,) for y in (ours, theirs)), strict=True):
            torch.testing.assert_close(mine, right)
        for name, tensor in engine.state.items():
            torch.testing.assert_close(tensor, getattr(model, name))
    # Whether a kernel may write in place depends on the order of kernels; what is here must not get worse.
    assert IN_PLACE.get(function, set()) <= set(engine.state) - copied(engine)


def test_what_was_returned_stays_when_the_state_goes_on():
    engine = stof_tvm.build(Buffers(whole).eval(), "llvm", (torch.ones(1, 4),))
    first = engine(torch.ones(1, 4))
    kept = first.clone()
    engine(torch.ones(1, 4))
    assert torch.equal(first, kept)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool])
def test_dtypes_of_states(dtype):
    def write(self, x):
        self.a.index_copy_(0, ONE, x)
        self.b[2:4] = x
        return x

    model, x = Buffers(write, dtype).eval(), torch.tensor([[1, 0, 3, 4]]).to(dtype)
    engine = stof_tvm.build(model, "llvm", (x,))
    engine(x), model(x)
    assert torch.equal(engine.state["a"], model.a) and torch.equal(engine.state["b"], model.b)
    # Booleans are written as int32; on CPUs a reshape in bfloat16 is no view.
    assert copied(engine) == ({"a", "b"} if dtype in (torch.bool, torch.bfloat16) else set())


def test_positions_outside_of_a_cache_in_bfloat16_are_c_plus_plus():
    """TVM writes a constant NaN of that dtype as `nanf`."""
    model = Buffers(lambda self, x: self.a.index_copy_(0, ONE, x).sum(), torch.bfloat16).eval()
    engine = stof_tvm.build(model, "cuda -arch=sm_80", (torch.zeros(1, 4, dtype=torch.bfloat16),), verify=False)
    assert "a" not in copied(engine) and "CUDART_NAN_F" in engine.cuda_source() and "nanf" not in engine.cuda_source()


# -- what is refused -------------------------------------------------------------------------------------------------


def test_a_parameter_that_is_updated_is_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.zeros(4))

        def forward(self, x):
            with torch.no_grad():
                self.p.add_(x)
            return x + self.p

    with pytest.raises(UnsupportedError, match="the model updates its parameter 'p' in forward: make it a buffer"):
        stof_tvm.build(Model(), "llvm", (torch.ones(4),), verify=False)


def test_buffers_that_share_memory_are_refused():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.zeros(8))
            self.register_buffer("part", self.a[2:6])

        def forward(self, x):
            self.a.add_(1)
            return self.part + x

    with pytest.raises(ExportError, match="updates a buffer that shares memory with another"):
        stof_tvm.build(Model(), "llvm", (torch.ones(4),), verify=False)


def test_an_exported_program_with_updates(decoder):
    program = torch.export.export(decoder, (token(),), strict=False)
    before = dict(program.state_dict)
    engine = stof_tvm.build(program, "llvm")
    engine(token())
    assert engine.state["position"].item() == 1 and decoder.position.item() == 0
    assert program.state_dict.keys() == before.keys() and len(program.graph_signature.buffers) == 3


def test_a_buffer_that_is_not_saved_with_the_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(4), persistent=False)
            self.register_buffer("scale", torch.full((4,), 2.0), persistent=False)

        def forward(self, x):
            self.seen.add_(x)
            return self.seen * self.scale

    engine = stof_tvm.build(Model(), "llvm", (torch.ones(4),))
    assert [engine(torch.ones(4))[0].item() for _ in range(3)] == [2, 4, 6]


# -- several engines over the same states ----------------------------------------------------------------------------


@torch.no_grad()
def test_a_prompt_and_tokens_share_a_cache(decoder, engine):
    prompt = stof_tvm.build(decoder, "llvm", (token(0, 5),))
    engine.share_state(prompt)
    model = Decoder().eval()
    model.load_state_dict(decoder.state_dict())
    torch.testing.assert_close(prompt(token(7, 5)), model(token(7, 5)), atol=1e-5, rtol=1e-5)
    for step in range(3):
        torch.testing.assert_close(engine(token(step)), model(token(step)), atol=1e-5, rtol=1e-5)
    assert engine.state["keys"] is prompt.state["keys"] and prompt.state["position"].item() == 8
    prompt.reset_state()
    assert engine.state["position"].item() == 0


def test_engines_of_other_states_share_none(engine, update):
    with pytest.raises(InputError, match="do not have the same states; they differ in keys, position, values"):
        engine.share_state(update)
    with pytest.raises(InputError, match="do not have the same states; they differ in none at all"):
        update.share_state(update)
    with pytest.raises(InputError, match="share_state takes an Engine, got a NoneType"):
        engine.share_state(None)


def test_engines_of_two_gpus_share_no_states(saved, monkeypatch):
    first, second = (stof_tvm.load(saved) for _ in range(2))
    monkeypatch.setattr(Engine, "device", property(lambda engine: torch.device("cuda", engine._index)))
    second._index = 1
    with pytest.raises(InputError, match="share states are on one device, these are on cuda:0, cuda:1"):
        first.share_state(second)


def test_whoever_shares_follows(saved):
    """Engines that were never called, and chains of them."""
    first, second, third = (stof_tvm.load(saved) for _ in range(3))
    first(token())
    first.share_state(second)
    second.share_state(third)
    for engine in (first, third, second, first):
        engine(token())
    assert first.state["position"].item() == third.state["position"].item() == 4


@torch.no_grad()
@pytest.mark.parametrize("order", [(3, 6, 3, 6, 3), (6, 3, 3, 6)])
def test_a_range_where_some_shapes_only_read_a_state(order):
    class Some(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(4))
            self.register_buffer("few", torch.zeros(4))

        def forward(self, x):
            (self.calls if x.shape[0] > 4 else self.few).add_(1)
            return x + self.calls + 10 * self.few

    model, dims = Some().eval(), {"x": {0: torch.export.Dim("n", min=1, max=8)}}
    lazy = stof_tvm.build(model, "llvm", (torch.zeros(order[0], 4),), dynamic_shapes=dims, lazy=True)
    for n in order:
        torch.testing.assert_close(lazy(torch.zeros(n, 4)), model(torch.zeros(n, 4)))
    lazy.reset_state()
    assert not any(x.any() for x in lazy.state.values()) and set(lazy.state) == {"calls", "few"}


@torch.no_grad()
def test_a_range_of_lengths_has_one_cache(decoder):
    tokens = torch.export.Dim("tokens", min=1, max=LENGTH)
    lazy = stof_tvm.build(decoder, "llvm", (token(0, 4),), dynamic_shapes={"x": {1: tokens}}, lazy=True)
    model = Decoder().eval()
    model.load_state_dict(decoder.state_dict())
    for count in (4, 1, 6, 1):
        torch.testing.assert_close(lazy(token(count, count)), model(token(count, count)), atol=1e-5, rtol=1e-5)
    assert lazy.state["position"].item() == 12
    torch.testing.assert_close(lazy.state["values"], model.values)
    lazy.reset_state()
    assert not lazy.state["keys"].any() and lazy.engine_for(token()).state["keys"] is lazy.state["keys"]
