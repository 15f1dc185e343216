"""`torch.compile(backend="stof")`: never without the mask, the parameters as they are, or the gradients."""

import functools

import pytest
import torch
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.nn.functional import scaled_dot_product_attention as sdpa

import stof_tvm
from stof_tvm import masks
from stof_tvm.errors import InputError, MaskError, NotRewrittenError, TargetError, UnsupportedError
from tests.models.quick_llvm import QUICK_LLVM

WIDTH, HEADS = 16, 2
MASK = masks.sliding_window(2)
close = functools.partial(torch.testing.assert_close, atol=2e-5, rtol=2e-5)


def compiled(model, options=None, **kwargs):
    if "mode" not in kwargs:
        options = {"target": QUICK_LLVM, **(options or {})}
    return torch.compile(model, backend="stof", options=options, **kwargs)


class Model(nn.Module):
    """An attention with a mask of its own, of 8 tokens, that keeps all; a number; parameters and buffers."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.ones(WIDTH))
        self.register_buffer("keep", torch.ones(1, 1, 8, 8, dtype=torch.bool))

    def forward(self, x, scale=0.5, mask=None):
        heads = self.project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        if mask is None and x.shape[1] == 8:
            mask = self.keep
        out = sdpa(heads, heads, heads, attn_mask=mask)
        return out.transpose(1, 2).flatten(2) * scale + self.shift


@pytest.fixture(autouse=True)
def forget():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Model().eval()


def tokens(length=8):
    return torch.randn(1, length, WIDTH, generator=torch.Generator().manual_seed(length))


def with_mask(model, x, mask=MASK):
    return model(x, mask=mask.dense(x.shape[1]))


@torch.no_grad()
@pytest.mark.slow  # an engine a length
def test_a_mask_holds_at_any_number_of_shapes(model):
    masked = compiled(model, options={"mask": MASK})
    with torch._dynamo.config.patch(recompile_limit=3):
        for length in (*range(3, 7), 8):
            close(masked(tokens(length)), with_mask(model, tokens(length)))


@torch.no_grad()
def test_a_mask_is_never_lost_to_the_recompile_limit(model):
    masked = compiled(lambda x: sdpa(x, x, x), options={"mask": MASK}, dynamic=False)
    lengths = iter(range(4, 10))
    with torch._dynamo.config.patch(recompile_limit=2):
        for x in (torch.randn(1, 1, next(lengths), 8) for _ in range(2)):
            close(masked(x), sdpa(x, x, x, attn_mask=MASK.dense(x.shape[2])))
        with pytest.raises(UnsupportedError, match=r"has made 2 graphs .* raise torch._dynamo.config.recompile_limit"):
            masked(torch.randn(1, 1, next(lengths), 8))


@torch.no_grad()
def test_beyond_the_limit_a_model_without_a_mask_is_pytorchs(model):
    plain = compiled(lambda x: sdpa(x, x, x), dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        for length in (4, 5):
            x = torch.randn(1, 1, length, 8)
            close(plain(x), sdpa(x, x, x))


@torch.compiler.disable
def not_compiled(x):
    return sdpa(x, x, x)


def attention_in_a_loop_that_breaks(x):
    for _ in range(2):
        print("broken")
        x = sdpa(x, x, x)
    return x


def attention_that_depends_on_values(x):
    y = sdpa(x, x, x)
    if y.sum() > 0:
        y = y * 2
    return y


class Nested(nn.Module):
    def forward(self, x):
        return attention_that_depends_on_values(x) + 1


@torch.no_grad()
@pytest.mark.parametrize(
    ("function", "place"),
    [
        (attention_in_a_loop_that_breaks, r"in attention_in_a_loop_that_breaks \(print\("),
        (lambda x: not_compiled(x) + 1, r"in <lambda> .*not_compiled\(x\) \+ 1"),
        (
            attention_that_depends_on_values,
            r"in attention_that_depends_on_values \(if y.sum\(\) > 0:\): Data-dependent",
        ),
        (Nested(), r"in attention_that_depends_on_values \(if y.sum"),
    ],
)
def test_a_mask_is_never_lost_to_a_graph_break(function, place, model):
    """One line of ours names the place; what TorchDynamo says is its cause."""
    x = torch.randn(1, 1, 8, 8)
    masked = compiled(function, options={"mask": MASK})
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=rf"one graph, .*test_backend.py, line \d+, {place}") as raised:
            masked(x)
        assert len(str(raised.value).splitlines()) == 1
        assert isinstance(raised.value.__cause__, Unsupported)
    close(compiled(function)(x), function(x))


@torch.no_grad()
def test_what_is_compiled_twice_or_inside_something_compiled_keeps_the_mask(model):
    x = torch.randn(1, 1, 8, 8)
    masked = compiled(lambda x: sdpa(x, x, x), options={"mask": MASK})
    expected = sdpa(x, x, x, attn_mask=MASK.dense(8))
    close(compiled(masked, options={"mask": MASK})(x), expected)
    assert masked.get_compiler_config() is None and masked._torchdynamo_wrapper_id == id(masked)


@torch.no_grad()
def test_a_mask_is_never_lost_to_suppressed_errors(model):
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(Exception, match="no attention"):
        compiled(nn.ReLU(), options={"mask": MASK})(tokens())


@torch.no_grad()
def test_compiling_what_is_marked_as_not_to_be_compiled_keeps_the_mask(model):
    x = torch.randn(1, 1, 8, 8)
    close(compiled(not_compiled, options={"mask": MASK})(x), sdpa(x, x, x, attn_mask=MASK.dense(8)))


@torch.no_grad()
def test_a_mask_needs_an_attention(model):
    with pytest.raises(MaskError, match="no attention"):
        compiled(nn.Linear(WIDTH, WIDTH), options={"mask": MASK})(tokens())


class Layers(nn.Module):
    """Paths layers.0.attend, layers.1.attend, a softmax module in each, and an attention of the model's own."""

    def __init__(self):
        super().__init__()
        self.softmax = nn.Softmax(-1)
        layer = {"attend": Model, "norm": lambda: nn.LayerNorm(WIDTH)}
        self.layers = nn.ModuleList(nn.ModuleDict({k: make() for k, make in layer.items()}) for _ in range(2))

    def forward(self, x, masks=(None, None, None)):
        for layer, mask in zip(self.layers, masks):
            x = layer["norm"](x + layer["attend"](x, mask=mask))
        scores = x @ x.mT if masks[2] is None else (x @ x.mT).masked_fill(~masks[2], -torch.inf)
        return self.softmax(scores) @ x


@torch.no_grad()
@pytest.mark.parametrize("is_function", [False, True])
def test_masks_by_the_paths_that_build_knows(is_function):
    torch.manual_seed(0)
    model, x = Layers().eval(), tokens()
    by_path = {"layers.0.*": MASK, "layers.1.attend": masks.causal()}
    expected = model(x, [MASK.dense(8), masks.causal().dense(8), None])
    close(stof_tvm.build(model, QUICK_LLVM, (x,), by_path)(x), expected)
    if is_function:  # which has its own name for the model
        by_path = {f"model.{path}": mask for path, mask in by_path.items()}
    close(compiled((lambda x: model(x)) if is_function else model, options={"mask": by_path})(x), expected)


@torch.no_grad()
def test_the_models_own_attention_has_no_path_but_a_name():
    torch.manual_seed(0)
    model, x = Layers().eval(), tokens()
    expected = model(x, [None, None, MASK.dense(8)])
    close(compiled(model, options={"mask": {"": MASK}})(x), expected)


class Columns(nn.Module):
    """An attention before two products by weights of two dimensions, with a nonlinearity and without."""

    def __init__(self):
        super().__init__()
        self.attend = Model()
        self.up, self.down, self.last = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(3))

    def forward(self, x, mask=None):
        x = self.attend(x, mask=mask).reshape(-1, WIDTH)
        return torch.tanh(x @ self.up) @ self.down @ self.last


@torch.no_grad()
def test_weights_are_no_states_though_they_are_inputs():
    torch.manual_seed(0)
    model, x = Columns().eval(), tokens()
    masked = compiled(model, options={"mask": MASK})
    close(masked(x), with_mask(model, x))
    for weight in model.parameters():
        weight.mul_(0.5)
    close(masked(x), with_mask(model, x))


class Covariance(nn.Module):
    """The same product by an input is an attention that no mask can be applied to."""

    def __init__(self):
        super().__init__()
        self.attend = Model()

    def forward(self, x):
        x = self.attend(x)[0]
        return torch.tanh(x @ x.mT) @ x


@torch.no_grad()
def test_states_are_no_weights():
    with pytest.raises(NotRewrittenError, match="relax.tanh turns"):
        compiled(Covariance().eval(), options={"mask": MASK})(tokens())


@torch.no_grad()
def test_a_path_that_is_unknown_is_answered_with_those_there_are():
    there = r"there are: 'layers.0.attend', 'layers.1.attend', \(the model\)"
    with pytest.raises(MaskError, match=there):
        compiled(Layers().eval(), options={"mask": {"layer.*": MASK}})(tokens())


def test_a_mask_needs_the_whole_model(model):
    """`optimize` was taken before this backend was imported, or the backend is called by something else."""
    from stof_tvm.dynamo.backend import stof

    with torch.no_grad(), pytest.raises(InputError, match="one graph"):
        torch.compile(model, backend=functools.partial(stof, options={"mask": MASK}))(tokens())


@torch.no_grad()
def test_each_compilation_of_a_model_has_its_mask(model):
    x, other = tokens(), masks.causal()
    plain, first, second = compiled(model), *(compiled(model, options={"mask": mask}) for mask in (MASK, other))
    for _ in range(2):
        close(plain(x), model(x))
        close(first(x), with_mask(model, x))
        close(second(x), with_mask(model, x, other))


@torch.no_grad()
@pytest.mark.parametrize("numpy", [False, True], ids=["tensor", "array"])
def test_masks_as_tensors(model, numpy):
    """PyTorch compares options with those of other compilations, and a comparison of tensors is no answer."""
    x = tokens()
    for mask in (MASK, masks.causal(), MASK):
        dense = mask.dense(x.shape[1])
        masked = compiled(model, options={"mask": dense.numpy() if numpy else dense})
        close(masked(x), with_mask(model, x, mask))


def in_place(model):
    model.project.weight.mul_(2)


def through_data(model):
    model.project.weight.data.mul_(2)


def other_data(model):
    model.project.weight.data = torch.randn(WIDTH, WIDTH)


def other_parameter(model):
    model.project.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))


def loaded(model):
    model.load_state_dict({name: 2 * x if x.is_floating_point() else x for name, x in model.state_dict().items()})


def stepped(model):
    model.project.weight.grad = torch.ones(WIDTH, WIDTH)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def buffer(model):
    model.shift.add_(1)


def buffer_through_data(model):
    model.shift.data.add_(1)


def mask_buffer(model):
    model.keep.tril_()


def mask_buffer_through_numpy(model):
    model.keep.numpy()[..., 4:, :4] = False


def other_buffer(model):
    model.shift = torch.randn(WIDTH)


CHANGES = (
    *(mask_buffer, mask_buffer_through_numpy, buffer, buffer_through_data, other_buffer),
    *(in_place, through_data, other_data, other_parameter, loaded, stepped),
)


@torch.no_grad()
def test_changes_after_compilation_are_seen(model):
    """Changes of parameters and buffers, in place, by other tensors, and in ways that PyTorch does not count."""
    plain = compiled(model)
    close(plain(tokens()), model(tokens()))
    for change in CHANGES:
        before = model(tokens())
        change(model)
        assert not torch.equal(model(tokens()), before), change.__name__
        close(plain(tokens()), model(tokens()), msg=lambda text, change=change: f"{change.__name__}: {text}")


@torch.no_grad()
def test_tied_parameters(model):
    pair = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    pair[1].weight = pair[0].weight
    tied = compiled(pair)
    for _ in range(2):
        close(tied(tokens()), pair(tokens()))
        pair[0].weight.mul_(3)


@torch.no_grad()
def test_parameters_are_inputs_and_no_second_engine(model, monkeypatch):
    from stof_tvm.dynamo import graph as dynamo_graph

    built, build = [], dynamo_graph.build
    monkeypatch.setattr(dynamo_graph, "build", lambda *args, **kwargs: built.append(1) or build(*args, **kwargs))
    plain = compiled(model)
    for _ in range(3):
        plain(tokens())
        through_data(model)
    assert len(built) == 1
    buffer(model)
    plain(tokens())
    assert len(built) == 2


def test_gradients_are_refused(model):
    with pytest.raises(InputError, match="^a parameter requires grad"):
        compiled(model)(tokens())
    model.requires_grad_(False)
    with pytest.raises(InputError, match="^input .* requires grad"):
        compiled(model)(tokens().requires_grad_())
    close(compiled(model)(tokens()), model(tokens()))
    model.requires_grad_(True)
    with torch.inference_mode():
        close(compiled(model)(tokens()), model(tokens()))


def test_without_gradients_inside_of_what_is_compiled(model):
    @compiled
    @torch.no_grad()
    def infer(x):
        return model(x)

    close(infer(tokens()), model(tokens()).detach())
    close(compiled(lambda x: model(x).argmax(-1))(tokens()), model(tokens()).argmax(-1))


@torch.no_grad()
def test_modes(model):
    close(compiled(model, mode="max-autotune")(tokens()), model(tokens()))


@torch.no_grad()
@pytest.mark.slow  # an engine a shape
@pytest.mark.parametrize("dynamic", [None, True, False])
def test_shapes_and_numbers_that_change(model, dynamic):
    plain = compiled(model, dynamic=dynamic)
    for length, scale in ((8, 0.5), (8, 0.7), (9, 2), (8, 3)):
        close(plain(tokens(length), scale), model(tokens(length), scale))


@torch.no_grad()
def test_a_graph_of_sizes_only(model):
    @compiled
    def breaks(x):
        rows = x.shape[0] * 2
        print("broken")
        return torch.relu(x) * rows

    for rows in (2, 3, 4):
        close(breaks(torch.ones(rows, 4)), torch.full((rows, 4), 2.0 * rows))


def test_autocast_is_refused(model):
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), pytest.raises(UnsupportedError, match="autocast"):
        compiled(model)(tokens())


def test_training_mode_is_not_evaluation_mode(model):
    """Active dropout is refused; without gradients that is all that training mode changes here."""
    dropping = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    with torch.no_grad():
        with pytest.raises(UnsupportedError, match=r"model\.eval\(\)"):
            compiled(dropping, fullgraph=True)(tokens())
        close(compiled(dropping.eval())(tokens()), dropping(tokens()))


@torch.no_grad()
def test_buffers_are_updated_as_pytorch_does():
    ours, theirs = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH)
    call = compiled(ours, fullgraph=True)
    for step in range(3):
        x = torch.randn(4 + step // 2, WIDTH)
        close(call(x), theirs(x))
        for (name, mine), right in zip(ours.named_buffers(), theirs.buffers(), strict=True):
            close(mine, right, msg=name)


@torch.no_grad()
@pytest.mark.slow  # three engines each
@pytest.mark.parametrize("norm_first, activation", [(False, "relu"), (True, "gelu")])
def test_the_encoder_layers_fast_path(norm_first, activation):
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 32, activation=activation, norm_first=norm_first, batch_first=True
    ).eval()
    x, future = tokens(), torch.ones(8, 8).triu(1).bool()
    padding = torch.tensor([[False] * 6 + [True] * 2])
    plain = compiled(layer)
    both = {"src_mask": future, "src_key_padding_mask": padding}
    for options in ({}, both) if norm_first else ({"src_mask": future}, {"src_key_padding_mask": padding}):
        close(plain(x, **options), layer(x, **options))
    close(compiled(layer, options={"mask": MASK})(x), layer(x, src_mask=~MASK.dense(8)))


@pytest.mark.parametrize(
    "arguments, error, told",
    [
        ({"mode": "fastest"}, InputError, "mode='fastest' is unknown: leave it out"),
        ({"options": [MASK]}, InputError, "must be a dict"),
        (
            {"options": {"masks": MASK}},
            InputError,
            "option 'masks' is unknown: did you mean 'mask'[?] There are 'mask'",
        ),
        ({"options": {"fuse": 1}}, InputError, "option 'fuse' is unknown: There are"),
        ({"options": {"float32": "high"}}, InputError, "float32='high' is not one of 'ieee', 'tf32'"),
        ({"options": {"strict": "no"}}, InputError, "'strict' must be True or False, got 'no'"),
        ({"options": {"target": "cudda"}}, TargetError, 'did you mean "cuda"'),
        ({"options": {"mask": masks.causal}}, MaskError, r"call it: masks\.causal\(\)"),
        ({"options": {"mask": torch.zeros(4, 4)}}, MaskError, "must be bool"),
    ],
)
def test_wrong_uses_are_told_by_torch_compile_itself(model, arguments, error, told):
    """Not by the first call, in a message that PyTorch has wrapped."""
    with pytest.raises(error, match=told) as raised:
        torch.compile(model, backend="stof", **arguments)
    assert len(str(raised.value)) < 300 and "TORCHDYNAMO" not in str(raised.value)


def test_another_backend_keeps_its_options(model):
    asked = []

    def mine(graph, _, **options):
        asked.append(options)
        return graph

    with torch.no_grad():
        torch.compile(model, backend=mine, options={"masks": 3})(tokens())
    assert asked == [{"options": {"masks": 3}}]
