"""Views, slices, assignments to slices, in-place writes, casts, integers, arithmetic of mixed dtypes."""

from tests.robustness.spellings.builder import Builder, Refused
from tests.robustness.spellings.layers import another
from tests.robustness.spellings.values import bools, integers

VIEWS = (
    "{x}.transpose({a}, {c})",
    "{x}.flip({a})",
    "{x}.roll({n}, {a})",
    "{x}.flatten({i})",
    "{x}.reshape(-1, {last})",
    "{x}.unsqueeze({a})",
    "{x}.narrow({a}, 0, 1)",
    "{x}[..., ::2]",
    "{x}[..., 1::2]",
    "{x}[:, ::2]",
    "{x}[:, -1:]",
    "{x}[:, :-1]",
    "{x}[..., 1:]",
    "{x}[..., :3]",
    "{x}[..., -2:]",
    "{x}.select({a}, 0)",
    "{x}.select({a}, -1)",
    "torch.cat([{x}, {x}], {a})",
    "torch.cat([{x}, {y}], {a})",
    "torch.stack([{x}, {y}], {a})",
    "{x}.unbind({a})[0]",
    "{x}.chunk(2, {a})[-1]",
    "{x}.expand(2, *{x}.shape)",
    "{x}.repeat_interleave(2, {a})",
    "{x}.repeat(*([1] * ({x}.ndim - 1)), 2)",
    "{x}.tile(2)",
    "{x}.movedim({a}, {c})",
    "{x}.index_select({a}, torch.tensor([0, 0]))",
    "{x}[:, torch.tensor([0])]",
    "{x}[torch.arange({x}.shape[0])]",
    "{x}.gather(-1, torch.zeros({x}.shape, dtype=torch.long))",
    "F.pad({x}, (1, 1))",
    "F.pad({x}, (0, 0, 1, 0))",
    "F.pad({x}, (0, 1), value=-3.0)",
    "F.pad({x}, (-1, 1))",
    "{x}.contiguous()",
    "{x}.clone()",
    "{x}.permute(*reversed(range({x}.ndim)))",
    "{x}.take_along_dim({x}.argsort(-1), -1)",
    "{x}.triu()",
    "{x}.tril({n})",
    "{x}.diagonal(dim1=-2, dim2=-1)",
    "{x}.unfold(-1, 2, 1)",
    "{x}.swapaxes({a}, {c})",
    "torch.rot90({x}, 1, ({i}, -1))",
    "{x}.squeeze()",
    "{x}.view(*{x}.shape, 1)",
    "{x}.t() if {x}.ndim == 2 else {x}.mT",
    "{x}.as_strided(({x}.shape[-1],), (1,))",
    "torch.meshgrid({x}.flatten()[:3], {x}.flatten()[:2], indexing='ij')[0]",
    "{x}[None]",
    "{x}[..., None, :]",
    "{x}[0]",
    "{x}[-1]",
    "{x}[:, 0]",
    "{x}[..., 0]",
    "{x}[..., [0, -1]]",
    "torch.flip({x}[..., ::2], (-1,))",
    "{x}.unflatten(-1, (1, -1))",
    "{x}.narrow(-1, {last} - 1, 1)",
    "torch.hstack([{x}, {x}])",
    "F.one_hot({x}.argmax(-1), {last}).to(DTYPE)",
    "{x}.new_zeros({x}.shape) + {x}",
    "{x}.masked_fill({x} > 0.5, 0.0)",
)
# {o} is a copy of x, or x itself where the program has more than one reader of it.
WRITES = (
    "{o}[..., 0::2] = {o}[..., 1::2]",
    "{o}[..., 0::2] = {x2}[..., 0::2]",
    "{o}[..., 1::2] = 0",
    "{o}[..., 1::2] = -{x2}[..., 1::2]",
    "{o}[..., ::3] = 1.5",
    "{o}[:, ::2] = {x2}[:, ::2] * 2",
    "{o}[:, 0] = 0.0",
    "{o}[:, -1] = {x2}[:, 0]",
    "{o}[..., :2] = {x2}[..., -2:]",
    "{o}[..., 1:] += {x2}[..., :-1]",
    "{o}[..., ::2] *= 2",
    "{o}[0] = 3",
    "{o}[:, 1:] = {x2}[:, :-1]",
    "{o}.add_({x2})",
    "{o}.mul_(0.5)",
    "{o}.masked_fill_({o} > 0.5, -1.0)",
    "{o}.clamp_(-1, 1)",
    "{o}.copy_({x2}[..., :1])",
    "{o}[..., 0::2].copy_({x2}[..., 0::2])",
    "{o}.transpose(-1, -2).add_(1)",
    "{o}.select(-1, 0).fill_(2)",
    "{o}.index_copy_(0, torch.tensor([0]), {x2}[:1])",
    "{o}.index_copy_(-1, torch.tensor([0, 1]), {x2}[..., :2])",
    "{o}.index_add_(-1, torch.tensor([0, 0]), {x2}[..., :2])",
    "{o}.index_fill_(-1, torch.tensor([0]), 4.0)",
    "{o}.scatter_(-1, torch.zeros({o}.shape, dtype=torch.long)[..., :1], {x2}[..., :1])",
    "{o}.scatter_add_(-1, torch.zeros({o}.shape, dtype=torch.long), {x2})",
    "{o}[{o} > 0.5] = 0.0",
    "{o}[:, torch.tensor([0, -1])] = 1.0",
    "{o}[..., torch.tensor([1, 0])] = {x2}[..., :2]",
    "{o}.view(-1)[::2] = 0",
    "{o}.zero_()",
    "{o}.fill_(0.3)",
    "{o}.flatten()[1:].mul_(2)",
    "{o}.sub_({x2}.mean())",
    "{o}.relu_()",
    "{o}.addcmul_({x2}, {x2}, value=0.1)",
    "{o}.narrow(-1, 0, 1).exp_()",
    "{o}[..., -1:] = {x2}[..., :1]",
    "{o}.diagonal(dim1=-2, dim2=-1).add_(1)",
    "{o}.triu_()",
    "{o}[:, ::2, ...] = {o}[:, ::2, ...].flip(-1)",
    "{o}[..., 1::3] -= {x2}[..., 1::3]",
    "{o}[..., {x2}.shape[-1] // 2 :] = {x2}[..., : {x2}.shape[-1] - {x2}.shape[-1] // 2]",
    "{o}.index_put_((torch.tensor([0]),), {x2}[0])",
    "{o}.index_put_((torch.tensor([0, 0]),), {x2}[:1], accumulate=True)",
    "{o}.swapaxes(0, 1)[0] = 2.0",
    "{o}.unsqueeze(0)[0, ..., 0] = 1",
    "{o}.sigmoid_()",
    "{o}[..., 0:-1:2] = 7",
    "{o}[-1:] = {x2}[:1]",
    "{o}.neg_()",
    "{o}.squeeze(0).mul_(3)",
    "{o}.expand(1, *{o}.shape)[0].add_(1)",
    "{o}.tanh_().add_(1).mul_({x2})",
)
CASTS = (
    "{x}.int()",
    "{x}.long()",
    "{x}.bool()",
    "{x}.half()",
    "{x}.to(torch.bfloat16)",
    "{x}.double()",
    "{x}.float()",
    "{x}.to(torch.int8)",
    "{x}.abs().to(torch.uint8)",
    "{x} > 0.2",
    "{x} <= 0",
    "{x} == {x}.amax(-1, keepdim=True)",
    "{x}.half().float()",
    "{x}.int().float()",
    "{x}.bool().to(DTYPE)",
    "{x} != 0",
    "{x}.isnan()",
    "{x}.isfinite()",
    "{x}.to(torch.int16)",
    "{x} >= {x}.mean(-1, keepdim=True)",
    "{x}.sign().int()",
    "{x}.logical_not()",
    "{x}.round().long()",
)
ARITHMETIC = (
    "{m} * {c}",
    "{m} + {c}",
    "{c} - {m}",
    "{m} / {c}",
    "{m} // 2",
    "{m} % 3",
    "{m} ** 2",
    "{m} * {x}",
    "{x} + {m}",
    "{x} - {m}",
    "{x} / ({m} + 5)",
    "torch.where({m} > 0, {x}, {c})",
    "torch.where({m} > 0, {c}, {x})",
    "torch.where({m} != 0, {m}, {c})",
    "torch.where({x} > {c}, 1, 0) * {m}",
    "{m} > {c}",
    "{m} == {c}",
    "{m} < {x}",
    "-({m} + 0)",
    "{m}.sum({a})",
    "{m}.float().mean({a})",
    "{m}.cumsum({a})",
    "{m}.float() @ {m}.float().mT",
    "{m}.abs() + 1",
    "{m} & ({m} + 1)",
    "{m} | 1",
    "{m} ^ 3",
    "~({m} > 0)",
    "{m}.sqrt()",
    "{m}.exp()",
    "torch.sigmoid({m})",
    "{m}.sum() * {x}",
    "{m}.clamp({c})",
    "{m}.clamp(min=0.5)",
    "torch.maximum({m}, {m} * 0 + 1)",
    "{m} * True",
    "{m} + True",
    "{m} * torch.tensor({c})",
    "{x} * torch.tensor(2)",
    "{x} + torch.tensor(1.5, dtype=torch.float64)",
    "{m}.to(torch.int8) * 100",
    "{m}.max({a}).values",
    "{m}.argmax({a})",
    "{m}.any({a})",
    "{m}.all()",
    "torch.div({m}, 2, rounding_mode='floor')",
    "torch.div({m}, 2, rounding_mode='trunc')",
    "{m} << 1",
    "{m} >> 1",
    "torch.fmod({m}, 3)",
    "{m}.pow(0.5)",
    "2 ** {m}.float()",
    "torch.cat([{m}.to(DTYPE), {x}], -1)",
    "{m}.prod({a})",
    "{x}.masked_fill({m} > 0, {c})",
    "{x} * ({m} > 0)",
    "F.one_hot({m}.abs().long() % 4, 4)",
    "{x}.gather({a}, {m}.abs().long() % {x}.shape[{a}])",
    "torch.logical_and({m}, {m} > {c})",
    "({m} > 0) + ({m} < 2)",
    "({m} > 0) * ({m} < 2)",
    "({m} > 0).sum({a})",
    "{m} * {m}",
    "{m}.bitwise_not()",
    "torch.add({m}, {m}, alpha=2)",
    "torch.isin({m}, torch.tensor([0, 1]))",
    "{m}.float().softmax(-1)",
    "torch.remainder({m}, -3)",
    "torch.floor_divide({m}, -2)",
    "{m}.sign()",
    "torch.full_like({m}, 2) * {m}",
    "{m} / {m}.abs().clamp(min=1)",
    "{m}.to(DTYPE).log()",
    "{m}.mul(0.7).to({m}.dtype)",
    "torch.minimum({m}.to(DTYPE), {x})",
    "{m}.var({a}) if {m}.is_floating_point() else {m}.float().var({a})",
)


def view(b: Builder, x: str) -> str:
    ndim, form = b.value(x).ndim, b.pick(VIEWS)
    a, c = b.rng.randrange(-ndim, ndim), b.rng.randrange(-ndim, ndim)
    last = b.size(b.value(x).shape[-1])
    y = another(b, x) if "{y}" in form else ""
    return b.let(form.format(x=x, y=y, a=a, c=c, i=b.rng.randrange(ndim), n=b.rng.randint(-2, 3), last=last))


def write(b: Builder, x: str) -> str:
    """One or two writes into x's copy (rarely: into x itself, or into a view that x is read through later)."""
    kind = b.rng.random()
    o = (
        x
        if kind < 0.1 and x.startswith("v")
        else b.let(
            f"{x}.clone()"
            if kind < 0.8
            else b.pick(
                (
                    f"torch.zeros_like({x})",
                    f"torch.empty_like({x}).copy_({x})",
                    f"{x} * 1.0",
                    f"{x}.mT.clone().mT",
                    f"torch.ones({x}.shape, dtype={x}.dtype)",
                )
            )
        )
    )
    for _ in range(b.rng.choice((1, 1, 2))):
        x2 = b.pick((x, x, another(b, x)))
        # PyTorch does not define what a write gives that reads what it writes.
        shared = b.value(x2).untyped_storage().data_ptr() == b.value(o).untyped_storage().data_ptr()
        b.do(b.pick(WRITES).format(o=o, x2=f"{x2}.clone()" if shared else x2))
    if not b.nan and b.value(o).is_floating_point() and b.value(o).isnan().any():
        raise Refused("NaN")
    return b.let(f"{o} * 1") if b.chance(0.2) else o


def cast(b: Builder, x: str) -> str:
    y = b.let(b.pick(CASTS).format(x=x))
    if b.chance(0.6):
        return _arithmetic(b, x, y)
    return y


def integer(b: Builder, x: str) -> str:
    """Arithmetic of an integer or bool tensor, an input or a constant, with x and with scalars."""
    shape = b.shape(x)
    if b.chance(0.3):
        shape[b.rng.randrange(len(shape))] = "1"
    made = (integers if b.chance(0.7) else bools)(b.rng, ", ".join(shape))
    return _arithmetic(b, x, b.input(made) if b.chance(0.7) else b.state(made))


def _arithmetic(b: Builder, x: str, m: str) -> str:
    ndim = b.value(m).ndim
    return b.let(b.pick(ARITHMETIC).format(x=x, m=m, c=b.number(), a=b.rng.randrange(-ndim, ndim)))


def scalar(b: Builder, x: str) -> str:
    form = b.pick(
        (
            "{x} * {c}",
            "{x} + {c}",
            "{c} - {x}",
            "{x} / {n}",
            "{n} / ({x}.abs() + 1)",
            "{x} ** 2",
            "{x}.pow(3)",
            "torch.where({x} > {c}, {x}, {n})",
            "torch.where({x} > {c}, 1.0, {x})",
            "{x} % 2",
            "{x} // 2",
            "{x}.clamp(max={c})",
            "{x} - {x}.amax()",
            "{x} * torch.tensor({c})",
            "{x}.abs() ** 0.5",
            "{c} ** {x}.tanh()",
            "-{x}",
            "{x}.reciprocal()",
        )
    )
    return b.let(form.format(x=x, c=b.number(), n=b.pick(("2", "3.0", "-0.5"))))
