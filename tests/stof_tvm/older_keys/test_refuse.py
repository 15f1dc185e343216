"""A mask for keys of an input with new ones behind: its rows would be counted from 0, and queries are later tokens."""

import pytest
import torch
from torch import nn
from torch.export import Dim

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import MaskError, UnsupportedError
from tests.models.quick_llvm import QUICK_LLVM

BATCH, HEADS, PAST, SIZE, WIDTH = 2, 2, 6, 8, 16
WINDOW = masks.sliding_window(3, causal=True)
SDPA = nn.functional.scaled_dot_product_attention
REASON = "attention 'layer' puts new keys to those of an input.*rows of .* counted from 0"


def split(x):
    return x.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)


def behind(past, new):
    return torch.cat([past, new], 2)


def transposed(past, new):
    return torch.cat([past.mT, new.mT], 3).mT


def heads_last(past, new):
    return torch.cat([past.transpose(1, 2), new.transpose(1, 2)], 1).transpose(1, 2)


def flat(past, new):
    joined = torch.cat([past.flatten(0, 1), new.flatten(0, 1)], 1)
    return joined.unflatten(0, (BATCH, HEADS))


def through_features(past, new):
    """Heads and their sizes as one dimension, while keys are put together and for a view more."""
    joined = torch.cat([past.transpose(1, 2).flatten(2), new.transpose(1, 2).flatten(2)], 1)
    return split(joined.contiguous())


def rolled(past, new):
    """The oldest key goes, and there is one more key than in `past` all the same."""
    return torch.cat([past[:, :, :1], past[:, :, 1:], new], 2)


def in_two_steps(past, new):
    return torch.cat([torch.cat([past[:, :, :4], past[:, :, 4:]], 2), new], 2)


def rotated(past, new):
    """Positions are told to all keys, as some models do it."""
    x = torch.cat([past, new], 2)
    angles = torch.arange(x.shape[2])[:, None] * torch.arange(1, SIZE // 2 + 1)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    half = torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1)
    return x * cos + half * sin


def written(past, new):
    """A new tensor as long as both, without a concatenation."""
    return nn.functional.pad(past, (0, 0, 0, 1)).index_copy(2, torch.tensor([PAST]), new)


def assigned(past, new):
    keys = new.new_zeros(BATCH, HEADS, PAST + 1, SIZE)
    keys[:, :, :PAST] = past
    keys[:, :, PAST:] = new
    return keys


def summed(past, new):
    return nn.functional.pad(past, (0, 0, 0, 1)) + nn.functional.pad(new, (0, 0, PAST, 0))


def one_hot(past, new):
    is_new = (torch.arange(PAST + 1) == PAST)[:, None].float()
    return nn.functional.pad(past, (0, 0, 0, 1)) * (1 - is_new) + is_new * new


WAYS = [behind, transposed, heads_last, flat, through_features, rolled, in_two_steps, rotated, written, assigned]
WAYS += [summed, one_hot]


class Attention(nn.Module):
    def __init__(self, join=behind):
        super().__init__()
        self.q, self.k, self.v, self.join = *(nn.Linear(WIDTH, WIDTH) for _ in range(3)), join

    def forward(self, x, past_keys, past_values):
        q, k, v = (split(part(x)) for part in (self.q, self.k, self.v))
        keys, values = self.join(past_keys, k), self.join(past_values, v)
        return SDPA(q, keys, values).transpose(1, 2).flatten(2), keys, values


class Model(nn.Module):
    def __init__(self, join=behind):
        super().__init__()
        self.layer = Attention(join)

    def forward(self, x, past_keys, past_values):
        return self.layer(x, past_keys, past_values)


def inputs(new=1, past=PAST):
    generator = torch.Generator().manual_seed(0)
    random = lambda *shape: torch.randn(*shape, generator=generator)
    return random(BATCH, new, WIDTH), *(random(BATCH, HEADS, past, SIZE) for _ in range(2))


def built(model, example, mask=WINDOW, **more):
    return stof_tvm.build(model.eval(), QUICK_LLVM, example, mask, **more)


@pytest.mark.parametrize("join", WAYS, ids=lambda join: join.__name__)
def test_a_cache_that_grows_is_refused(join):
    with pytest.raises(MaskError, match=REASON) as error:
        built(Model(join), inputs())
    assert "1 × 7" in str(error.value) and "sliding_window(3, causal=True)" in str(error.value)


def by_softmax(q, k, v):
    return torch.softmax(q @ k.mT / SIZE**0.5, -1) @ v


def by_einsum(q, k, v):
    return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)


def grouped(q, k, v):
    return SDPA(q, k[:, :1], v[:, :1], enable_gqa=True)


@pytest.mark.parametrize("attend", [by_softmax, by_einsum, grouped], ids=lambda attend: attend.__name__)
def test_however_the_attention_is_written(attend):
    class Spelled(Attention):
        def forward(self, x, past_keys, past_values):
            q, k, v = (split(part(x)) for part in (self.q, self.k, self.v))
            return attend(q, behind(past_keys, k), behind(past_values, v))

    with pytest.raises(MaskError, match="rows of .* counted from 0"):
        built(Spelled(), inputs())


def test_a_position_that_is_an_input():
    """A cache of a fixed length that is returned, not updated: where the new key goes is known at run time."""

    class Functional(Attention):
        def forward(self, x, past_keys, past_values, at):
            q, k, v = (split(part(x)) for part in (self.q, self.k, self.v))
            is_new = (torch.arange(PAST) == at)[:, None]
            keys, values = torch.where(is_new, k, past_keys), past_values * ~is_new + v * is_new
            return SDPA(q, keys, values), keys, values

    example = *inputs(), torch.tensor([4])
    with pytest.raises(MaskError, match="rows of .* counted from 0"):
        built(Functional(), example)
    built(Functional(), example, torch.arange(PAST)[None] > 1)


def test_by_path_alone_where_it_has_a_mask():
    class Two(Model):
        def forward(self, x, past_keys, past_values):
            x, *_ = self.layer(x, past_keys, past_values)
            return SDPA(*[split(x)] * 3)

    with pytest.raises(MaskError, match=REASON):
        built(Two(), inputs(), {"layer": WINDOW})
    built(Two(), inputs(), {"": WINDOW})


def test_layers_behind_one_another_with_one_input_for_all():
    """The past of the second layer has nothing of its own: the first layer's attention has read the same input."""

    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.layer = Attention(), Attention()

        def forward(self, x, past):
            x, *_ = self.first(x, past[0, 0], past[0, 1])
            return self.layer(x, past[1, 0], past[1, 1])

    x, keys, _ = inputs()
    with pytest.raises(MaskError, match=REASON):
        built(Stacked(), (x, keys.expand(2, 2, *keys.shape).clone()), {"layer": WINDOW})


def test_states_that_are_projected_again():
    """A memory of hidden states before those of the call, as in Transformer-XL."""

    class Memory(Attention):
        def forward(self, x, memory):
            both = torch.cat([memory, x], 1)
            return SDPA(split(self.q(x)), split(self.k(both)), split(self.v(both)))

    x, *_ = inputs()
    with pytest.raises(MaskError, match="rows of"):
        built(Memory(), (x, torch.randn(BATCH, PAST, WIDTH)))


@pytest.mark.parametrize("dynamic", [None, True])
def test_by_torch_compile(dynamic):
    torch._dynamo.reset()
    model = Model().eval().requires_grad_(False)
    for function in (model, model.forward):
        compiled = torch.compile(function, backend="stof", dynamic=dynamic, options={"mask": WINDOW})
        with pytest.raises(MaskError, match=REASON):
            compiled(*inputs())


@pytest.mark.parametrize("is_buffer", [False, True])
def test_attributes_that_grow(is_buffer):
    class Growing(Attention):
        def __init__(self):
            super().__init__()
            for name in ("keys", "values"):
                empty = torch.zeros(BATCH, HEADS, 0, SIZE)
                self.register_buffer(name, empty) if is_buffer else setattr(self, name, empty)

        def forward(self, x):
            y, self.keys, self.values = super().forward(x, self.keys, self.values)
            return y

    torch._dynamo.reset()
    model = Growing().eval().requires_grad_(False)
    compiled = torch.compile(model, backend="stof", options={"mask": WINDOW})
    assert compiled(inputs(PAST)[0]).shape == (BATCH, PAST, WIDTH)
    with pytest.raises(MaskError, match="puts new keys to those of an input.*rows of .* counted from 0"):
        compiled(inputs()[0])


@pytest.mark.parametrize("lazy", [False, True])
def test_ranges(lazy):
    past = {2: Dim("past", max=8)}
    dynamic = {"x": None, "past_keys": past, "past_values": past}
    with pytest.raises(MaskError, match="counted from 0"):
        engine = built(Model(), inputs(), dynamic_shapes=dynamic, lazy=lazy)
        engine(*inputs())


def test_masks_that_come_later():
    with pytest.raises(UnsupportedError, match=r"attention 'layer' .* no mask can be given to it later"):
        built(Model(), inputs(), None, replaceable_masks=True)


def keep_of(mask, new=1, past=PAST):
    return mask.dense(past + new)[past:]


class Reference(Model):
    """The model with a mask of new tokens' rows."""

    def __init__(self, model, keep):
        super().__init__()
        self.layer, self.keep = model.layer, keep

    def forward(self, x, past_keys, past_values):
        q, k, v = (split(part(x)) for part in (self.layer.q, self.layer.k, self.layer.v))
        keys, values = torch.cat([past_keys, k], 2), torch.cat([past_values, v], 2)
        return SDPA(q, keys, values, attn_mask=self.keep).transpose(1, 2).flatten(2)


ALIKE = {
    "tensor": (keep_of(WINDOW), keep_of(WINDOW)),
    "columns": (torch.arange(PAST + 1)[None] > 2, torch.arange(PAST + 1)[None] > 2),
    "bottom-right": (masks.causal(align="bottom-right"), torch.ones(1, PAST + 1, dtype=torch.bool)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_masks_that_mean_one_thing_only_are_applied(name):
    mask, keep = ALIKE[name]
    model = Model().eval()
    engine = built(model, inputs(), mask)
    with torch.no_grad():
        expected = Reference(model, keep)(*inputs())
    torch.testing.assert_close(engine(*inputs())[0], expected, atol=1e-5, rtol=1e-5)


def test_without_a_mask_and_with_as_many_queries_as_keys():
    built(Model(), inputs(), None)
    x, *_ = inputs(PAST)

    class Prompt(Attention):
        def forward(self, x):
            empty = torch.zeros(BATCH, HEADS, 0, SIZE)
            return super().forward(x, empty, empty)

    built(Prompt(), x)


class Prefix(Attention):
    """Learned keys before those of all tokens: S × (P + S)."""

    def __init__(self):
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(1, HEADS, 3, SIZE))

    def forward(self, x):
        q, k, v = (split(part(x)) for part in (self.q, self.k, self.v))
        k, v = (torch.cat([self.prefix.expand(BATCH, -1, -1, -1), y], 2) for y in (k, v))
        return SDPA(q, k, v)


class Cross(Attention):
    """Keys of another input; `and_more` is a second one, whose rows stand behind."""

    def forward(self, x, memory, and_more):
        memory = torch.cat([memory, and_more], 1)
        return SDPA(*(split(y) for y in (self.q(x), self.k(memory), self.v(memory))))


class Trailing(Attention):
    """Keys of another input behind a token's own: rows and columns of tokens count alike."""

    def forward(self, x, memory):
        both = torch.cat([x, memory], 1)
        return SDPA(split(self.q(x)), split(self.k(both)), split(self.v(both)))


class Features(Attention):
    """Keys of another input, parts of whose features come from the queries' tokens."""

    def forward(self, x, memory):
        told = torch.cat([self.k(memory)[..., : WIDTH // 2], x.mean(1, True).expand_as(memory)[..., WIDTH // 2 :]], -1)
        return SDPA(split(self.q(x)), split(told), split(self.v(memory)))


class Latents(Attention):
    """Learned queries that look at an input's tokens and at themselves, as in a Perceiver, twice."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 4, WIDTH))

    def forward(self, x):
        y = self.latents.expand(BATCH, -1, -1)
        for _ in range(2):
            both = torch.cat([x, y], 1)
            y = y + SDPA(split(self.q(y)), split(self.k(both)), split(self.v(both))).transpose(1, 2).flatten(2)
        return y


@pytest.mark.parametrize(
    ("kind", "lengths"), [(Prefix, [4]), (Cross, [4, 3, 5]), (Trailing, [4, 5]), (Features, [4, 7])]
)
def test_rectangles_that_are_meant(kind, lengths):
    mask = masks.sliding_window(3)
    engine = built(kind(), tuple(torch.randn(BATCH, n, WIDTH) for n in lengths), mask)
    assert engine.report().sites[0].mask == repr(mask)


def test_learned_queries():
    assert len(built(Latents(), torch.randn(BATCH, 5, WIDTH), masks.sliding_window(3)).report().sites) == 2
