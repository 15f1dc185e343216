"""Every operator of the table imports with PyTorch's numbers, shapes and dtypes, in single and in half precision."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from stof_tvm.errors import StofError
from stof_tvm.frontend import import_model
from stof_tvm.frontend.direct import try_direct
from stof_tvm.frontend.export import export_model
from stof_tvm.frontend.importer import Importer
from stof_tvm.frontend.operators import table
from tests.models.running import compile_imported, largest_error

inf = float("inf")

# x float (2, 3, 4, 8), w float (8,), i int64 (2, 3) in 0..4, m bool (2, 1, 4, 8)
OPERATORS = {
    "add alpha": lambda t: torch.add(t.x, t.w, alpha=2),
    "sub alpha": lambda t: torch.sub(t.x, t.w, alpha=3),
    "add int and float": lambda t: t.i[:, :, None, None] + t.x,
    "mul bool and float": lambda t: t.m * t.x,
    "mul half and float": lambda t: t.x * t.x[0].float(),
    "rsub": lambda t: 1.0 - t.x,
    "rsub int": lambda t: 1 - t.i,
    "rsub alpha": lambda t: torch.rsub(t.x, t.w, alpha=2),
    "div int": lambda t: t.i / 3,
    "div floor": lambda t: (t.i - 3) // 2,
    "div trunc int": lambda t: torch.div(t.i - 3, 2, rounding_mode="trunc"),
    "div trunc float": lambda t: torch.div(t.x, 0.5, rounding_mode="trunc"),
    "remainder": lambda t: (t.i - 3) % 2,
    "pow 2 of negative": lambda t: t.x.pow(2),
    "pow 3.0 of negative": lambda t: t.x.pow(3.0),
    "pow 0.5": lambda t: t.x.abs().pow(0.5),
    "pow -0.5": lambda t: (t.x.abs() + 1).pow(-0.5),
    "pow 1.7": lambda t: t.x.abs().pow(1.7),
    "pow int": lambda t: t.i**2,
    "logaddexp": lambda t: torch.logaddexp(t.x, t.w),
    "logaddexp of infinities": lambda t: torch.logaddexp(t.x.masked_fill(t.m, -inf), torch.where(t.m, t.w, -inf)),
    "logaddexp far apart": lambda t: torch.logaddexp(t.x * 0, t.w - 16),
    "logaddexp of int": lambda t: torch.logaddexp(t.x, t.i[0, 0]),
    "pow scalar base": lambda t: 2.0**t.x,
    "where": lambda t: torch.where(t.m, t.x, -t.x),
    "where scalars": lambda t: torch.where(t.m, 0.0, -inf),
    "where tensor and scalar": lambda t: torch.where(t.m, t.x, torch.finfo(t.x.dtype).min),
    "where scalar and tensor": lambda t: torch.where(t.m, -inf, t.x),
    "where promotes": lambda t: torch.where(t.m, t.x, t.i[0, 0]),
    "masked_fill inverted": lambda t: t.x.masked_fill(~t.m, -inf),
    "masked_fill finite": lambda t: t.x.masked_fill(t.m, -10000.0),
    "masked_fill tensor": lambda t: t.x.masked_fill(t.m, t.w[0]),
    "masked_fill int": lambda t: t.i.masked_fill(t.i > 2, -1),
    "masked_fill_ in place": lambda t: torch.zeros_like(t.x).masked_fill_(t.m, -inf),
    "any": lambda t: t.m.any(),
    "any dim": lambda t: (t.i > 3).any(-1),
    "any of floats": lambda t: (t.x * 0.25).any(1),
    "all dim": lambda t: t.m.all(-1, keepdim=True),
    "select last": lambda t: t.x[:, -1],
    "select first": lambda t: t.x[:, 0],
    "slices": lambda t: t.x[:, 1:, :-1, ::3],
    "index one": lambda t: t.x[:, t.i[0]],
    "index negative": lambda t: t.x[:, :, t.i[0] - 4],
    "index neighbours": lambda t: t.x[:, t.i % 3, t.i % 4],
    "index apart": lambda t: t.x[t.i % 2, :, t.i % 4],
    "index first two": lambda t: t.x[t.i % 2, t.i % 3],
    "index broadcast": lambda t: t.x[torch.arange(2)[:, None], t.i % 3],
    "index_select": lambda t: t.x.index_select(3, t.i[0]),
    "gather": lambda t: t.x.gather(3, t.i[:, :, None, None].expand(2, 3, 4, 2)),
    "embedding": lambda t: F.embedding(t.i, t.x[0, 0].repeat(2, 1)),
    "cumsum of bool": lambda t: t.m.cumsum(-1),
    "cumsum": lambda t: t.x.cumsum(2),
    "sum of bool": lambda t: t.m.sum(-1),
    "sum": lambda t: t.x.sum((1, 2)),
    "mean": lambda t: t.x.mean(-1, keepdim=True),
    "mean of all": lambda t: t.x.mean(),
    "var": lambda t: t.x.var(-1, unbiased=False),
    "std": lambda t: t.x.std(-1),
    "max of all": lambda t: t.x.max(),
    "max dim": lambda t: t.x.max(-1).values,
    "amax": lambda t: t.x.amax((1, 2)),
    "argmax": lambda t: t.x.argmax(-1),
    "topk": lambda t: t.x.topk(3, -1).values,
    "topk of none": lambda t: torch.cat([t.x, t.x.topk(0, -1).values], -1),
    "sort": lambda t: t.x.sort(-1).values,
    "arange": lambda t: torch.arange(5) * t.i[0, 0],
    "arange float": lambda t: torch.arange(0.5, 3.0, 0.5) * t.w[0].float(),
    "arange down": lambda t: torch.arange(7, -1, -3) * t.i[0, 0],
    "arange down by fractions": lambda t: torch.arange(2.0, 0.4, -0.3) * t.w[0].float(),
    "arange bfloat16": lambda t: torch.arange(9, 1, -2, dtype=torch.bfloat16) * t.w[0].bfloat16(),
    "arange dtype": lambda t: torch.arange(8, dtype=t.x.dtype) * t.w,
    "linspace": lambda t: torch.linspace(-1, 1, 8) + t.w,
    "full": lambda t: torch.full((2, 8), -inf) + t.w,
    "full_like": lambda t: torch.full_like(t.x, 2.5) + t.x,
    "ones_like dtype": lambda t: torch.ones_like(t.x, dtype=torch.int64) + t.i[0, 0],
    "new_ones dtype": lambda t: t.x.new_ones((2, 3), dtype=torch.bool) & (t.i > 1),
    "zeros_like dtype": lambda t: torch.zeros_like(t.i, dtype=torch.float32) + t.i,
    "eye": lambda t: torch.eye(8) + t.w,
    "tril": lambda t: torch.tril(t.x, diagonal=1),
    "triu of ones": lambda t: torch.triu(torch.ones(4, 8), diagonal=1) + t.w,
    "tril of bool": lambda t: torch.ones(4, 8, dtype=torch.bool).tril() & t.m,
    "clamp": lambda t: t.x.clamp(-0.5, 0.5),
    "clamp int": lambda t: t.i.clamp(1, 3),
    "clamp int min": lambda t: t.i.clamp(min=2),
    "clamp max": lambda t: t.x.clamp(max=0.1),
    "clamp tensor": lambda t: t.x.clamp(min=t.w),
    "minimum": lambda t: torch.min(t.x, t.w),
    "minimum of int and float": lambda t: torch.min(t.i[:, :, None, None], t.x),
    "maximum": lambda t: torch.max(t.i, t.i.mT.reshape(2, 3)),
    "diff": lambda t: t.x.diff(dim=-1),
    "second diff of ints": lambda t: t.i.diff(n=2, dim=1, prepend=t.i[:, :1] - 1),
    "diff of bool": lambda t: t.m.diff(),
    "ne of bool": lambda t: t.m != t.m[:1],
    "eq of bool": lambda t: t.m == t.m[:1],
    "logical_and of ints": lambda t: torch.logical_and(t.i, t.i > 1),
    "bitwise_or of bool": lambda t: t.m | ~t.m[:1],
    "bitwise_and of ints": lambda t: t.i & (t.i + 1),
    "bitwise_and of bool and int": lambda t: t.m[:, 0, 0, :3] & t.i,
    "isin": lambda t: torch.isin(t.i, torch.tensor([1, 3])),
    "to float": lambda t: t.m.to(t.x.dtype),
    "type_as": lambda t: t.i.type_as(t.x),
    "to other": lambda t: t.i.to(t.x),
    "to itself": lambda t: t.x.to(t.x.dtype).contiguous() + t.x.detach(),
    "softmax": lambda t: t.x.softmax(-1),
    "softmax of dim 1": lambda t: t.x.softmax(1),
    "softmax in float32": lambda t: F.softmax(t.x, -1, dtype=torch.float32).to(t.x.dtype),
    "softmax of a long row": lambda t: (t.w[0] * 0).expand(4096).softmax(-1),
    "log_softmax": lambda t: t.x.log_softmax(-1),
    "layer_norm": lambda t: F.layer_norm(t.x, (8,), t.w, t.w, 1e-3),
    "layer_norm without weight": lambda t: F.layer_norm(t.x, (4, 8)),
    "layer_norm without bias": lambda t: F.layer_norm(t.x, (8,), t.w),
    "rms_norm": lambda t: F.rms_norm(t.x, (8,), t.w, 1e-3),
    "rms_norm without eps": lambda t: F.rms_norm(t.x * 1e-3, (8,), t.w),
    "rms_norm without weight": lambda t: F.rms_norm(t.x, (4, 8), eps=1e-6),
    "rms_norm by hand": lambda t: t.x * torch.rsqrt(t.x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(t.x.dtype),
    "norm of one huge number": lambda t: (t.x[..., :1] * 1e20).norm(2, -1) * 1e-20 + t.x[..., 0],
    "norm over one row and column": lambda t: torch.linalg.vector_norm(t.x[:1, :, :, :1] * 1e20, 3, (0, -1)) * 1e-20,
    "group_norm": lambda t: F.group_norm(t.x, 3, eps=1e-4),
    "gelu": lambda t: F.gelu(t.x),
    "gelu tanh": lambda t: F.gelu(t.x, approximate="tanh"),
    "silu": lambda t: F.silu(t.x),
    "relu": lambda t: F.relu(t.x),
    "sigmoid": lambda t: t.x.sigmoid(),
    "cos and sin": lambda t: t.x.cos() + t.x.sin(),
    "linear": lambda t: F.linear(t.x, t.x[0, 0], t.w[:4]),
    "linear without bias": lambda t: F.linear(t.x, t.x[0, 0]),
    "matmul": lambda t: t.x @ t.x.mT,
    "matmul with vector": lambda t: t.x @ t.w,
    "addmm": lambda t: torch.addmm(t.w, t.x[0, 0].mT, t.x[0, 0], beta=0.5, alpha=2),
    "addmm without bias": lambda t: torch.addmm(t.w, t.x[0, 0].mT, t.x[0, 0], beta=0),
    "baddbmm": lambda t: torch.baddbmm(t.x[0] @ t.x[0].mT, t.x[1], t.x[1].mT, beta=0.5, alpha=0.3),
    "einsum scores": lambda t: torch.einsum("bhqd,bhkd->bhqk", t.x, t.x),
    "einsum permuted": lambda t: torch.einsum("bqhd,bkhd->bhqk", t.x, t.x),
    "einsum merged": lambda t: torch.einsum("bhqd,hqe->bde", t.x, t.x[0]),
    "einsum ellipsis": lambda t: torch.einsum("...qd,...kd->...qk", t.x, t.x[0]),
    "einsum implicit": lambda t: torch.einsum("ij,jk", t.x[0, 0], t.x[0, 0].mT),
    "einsum outer": lambda t: torch.einsum("i,j->ij", t.w, t.w),
    "einsum transposed": lambda t: torch.einsum("bhqd->dbqh", t.x),
    "einsum diagonal": lambda t: torch.einsum("...qq->...q", t.x[..., :4]),
    "einsum sum": lambda t: torch.einsum("bhqd->bd", t.x),
    "cat": lambda t: torch.cat([t.x, t.i[:, :, None, None].expand(2, 3, 4, 1)], -1),
    "cat with an empty part": lambda t: torch.cat([t.x * 2, t.x[..., 8:]], -1),
    "cat with nothing": lambda t: torch.cat([t.x[0, 0, 0, :0], t.x, t.x], 1),
    "expand": lambda t: t.x[:, :1].expand(-1, 5, -1, -1),
    "repeat": lambda t: t.x.repeat(1, 2, 1, 1),
    "repeat_interleave": lambda t: t.x.repeat_interleave(2, dim=1),
    "roll": lambda t: t.x.roll(1, 2),
    "flip": lambda t: t.x.flip(1, 3),
    "chunk": lambda t: torch.cat([-b for b in t.x.chunk(3, -1)], -1),
    "split": lambda t: torch.stack(t.x.split(4, -1), 1),
    "split with a rest": lambda t: torch.cat([-b for b in t.x.split(3, 3)], -1),
    "split with sizes": lambda t: t.x.split([1, 5, 2], -1)[1],
    "chunk into fewer": lambda t: torch.cat([-b for b in t.x.chunk(3, 2)], 2),
    "stack of two dtypes": lambda t: torch.stack([t.x[0, 0], t.i[0, 0].expand(4, 8)], -1),
    "unbind": lambda t: t.x.unbind(1)[2],
    "unflatten": lambda t: t.x.unflatten(-1, (2, 4)).flatten(1, 2),
    "transpose": lambda t: t.x.transpose(-3, 3) + t.x[0, 0, 0, 0],
    "transpose of a matrix": lambda t: t.x[0, 0].t() @ t.x[0, 0],
    "transpose of a vector": lambda t: t.w.t(),
    "permute": lambda t: t.x.permute(0, 2, 1, 3).reshape(2, 4, 24),
    "squeeze": lambda t: t.x[:, :1].squeeze(1).unsqueeze(-1),
    "squeeze keeps": lambda t: t.x.squeeze(1),
    "pad": lambda t: F.pad(t.x, (1, 2), value=1.0),
    "outer": lambda t: torch.outer(t.w, t.w),
    "one_hot": lambda t: F.one_hot(t.i, 5),
    "conv1d": lambda t: F.conv1d(t.x[0], t.x[1, :, :, :3].mT.reshape(3, 4, 3), t.w[:3]),
    "conv2d": lambda t: F.conv2d(t.x, t.x[:, :, :2, :2], t.w[:2], stride=2),
    "conv3d": lambda t: F.conv3d(t.x[None].transpose(1, 2), t.x[:, :, None, :2, :2], t.w[:2], stride=(1, 2, 2)),
    "avg_pool": lambda t: F.adaptive_avg_pool2d(t.x, (1, 1)),
    "dropout off": lambda t: F.dropout(t.x, 0.5, training=False),
    "in place": lambda t: (t.x * 1).add_(1).mul_(t.w),
    "in place after a reader": lambda t: _changed_after(t.x * 2, lambda y: y * 3, t.w),
    "in place after a view": lambda t: _changed_after(t.x * 2, lambda y: y.transpose(0, 1), t.w),
    "in place after a view of a view": lambda t: _changed_after(t.x * 2, lambda y: y[0].unsqueeze(0), t.w),
    "in place in a view": lambda t: _changed_view(t.x * 2, t.w),
    "in place twice": lambda t: (lambda y: (y.add_(t.w), y.mul_(t.w), y)[2] - 1)(t.x * 2),
    "in place of a narrower dtype": lambda t: (t.x * 2).add_(t.w.float()),
    "into another": lambda t: _written_into(t.x, t.w, t.x * 2),
    "slice assignment": lambda t: _assigned(t),
}
# What has no converter, or changes memory that another tensor shares: decomposed before it is converted.
RETRACED = {
    *("all dim", "var", "std", "isin"),
    *("linspace", "eye", "tril", "triu of ones", "tril of bool"),
    *("masked_fill_ in place", "slice assignment", "in place after a view", "in place after a view of a view"),
    *("in place in a view", "into another"),
    *("group_norm", "repeat_interleave", "unbind", "pad", "outer"),
}
DIRECT = OPERATORS.keys() - RETRACED
# The distance of 1 to the next number: errors are counted in units of the largest value.
UNIT = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def _assigned(t):
    y = t.x.clone()
    y[:, 0] = 2.0
    return y


def _changed_after(y, use, by):
    used = use(y)
    y.add_(by)
    return used.sum((0, 1, 2, 3)) + y


def _changed_view(y, by):
    y[:, 1].add_(by)
    return y


def _written_into(x, y, out):
    z = x * 1
    torch.add(z, y, out=out)
    return out * z


class Table(torch.nn.Module):
    def __init__(self, names):
        super().__init__()
        self.names = [name for name in OPERATORS if name in names]

    def forward(self, x, w, i, m):
        return {name: OPERATORS[name](SimpleNamespace(x=x, w=w, i=i, m=m)) for name in self.names}


def arguments(dtype):
    torch.manual_seed(0)
    return (
        torch.randn(2, 3, 4, 8).to(dtype),
        torch.randn(8).to(dtype),
        torch.randint(0, 5, (2, 3)),
        torch.rand(2, 1, 4, 8) > 0.4,
    )


@pytest.fixture(scope="module", params=UNIT, ids=lambda dtype: str(dtype).removeprefix("torch."))
def results(request):
    """What PyTorch gives and what the compiled import gives for the whole table, in one dtype."""
    args, expected, got = arguments(request.param), {}, {}
    for names in (DIRECT, RETRACED):
        model = Table(names)
        with torch.no_grad():
            expected |= model(*args)
        got |= compile_imported(import_model(model, args))(*args)
    return request.param, expected, got


@pytest.mark.parametrize("name", OPERATORS)
def test_operator(name, results):
    dtype, expected, got = results
    want = expected[name]
    largest = want.double().nan_to_num(0, 0, 0).clamp(-1e4, 1e4).abs().max().item()
    assert largest_error(got[name], want) <= 8 * UNIT[dtype] * max(1.0, largest)


def test_most_operators_need_no_second_trace():
    args, converters = arguments(torch.float32), Importer().convert_map
    is_direct = lambda names: try_direct(export_model(Table(names), args, {}), converters)
    assert is_direct(DIRECT) and not [name for name in RETRACED if is_direct([name])]


def test_a_program_that_is_decomposed_after_all_computes_the_same():
    """The first sum is taken out of place before the second one turns out to change what another tensor shares."""

    class Both(torch.nn.Module):
        def forward(self, x, w):
            first = x * 2
            used = first * 3
            first.add_(w)
            return used + first + _changed_view(x * 1, w)

    x, w = arguments(torch.float32)[:2]
    assert largest_error(compile_imported(import_model(Both(), (x, w)))(x, w), Both()(x, w)) < 1e-5


def test_an_operator_of_somebody_else_that_changes_its_input_is_not_taken_for_pytorch_s():
    library = torch.library.Library("stof_tests", "DEF")
    library.define("add_(Tensor(a!) x, Tensor y) -> ()")
    library.impl("add_", lambda x, y: x.sub_(y), "CompositeExplicitAutograd")

    class Theirs(torch.nn.Module):
        def forward(self, x, w):
            y = x * 1
            torch.ops.stof_tests.add_(y, w)
            return y * 2

    x, w = arguments(torch.float32)[:2]
    with pytest.raises(StofError):
        import_model(Theirs(), (x, w))


def test_no_operator_has_two_converters():
    """But exp, which is a pivot of attention in place of the elementwise operator that its table makes."""
    tables = [operators for name, operators in vars(table).items() if name.endswith("CONVERTERS")]
    names = [name for operators in tables for name in operators if name != "exp.default"]
    assert len(names) > 300 and len(names) == len(set(names))
