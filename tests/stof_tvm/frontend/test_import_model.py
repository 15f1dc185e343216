"""What import_model takes, what it leaves untouched, and a clear error for each thing that it refuses."""

import traceback

import pytest
import torch
import torch.nn.functional as F
import tvm
from torch import nn

from stof_tvm.frontend import import_model
from tests.models.families import BertLike, GptLike
from tests.models.running import attention_sites, calls, compile_imported, error_against_torch, largest_error
from tests.models.spellings import Sdpa
from tests.models.transformers_models import transformers_inputs, transformers_model
from tir_kernels.errors import ExportError, InputError, UnsupportedError

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
IDS = torch.arange(8).reshape(1, 8)


class Lambda(nn.Module):
    """A module around a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


# -- what it takes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carried", [{"input": X}, (X,), X, lambda: (X,)], ids=["dict", "tuple", "tensor", "function"])
@pytest.mark.parametrize("attribute", ["example_inputs", "dummy_inputs"])
def test_example_inputs_may_come_from_the_model(attribute, carried):
    model = nn.Linear(3, 2)
    setattr(model, attribute, carried)
    assert import_model(model).signature.inputs[0].shape == (2, 3)


def test_dummy_inputs_of_a_transformers_model():
    assert [spec.name for spec in import_model(transformers_model("bert", "sdpa")).signature.inputs] == ["input_ids"]


def test_no_example_inputs():
    with pytest.raises(InputError, match="Linear needs example inputs"):
        import_model(nn.Linear(3, 2))


def test_not_a_model():
    with pytest.raises(InputError, match="got function"):
        import_model(lambda x: x, (X,))


@pytest.mark.parametrize("decomposed", [False, True], ids=["as exported", "decomposed by the user"])
def test_exported_program(decomposed):
    torch.manual_seed(0)
    model = GptLike(layers=1).eval()
    program = torch.export.export(model, (IDS,))
    program = program.run_decompositions() if decomposed else program
    imported = import_model(program)
    assert list(attention_sites(imported.mod)) == ([] if decomposed else ["blocks.0"])
    assert largest_error(compile_imported(imported)(IDS), model(IDS)) < 1e-5


def test_batch_norm_in_evaluation_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4))
    model(torch.randn(5, 3, 6, 6))  # moves the running statistics
    assert error_against_torch(model.eval(), (torch.randn(2, 3, 6, 6),)) < 1e-5


def test_an_index_outside_the_embedding_gives_nan():
    model = nn.Embedding(4, 2)
    rows = compile_imported(import_model(model, (torch.tensor([0, 1, 2]),)))(torch.tensor([3, 1000000, -7]))
    assert torch.equal(rows[0], model.weight[3]) and rows[1:].isnan().all()


def test_rows_that_keep_nothing_give_zero():
    q = torch.randn(1, 2, 4, 8)
    keep = torch.tensor([False, True, True, False])[:, None].expand(4, 4)
    result = compile_imported(import_model(Sdpa(mask=keep), (q, q, q)))(q, q, q)
    assert (result[:, :, [0, 3]] == 0).all() and result.isfinite().all()


# -- what it leaves untouched ---------------------------------------------------------------------------------------


def test_the_model_keeps_its_modes_and_parameters():
    torch.manual_seed(0)
    model = BertLike(layers=1)
    model.layers[0].norm1.eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    import_model(model, (IDS, torch.ones(1, 8)))
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert nn.modules.transformer._detect_is_causal_mask.__module__ == "torch.nn.modules.transformer"


def test_modes_are_restored_after_a_failure():
    model = nn.Sequential(nn.Dropout(0.5), Lambda(lambda x: x if x.sum() > 0 else -x))
    with pytest.raises(ExportError):
        import_model(model, (X,))
    assert all(module.training for module in model.modules())


def test_training_on_does_not_reach_the_imported_model():
    model = nn.Linear(3, 2)
    with torch.no_grad():
        expected = model(X)
        imported = import_model(model, (X,))
        model.weight.add_(1.0)
    assert largest_error(compile_imported(imported)(X), expected) < 1e-6


def test_a_tied_parameter_is_one_constant():
    model = GptLike(layers=1)
    operands = [operand for call in calls(import_model(model, (IDS,)).mod) for operand in call.args]
    tables = [x.value for x in operands if isinstance(x, tvm.ir.GenericConst) and tuple(x.ty.shape) == (50, 32)]
    assert len(tables) == 2 and tables[0].same_as(tables[1])


VMAPPED = {
    "dot": lambda x: torch.vmap(torch.dot)(x, x),
    "sum": lambda x: torch.vmap(lambda a: (a * a).sum())(x),
    "nested": lambda x: torch.vmap(torch.vmap(lambda a: a.exp()))(x),
}


@pytest.mark.parametrize("name", VMAPPED)
def test_functions_of_vmap(name):
    """Nobody reads the calls that open and close its levels."""
    f = VMAPPED[name]
    assert largest_error(compile_imported(import_model(Lambda(f), (X,)))(X), f(X)) < 1e-5


# -- what it refuses ------------------------------------------------------------------------------------------------


def test_a_branch_on_values_keeps_the_message_of_torch_export():
    with pytest.raises(ExportError, match="(?s)could not export Lambda.*data-dependent.*decides by a tensor's values"):
        import_model(Lambda(lambda x: x if x.sum() > 0 else -x), (X,))


def test_a_mask_that_is_left_out_is_named_where_tracing_fails():
    """As transformers' SwitchTransformers and LongT5 are: eager makes a mask, and what is traced has none."""

    class Masked(nn.Module):
        def forward(self, x, attention_mask=None, scale=1.0):
            return x * attention_mask.shape[0] * scale

    with pytest.raises(
        ExportError, match="(?s)no attribute 'shape'.*takes attention_mask, which is not among the inputs"
    ):
        import_model(Masked(), (X,))
    with pytest.raises(ExportError) as found:
        import_model(Masked(), (X, torch.ones(3)), {"scale": "two"})
    assert "not among the inputs" not in str(found.value)


def test_transformers_cache_is_turned_off_and_that_is_told():
    model, inputs = transformers_model("gpt2", "sdpa"), transformers_inputs("gpt2", padded=False)
    assert import_model(model, (), inputs).notes == ()
    model.config.use_cache = True
    (note,) = import_model(model, (), inputs).notes
    assert "use_cache" in note and model.config.use_cache is True


def test_a_cache_that_is_asked_for_is_refused_with_the_remedy():
    model, inputs = transformers_model("gpt2", "sdpa"), transformers_inputs("gpt2", padded=False)
    with pytest.raises(ExportError, match="(?s)DynamicCache.*leave out use_cache=True"):
        import_model(model, (), {**inputs, "use_cache": True})


def fail(x):
    return x.view(7, 7)  # this line is wrong


def test_a_bug_of_the_model_shows_its_own_lines():
    with pytest.raises(ExportError, match="in fail: return x.view") as error:
        import_model(Lambda(fail), (X,))
    own = traceback.extract_tb(error.value.__cause__.__traceback__)
    assert [frame.name for frame in own] == ["forward", "fail"] and "this line is wrong" in own[-1].line


class RowsThatCount(nn.Module):
    def forward(self, x):
        rows = x[x[:, 0].nonzero().flatten()]
        return torch.nn.functional.pad(rows, (0, 0, 0, 8 - rows.shape[0]))


def test_a_length_that_depends_on_values_is_told_as_such():
    with pytest.raises(UnsupportedError, match="numbers that it takes from tensors, such as a length"):
        import_model(RowsThatCount(), (torch.randn(8, 4),))


def test_an_operator_without_converter_is_named_with_its_module():
    model = nn.Sequential(nn.Linear(3, 3), Lambda(torch.special.bessel_j0))
    with pytest.raises(UnsupportedError, match="aten.special_bessel_j0.default \\(in 1\\)"):
        import_model(model, (X,))


def test_a_weight_that_a_parametrization_computes_can_be_left_in_its_place():
    parametrize, x = torch.nn.utils.parametrize, torch.randn(2, 8)
    model = torch.nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)).eval()
    with pytest.raises(UnsupportedError, match="linalg_matrix_exp.*remove_parametrizations"):
        import_model(model, (x,))
    parametrize.remove_parametrizations(model, "weight")
    assert error_against_torch(model, (x,)) < 1e-6


@pytest.mark.parametrize(
    "function",
    [torch.bernoulli, torch.rand_like, torch.randn_like, lambda x: x + torch.randn(2, 3), lambda x: x.exponential_()],
)
def test_random_numbers_are_refused(function):
    with pytest.raises(UnsupportedError, match="aten\\.\\w+"):
        import_model(Lambda(lambda x: function(x.abs().clamp(0, 1) * 1)), (X,))


def test_dropout_that_ignores_the_mode_is_refused():
    with pytest.raises(UnsupportedError, match=r"dropout.*model\.eval\(\).*training=self\.training"):
        import_model(Lambda(lambda x: F.dropout(x, 0.5, training=True)), (X,))


def test_indexing_by_a_boolean_tensor_is_refused():
    with pytest.raises((UnsupportedError, ExportError)):
        import_model(Lambda(lambda x: x[x > 0]), (X,))


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls.add_(1)
        return x + self.calls


def test_a_buffer_updated_in_forward_is_a_state():
    imported = import_model(Counter(), (X,))
    (state,) = imported.states
    assert state.name == "calls" and torch.equal(state.initial, Counter().calls)
    assert [p.name for p in imported.mod["main"].params][-1] == state.node


def test_an_input_updated_in_forward_is_a_state():
    (state,) = import_model(Lambda(lambda x: x.add_(1)), (X.clone(),)).states
    assert (state.name, state.node, state.initial) == ("args_0", "args_0", None)


def test_dynamic_shapes_are_refused():
    batch = torch.export.Dim("batch", min=2, max=8)
    program = torch.export.export(nn.Linear(3, 2), (torch.randn(4, 3),), dynamic_shapes={"input": {0: batch}})
    with pytest.raises(UnsupportedError, match="'input' has the dynamic shape"):
        import_model(program)


def test_a_sparse_parameter_is_refused():
    model = nn.Linear(3, 3, bias=False)
    model.weight = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises((UnsupportedError, ExportError)):
        import_model(model, (X,))


def test_dtypes_that_are_not_imported_are_refused_by_name():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(3).to(torch.float8_e4m3fn))

        def forward(self, x):
            return x * self.scale.float()

    with pytest.raises(UnsupportedError, match="buffer 'scale' has dtype torch.float8_e4m3fn, which cannot be"):
        import_model(Scaled(), (X,))
    with pytest.raises(UnsupportedError, match="input 'args_0' has dtype torch.float8_e5m2, which cannot be"):
        import_model(Lambda(lambda x: x.float()), (X.to(torch.float8_e5m2),))


def test_weights_on_the_meta_device_are_refused():
    with pytest.raises(InputError, match="weight is on the meta device"):
        import_model(torch.nn.Linear(4, 4, device="meta"), (torch.ones(2, 4),))


def test_numpy_arrays_are_refused_by_name():
    with pytest.raises(
        InputError, match=r"input \['input'\] is a NumPy array of shape \(2, 4\): pass torch.from_numpy"
    ):
        import_model(torch.nn.Linear(4, 4), (), {"input": torch.ones(2, 4).numpy()})


def test_a_models_own_inputs_are_told():
    class Carries(torch.nn.Linear):
        dummy_inputs = {"input": torch.ones(3, 4)}

    assert "(3, 4)" in import_model(Carries(4, 4)).notes[0]


def test_effects_are_refused_by_name():
    class Inverts(torch.nn.Module):
        def forward(self, x):
            return torch.linalg.inv(x)

    with pytest.raises(UnsupportedError, match="linalg"):
        import_model(Inverts(), (torch.eye(3),))
