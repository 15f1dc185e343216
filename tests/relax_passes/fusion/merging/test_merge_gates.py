"""Two products of one input, of which one gates the other, become one where a kernel computes both."""

from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
import tvm
from torch.nn.functional import silu
from tvm import relax

import stof_tvm
from relax_passes.fusion.lower_segments import LowerSegments
from relax_passes.fusion.merging.merge_gates import MergeGates
from relax_passes.fusion.operators import OperatorGraph
from relax_passes.fusion.partition_segments import PartitionSegments
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme
from relax_passes.fusion.schemes.initial_scheme import InitialScheme
from relax_passes.fusion.schemes.tuned_scheme import graph_key
from relax_passes.fusion.template_choice import TemplateChooser
from relax_passes.ir.bindings import Bindings, operator
from relax_passes.parallel.placement import Ranks
from relax_passes.pipeline import run_pipeline
from relax_passes.report_rows import segment_rows
from relax_passes.tuned_choices import TunedChoices
from stof_tvm.site_masks import SiteMasks
from tests.relax_passes.fusion.modules import module_of, run
from tir_kernels.fusion.registry import templates_for
from tir_kernels.target import parse_target

op = relax.op
HOPPER, AMPERE = (parse_target(f"cuda -arch={arch}") for arch in ("sm_90a", "sm_80"))
CHOOSER = TemplateChooser(HOPPER, templates_for(HOPPER))
B, S, K, N = 2, 12, 32, 48
BOTH, NEITHER = (True, True), (False, False)


def variable(name="x", shape=(B, S, K), dtype="float16"):
    return relax.Var(name, relax.TensorType(shape, dtype))


def array(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape) / 4


def constant(values: np.ndarray, dtype="float16"):
    return relax.const(values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype), dtype)


def project(emit, x, seed, n=N, transposed=True, bias=False, dtype="float16"):
    """x @ w [+ b], w (k, n) being the same numbers whether it is stored so or as (n, k)."""
    w = array(int(x.ty.shape[-1]), n, seed=seed)
    product = emit(op.matmul(x, emit(op.permute_dims(constant(w.T, dtype))) if transposed else constant(w, dtype)))
    return emit(op.add(product, constant(array(n, seed=seed), dtype))) if bias else product


def gated(x, activation=op.nn.silu, transposed=BOTH, biases=NEITHER, value_first=False, dtype="float16", n=N):
    """main(x) = activation(x @ w1 [+ b1]) * (x @ w2 [+ b2])."""

    def body(builder):
        emit = builder.emit
        gate = emit(activation(project(emit, x, 1, n, transposed[0], biases[0], dtype)))
        value = project(emit, x, 2, n, transposed[1], biases[1], dtype)
        return emit(op.multiply(value, gate) if value_first else op.multiply(gate, value))

    return module_of([x], body)


def alternating(first, second):
    """Along the last axis, eight of the first and eight of the second in turn."""
    return np.stack([x.reshape(*x.shape[:-1], -1, 8) for x in (first, second)], -2).reshape(*first.shape[:-1], -1)


def merged(mod, target=HOPPER, **options):
    return MergeGates(TemplateChooser(target, templates_for(target)), **options)(mod)


def products(mod) -> list:
    return [value for value in Bindings(mod["main"]).values.values() if operator(value) == "matmul"]


def lowered(mod, chooser=CHOOSER):
    return LowerSegments(chooser)(PartitionSegments(InitialScheme(chooser))(mod))


def constants(mod) -> list[np.ndarray]:
    """Those that the calls of "main" read."""
    calls = [value for value in Bindings(mod["main"]).values.values() if operator(value) == "call_tir"]
    return [x.value.numpy() for call in calls for x in call.args[1].fields if hasattr(x, "value")]


# -- what is merged ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transposed, biases, is_transposed",
    [
        (BOTH, NEITHER, True),
        (NEITHER, BOTH, False),
        ((True, False), (True, False), True),
        ((False, True), (False, True), True),
    ],
)
def test_the_columns_of_both_weights_alternate_by_eight(transposed, biases, is_transposed):
    x = variable()
    weights = alternating(*(array(K, N, seed=seed) for seed in (1, 2)))

    def expected(builder):
        emit = builder.emit
        w = constant(weights.T if is_transposed else weights)
        both = emit(op.matmul(x, emit(op.permute_dims(w)) if is_transposed else w))
        if any(biases):
            given = [array(N, seed=seed) if has else np.zeros(N) for seed, has in zip((1, 2), biases)]
            both = emit(op.add(both, constant(alternating(*given))))
        parts = emit(op.reshape(both, (B, S, N // 8, 2, 8)))
        halves = [emit(op.strided_slice(parts, [3], [i], [i + 1])) for i in (0, 1)]
        gate = emit(op.nn.silu(emit(op.reshape(halves[0], (B, S, N)))))
        return emit(op.multiply(gate, emit(op.reshape(halves[1], (B, S, N)))))

    actual = merged(gated(x, transposed=transposed, biases=biases))
    tvm.ir.assert_structural_equal(actual, module_of([x], expected), map_free_vars=True)


ACTIVATIONS = [op.nn.silu, op.nn.gelu, op.nn.gelu_tanh, op.nn.relu, op.tanh, op.sigmoid]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("value_first, dtype, biases", [(False, "float16", (True, False)), (True, "bfloat16", BOTH)])
def test_numbers_stay_and_one_kernel_computes_both(activation, value_first, dtype, biases):
    x = variable(dtype=dtype)
    mod = gated(x, activation, biases=biases, value_first=value_first, dtype=dtype)
    once = merged(mod)
    (row,) = segment_rows(lowered(once))
    assert (row.kernel, row.operators) == ("gemm", ("matmul", "add", activation.__name__, "multiply"))
    values = array(B, S, K, seed=5).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    (actual,), (expected,) = run(once, values), run(mod, values)
    tolerance = 0.05 if dtype == "bfloat16" else 0.01
    np.testing.assert_allclose(actual.astype("float32"), expected.astype("float32"), rtol=tolerance, atol=tolerance)


def test_the_kernel_reads_the_merged_weight_as_it_is():
    mod = merged(gated(variable(), biases=BOTH))
    (product,) = products(mod)
    weight = Bindings(mod["main"]).call(product.args[1], "permute_dims").args[0]
    read = constants(lowered(mod))
    assert len(read) == 2 and np.array_equal(read[0], weight.value.numpy())


def test_views_of_the_same_elements_may_lie_between():
    """As where a model computes its MLP on (tokens, features)."""
    x = variable()

    def body(builder):
        emit = builder.emit
        flat = emit(op.reshape(x, (B * S, K)))
        gate, value = (emit(op.reshape(project(emit, flat, seed), (B, S, N))) for seed in (1, 2))
        return emit(op.multiply(emit(op.reshape(emit(op.nn.silu(gate)), (B, S, N))), value))

    mod = merged(module_of([x], body))
    assert len(products(mod)) == 1
    (row,) = segment_rows(lowered(mod))
    assert row.kernel == "gemm"


def test_layers_are_merged_each_for_itself():
    x = variable()

    def body(builder):
        emit, y = builder.emit, x
        for seed in (1, 3):
            gate, value = emit(op.nn.silu(project(emit, y, seed))), project(emit, y, seed + 1)
            y = project(emit, emit(op.multiply(gate, value)), seed + 10, K)
        return y

    mod = merged(module_of([x], body))
    assert [int(product.ty.shape[-1]) for product in products(mod)] == [2 * N, K, 2 * N, K]


# -- what stays ----------------------------------------------------------------------------------------------------


def two(builder, x, y=None, n=N):
    """The results of two projections, x's and y's."""
    return [project(builder.emit, value, seed, n) for value, seed in ((x, 1), (x if y is None else y, 2))]


def gate_read_by_another(builder, x, _):
    gate, value = two(builder, x)
    return relax.Tuple([builder.emit(op.multiply(builder.emit(op.nn.silu(gate)), value)), builder.emit(op.exp(gate))])


def activation_read_by_another(builder, x, _):
    gate, value = two(builder, x)
    active = builder.emit(op.nn.silu(gate))
    return relax.Tuple([builder.emit(op.multiply(active, value)), builder.emit(op.exp(active))])


def values_are_a_result(builder, x, _):
    gate, value = two(builder, x)
    return relax.Tuple([builder.emit(op.multiply(builder.emit(op.nn.silu(gate)), value)), value])


def of_two_inputs(builder, x, y):
    gate, value = two(builder, x, y)
    return builder.emit(op.multiply(builder.emit(op.nn.silu(gate)), value))


def other_activation(builder, x, _):
    gate, value = two(builder, x)
    return builder.emit(op.multiply(builder.emit(op.exp(gate)), value))


def no_activation(builder, x, _):
    return builder.emit(op.multiply(*two(builder, x)))


def both_active(builder, x, _):
    return builder.emit(op.multiply(*(builder.emit(op.nn.silu(value)) for value in two(builder, x))))


def added(builder, x, _):
    gate, value = two(builder, x)
    return builder.emit(op.add(builder.emit(op.nn.silu(gate)), value))


def of_itself(builder, x, _):
    gate = two(builder, x)[0]
    return builder.emit(op.multiply(builder.emit(op.nn.silu(gate)), gate))


def a_norm_between(builder, x, _):
    gate, value = two(builder, x)
    value = builder.emit(op.nn.rms_norm(value, constant(np.ones(N)), [-1], 1e-6))
    return builder.emit(op.multiply(builder.emit(op.nn.silu(gate)), value))


def a_bound_between(builder, x, _):
    """Elementwise, but no part of a gated product."""
    gate, value = two(builder, x)
    value = builder.emit(op.clip(value, -7.0, 7.0))
    return builder.emit(op.multiply(builder.emit(op.nn.silu(gate)), value))


def turned(builder, x, _):
    """Rows of the values are those of other tokens."""
    gate, value = two(builder, x)
    gate, value = (builder.emit(op.permute_dims(part, [1, 0, 2])) for part in (builder.emit(op.nn.silu(gate)), value))
    value = builder.emit(op.reshape(value, (S, B, N)))
    return builder.emit(op.multiply(gate, builder.emit(op.reshape(value, (S, B, N)))))


def of_a_run_time_weight(builder, x, y):
    gate = project(builder.emit, x, 1, S)
    value = builder.emit(op.matmul(x, builder.emit(op.reshape(y, (K, B * S)))))
    value = builder.emit(op.strided_slice(value, [2], [0], [S]))
    return builder.emit(op.multiply(builder.emit(op.nn.silu(gate)), value))


def a_weight_read_by_another(builder, x, y):
    """The values' weight multiplies another input as well: merged, it would be held twice."""
    emit, w = builder.emit, constant(array(K, N, seed=2))
    gate = emit(op.nn.silu(project(emit, x, 1, transposed=False)))
    return relax.Tuple([emit(op.multiply(gate, emit(op.matmul(x, w)))), emit(op.matmul(y, w))])


def columns_of_twelve(builder, x, _):
    gate, value = two(builder, x, n=12)
    return builder.emit(op.multiply(builder.emit(op.nn.silu(gate)), value))


NEAR_MISSES = [
    gate_read_by_another,
    activation_read_by_another,
    values_are_a_result,
    of_two_inputs,
    other_activation,
    no_activation,
    both_active,
    added,
    of_itself,
    a_norm_between,
    a_bound_between,
    turned,
    of_a_run_time_weight,
    a_weight_read_by_another,
    columns_of_twelve,
]


@pytest.mark.parametrize("body", NEAR_MISSES, ids=lambda body: body.__name__)
def test_what_is_no_gate_with_its_values_stays(body):
    x, y = variable(), variable("y")
    mod = module_of([x, y], lambda builder: body(builder, x, y))
    tvm.ir.assert_structural_equal(merged(mod), mod)


@pytest.mark.parametrize(
    "x, options",
    [
        (variable(dtype="float32"), {"dtype": "float32"}),  # gates are for half precision
        (variable(shape=(B, S, 12)), {}),  # rows of a that are no multiple of 16 bytes
        (variable(shape=(K,)), {}),  # no matrix
    ],
    ids=["float32", "depth of 12", "a vector"],
)
def test_what_no_template_computes_stays(x, options):
    mod = gated(x, **options)
    tvm.ir.assert_structural_equal(merged(mod), mod)


def test_the_weights_have_the_activations_dtype():
    x = variable()

    def body(builder):
        emit = builder.emit
        gate = emit(op.nn.silu(project(emit, x, 1)))
        wide = emit(op.matmul(emit(op.astype(x, "float32")), constant(array(K, N, seed=2), "float32")))
        return emit(op.multiply(gate, emit(op.astype(wide, "float16"))))

    mod = module_of([x], body)
    tvm.ir.assert_structural_equal(merged(mod), mod)


def test_a_chooser_without_templates_merges_nothing():
    mod = gated(variable())
    tvm.ir.assert_structural_equal(MergeGates(TemplateChooser(parse_target("llvm"), []))(mod), mod)


# -- whatever the rows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [HOPPER, AMPERE], ids=["sm_90a", "sm_80"])
@pytest.mark.parametrize("n, k", [(1024, 512), (1024, 4096)])
def test_engines_for_any_rows_read_the_same_weight(target, n, k):
    """Where few rows are faster as a matrix-vector product with the gate behind it, as with (1024, 4096), too."""
    chooser, read, names = TemplateChooser(target, templates_for(target)), [], []
    for rows in (1, 16, 128, 8192):
        mod = lowered(merged(gated(variable(shape=(1, rows, k)), n=n), target), chooser)
        (weight,) = (x for x in constants(mod) if x.size == 2 * n * k)
        read.append(weight)
        names.append([row.kernel for row in segment_rows(mod)])
    assert all(np.array_equal(weight, read[0]) for weight in read)
    assert names[-1] == ["gemm"] and all(found in (["gemm"], ["gemv", "group"]) for found in names)
    assert (["gemv", "group"] in names) == (k == 4096 and target is HOPPER)


# -- in the pipeline -----------------------------------------------------------------------------------------------


def mlp(x, dtype="float16"):
    """main(x) = down(silu(gate(x)) * up(x)), silu in two operators."""

    def body(builder):
        emit = builder.emit
        gate, value = (project(emit, x, seed, dtype=dtype) for seed in (1, 2))
        wide = emit(op.multiply(emit(op.multiply(gate, emit(op.sigmoid(gate)))), value))
        return project(emit, wide, 3, K, dtype=dtype)

    return module_of([x], body)


def kernels(mod, target=HOPPER, **options):
    mod = run_pipeline(mod, target, SiteMasks(None), until="lower_segments", **options)
    return [(row.kernel, row.operators) for row in segment_rows(mod)]


GATED = [("gemm", ("matmul", "silu", "multiply")), ("gemm", ("matmul",))]
TWO = [("gemm", ("matmul", "silu")), ("gemm", ("matmul", "multiply")), ("gemm", ("matmul",))]


def test_gpus_get_one_product_and_cpus_keep_two():
    x = variable(shape=(1, 64, K))
    assert kernels(mlp(x)) == GATED
    on_cpu = kernels(mlp(x), parse_target("llvm"))
    assert [name for _, names in on_cpu for name in names].count("matmul") == 3


def test_a_given_scheme_tells_by_its_length_which_operators_it_cuts():
    x = variable(shape=(1, 64, K))
    assert kernels(mlp(x), fusion_scheme=FusionScheme("00 11 0")) == TWO
    assert kernels(mlp(x), fusion_scheme=FusionScheme("000 1")) == GATED


class Log:
    """Schemes of graphs, by their keys."""

    def __init__(self, schemes):
        self.schemes = schemes

    def scheme(self, key, _gpu):
        return self.schemes.get(key)

    def may_hold(self, problem):
        return True

    def ranked(self, _workload, _gpu):
        return []


def record(scheme, us, gpu="here"):
    return SimpleNamespace(scheme=FusionScheme(scheme).hex, us=us, gpu=gpu, date="2026-01-31")


@pytest.mark.parametrize(
    "before, after, expected",
    [
        (record("00 11 0", 5.0), None, TWO),
        (record("00 11 0", 5.0), record("000 1", 4.0), GATED),
        (record("00 11 0", 5.0), record("000 1", 6.0), TWO),
        (record("00 11 0", 5.0), record("000 1", 4.0, "elsewhere"), TWO),
        (record("00 11 01", 5.0), None, GATED),  # of other operators: it no longer fits
        (None, record("000 1", 4.0), GATED),
    ],
)
def test_the_faster_known_scheme_says_whether_products_are_merged(before, after, expected):
    x = variable(shape=(1, 64, K))
    plain = run_pipeline(mlp(x), parse_target("llvm"), SiteMasks(None), until="canonicalize_operators")
    graphs = [OperatorGraph(mod["main"]) for mod in (plain, merged(plain))]
    found = {graph_key(graph): known for graph, known in zip(graphs, (before, after)) if known is not None}
    assert kernels(mlp(x), tuned=TunedChoices(Log(found), HOPPER, "here")) == expected


class Mlp(torch.nn.Module):
    """A residual MLP with a gate; by default LLaMA's."""

    def __init__(self, activation=silu, gate_bias=False, bias=False, size=64):
        super().__init__()
        self.norm, self.activation = torch.nn.RMSNorm(size), activation
        self.gate, self.up = torch.nn.Linear(size, 96, bias=gate_bias), torch.nn.Linear(size, 96, bias=bias)
        self.down = torch.nn.Linear(96, size)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(self.up(h) * self.activation(self.gate(h)))


def spelled_gelu(x):
    """T5 v1.1's."""
    return 0.5 * x * (1.0 + torch.tanh((2.0 / np.pi) ** 0.5 * (x + 0.044715 * torch.pow(x, 3.0))))


@pytest.mark.parametrize(
    "options, name",
    [
        ({}, "silu"),
        ({"activation": spelled_gelu, "gate_bias": True}, "gelu_tanh"),
        ({"activation": torch.sigmoid, "gate_bias": True, "bias": True}, "sigmoid"),
    ],
    ids=["swiglu", "geglu, spelled out", "glu"],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_built_model_s_report_says_that_one_kernel_computes_both(options, name, dtype):
    torch.manual_seed(0)
    model, x = Mlp(**options).to(dtype).eval(), torch.randn(2, 40, 64).to(dtype)
    engine = stof_tvm.build(model, "cuda -arch=sm_90a", (x,), verify=False, tuning_logs=False)
    (row,) = (row for row in engine.report().segments if name in row.operators)
    assert row.kernel == "gemm" and row.operators[0] == "matmul" and row.operators[-1] == "multiply"
    assert [r.operators.count("matmul") for r in engine.report().segments if "matmul" in r.operators] == [1, 1]


def test_in_float32_two_products_stay_two():
    model, x = Mlp().eval(), torch.randn(2, 40, 64)
    for float32 in ("ieee", "tf32"):
        engine = stof_tvm.build(model, HOPPER, (x,), verify=False, tuning_logs=False, float32=float32)
        assert sum(row.operators.count("matmul") for row in engine.report().segments) == 3


def test_ranks_merge_their_own_columns():
    """The parts of a rank's weight are those of its gate and of its values, whole columns of both."""
    x = variable(shape=(1, 64, K))
    for rank in (0, 1):
        ranks = Ranks(rank, 2, "stof.test.all_reduce")
        mod = run_pipeline(mlp(x), HOPPER, SiteMasks(None), until="canonicalize_operators", ranks=ranks)
        wide, down = products(mod)
        assert [int(p.ty.shape[-1]) for p in (wide, down)] == [N, K]
        weight = Bindings(mod["main"]).call(wide.args[1], "permute_dims").args[0].value.numpy()
        own = [array(K, N, seed=seed)[:, rank * N // 2 : (rank + 1) * N // 2] for seed in (1, 2)]
        np.testing.assert_array_equal(weight, alternating(*own).T.astype("float16"))
