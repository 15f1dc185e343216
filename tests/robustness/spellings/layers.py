"""What stands around attention: norms, activations, gates, rotary embeddings, products, convolutions, pooling."""

from tests.robustness.spellings.builder import Builder
from tests.robustness.spellings.values import floats

NORMS = (
    "F.layer_norm({x}, {x}.shape[-1:], {w}, {w2}, {eps})",
    "F.layer_norm({x}, {x}.shape[-1:])",
    "F.layer_norm({x}, {x}.shape[-2:])",
    "F.rms_norm({x}, {x}.shape[-1:], {w}, {eps})",
    "F.rms_norm({x}, {x}.shape[-1:])",
    "({x} - {x}.mean(-1, keepdim=True)) / ({x}.std(-1, keepdim=True) + {eps}) * {w} + {w2}",
    "({x} - {x}.mean(-1, keepdim=True)) / torch.sqrt({x}.var(-1, keepdim=True, unbiased=False) + {eps})",
    "({x} - {x}.mean(-1, keepdim=True)) * torch.rsqrt({x}.var(-1, keepdim=True) + {eps}) * {w}",
    "({x} - {x}.mean({axis}, keepdim=True)) * torch.rsqrt({x}.var({axis}, keepdim=True, unbiased=False) + {eps})",
    "{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + {eps}) * {w}",
    "{w} * ({x} * torch.rsqrt(({x} * {x}).mean(-1, keepdim=True) + {eps}))",
    "{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + {eps}) * (1 + {w})",
    "{x} / torch.sqrt({x}.square().mean(-1, keepdim=True) + {eps}) * {w}",
    "{x} / ({x}.norm(dim=-1, keepdim=True) + {eps})",
    "{x} / ({x}.norm(2, dim=-1, keepdim=True) * {x}.shape[-1] ** -0.5 + {eps}) * {w}",
    "{x} / torch.sqrt({x}.pow(2).mean({axis}, keepdim=True)).clamp(min={eps})",
    "{x} * ({x}.pow(2).mean(-1, keepdim=True) + {eps}) ** -0.5 * {w}",
    "{x} * torch.rsqrt({x}.pow(2).sum(-1, keepdim=True) + {eps})",
    "{x} * torch.rsqrt({x}.pow(3).mean(-1, keepdim=True).abs() + {eps})",
    "F.normalize({x}, dim=-1, eps={eps})",
    "F.normalize({x}, p=1, dim={axis})",
    "({x}.float() * torch.rsqrt({x}.float().pow(2).mean(-1, keepdim=True) + {eps})).type_as({x}) * {w}",
    "(lambda m: (({x} - m) * ((({x} - m) ** 2).mean(-1, keepdim=True) + {eps}).rsqrt()) * {w} + {w2})({x}.mean(-1, keepdim=True))",  # noqa: E501
    "(lambda u, s: ({x} - u) / torch.sqrt(s + {eps}))({x}.mean(-1, keepdim=True), ({x} - {x}.mean(-1, keepdim=True)).pow(2).mean(-1, keepdim=True))",  # noqa: E501
    "({x} - {x}.mean()) / ({x}.var() + {eps}).sqrt()",
    "F.layer_norm({x} + {y}, {x}.shape[-1:], {w}, {w2}, {eps})",
    "F.layer_norm({x}, {x}.shape[-1:], {w}, {w2}, {eps}) + {x}",
    "F.instance_norm({x})",
    "F.batch_norm({x}, {x}.mean((0, *range(2, {x}.ndim))), {x}.var((0, *range(2, {x}.ndim)), unbiased=False))",
)
ACTIVATIONS = (
    "F.relu({x})",
    "F.gelu({x})",
    'F.gelu({x}, approximate="tanh")',
    "F.silu({x})",
    "torch.sigmoid({x})",
    "torch.tanh({x})",
    "F.mish({x})",
    "F.elu({x})",
    "F.selu({x})",
    "F.celu({x}, 0.5)",
    "F.leaky_relu({x}, 0.1)",
    "F.hardswish({x})",
    "F.hardsigmoid({x})",
    "F.relu6({x})",
    "F.softplus({x})",
    "F.softplus({x}, 2.0, 5.0)",
    "F.softsign({x})",
    "F.logsigmoid({x})",
    "F.hardtanh({x}, -0.5, 0.7)",
    "F.threshold({x}, 0.1, -2.0)",
    "{x} * torch.sigmoid({x})",
    "{x} * torch.sigmoid(1.702 * {x})",
    "{x} * torch.sigmoid(1.7 * {x})",
    "0.5 * {x} * (1 + torch.erf({x} / math.sqrt(2)))",
    "0.501 * {x} * (1 + torch.erf({x} / math.sqrt(2)))",
    "{x} * 0.5 * (1.0 + torch.erf({x} / 1.41421))",
    "{x} * 0.5 * (1.0 + torch.erf({x} / 1.4))",
    "0.5 * {x} * (1 + torch.tanh(math.sqrt(2 / math.pi) * ({x} + 0.044715 * {x} ** 3)))",
    "0.5 * {x} * (1 + torch.tanh(0.7978845608 * ({x} + 0.044715 * torch.pow({x}, 3.0))))",
    "0.5 * {x} * (1 + torch.tanh(0.7978845608 * {x} * (1 + 0.044715 * {x} * {x})))",
    "0.5 * {x} * (1 + torch.tanh(0.79 * ({x} + 0.044715 * {x} ** 3)))",
    "0.5 * {x} * (1 + torch.tanh(0.7978845608 * ({x} + 0.0447 * {x} ** 2)))",
    "{y} * 0.5 * (1 + torch.erf({x} / math.sqrt(2)))",
    "F.relu({x}) ** 2",
    "F.relu({x}).square()",
    "torch.relu({x} - 1)",
    "{x}.clamp(min=0)",
    "{x}.clamp(-1, 1)",
    "torch.maximum({x}, torch.zeros_like({x}))",
    "torch.clamp({x}, max=0.3)",
    "torch.where({x} > 0, {x}, 0.01 * {x})",
    "{x} * ({x} > 0)",
    "{x} * torch.sigmoid({x}.flip(-1))",
    "torch.exp({x})",
    "torch.log1p({x}.abs())",
    "{x}.sin()",
    "{x} ** 3",
    "{x}.abs().sqrt()",
    "torch.erf({x})",
    "{x}.exp() / (1 + {x}.exp())",
    "1 / (1 + torch.exp(-{x}))",
    "{x} / (1 + torch.exp(-{x}))",
    "{x} * torch.tanh(F.softplus({x}))",
    "F.gelu({x}).to(torch.bfloat16).to(DTYPE)",
    "torch.softmax({x}, -1)",
    "torch.softmax({x}, {axis})",
    "F.glu({x}, -1)",
    "F.log_softmax({x}, {axis})",
    "F.prelu({x}, torch.tensor([0.25], dtype=DTYPE))",
    "{x}.expm1()",
    "{x}.sign()",
    "{x}.ceil()",
    "{x}.floor()",
    "{x}.round()",
    "{x}.frac()",
    "{x}.fmod(0.7)",
    "{x}.remainder(0.7)",
    "torch.rsqrt({x}.abs() + 1)",
    "{x}.atan()",
    "{x}.sinh()",
)
GATES = (
    "F.silu({g}) * {u}",
    "F.gelu({g}) * {u}",
    "{u} * torch.sigmoid({g})",
    "F.relu({g}) * {u}",
    'F.gelu({g}, approximate="tanh") * {u}',
    "F.silu({g}[..., :1]) * {u}",
    "F.silu({g}[:, :1]) * {u}",
    "F.silu({g}.mean(-1, keepdim=True)) * {u}",
    "F.silu({g}) * {g}",
    "F.silu({g} * 1.1) * {u}",
    "{g} * {u}",
    "F.silu({g}).mul({u})",
    "{g} * torch.sigmoid({g}) * {u}",
    "F.silu({g}) + {u}",
    "F.silu({g}) * {u}.flip(-1)",
    "torch.sigmoid({g}) * {g} * {u}",
    "torch.tanh({g}) * {u}",
    "(F.silu({g}) * {u}).clamp(-7, 7)",
    "{g}.clamp(max=7.0) * torch.sigmoid(1.702 * {g}.clamp(max=7.0)) * ({u}.clamp(-7, 7) + 1)",
    "F.silu({g}).half().to(DTYPE) * {u}",
    "torch.where({g} > 0, {u}, 0.0)",
    "F.silu({g}) * ({u} > 0)",
)
HALVES = (
    "{h}.chunk(2, -1)",
    "{h}.split({h}.shape[-1] // 2, -1)",
    "({h}[..., : {h}.shape[-1] // 2], {h}[..., {h}.shape[-1] // 2 :])",
    "({h}[..., ::2], {h}[..., 1::2])",
    "{h}.unflatten(-1, (2, -1)).unbind(-2)",
    "{h}.unflatten(-1, (-1, 2)).unbind(-1)",
    "{h}.chunk(2, -1)[::-1]",
    "({h}, {h})",
)
POOLS = (
    "F.avg_pool1d({x}, 2, ceil_mode=True)",
    "F.max_pool1d({x}, 2)",
    "F.avg_pool1d({x}, 3, 1, 1)",
    "F.avg_pool1d({x}, 3, 1, 1, count_include_pad=False)",
    "F.adaptive_avg_pool1d({x}, 1)",
    "F.max_pool1d({x}, 3, 2, 1)",
    "{x}.mean(1)",
    "{x}.amax({axis})",
    "{x}.max({axis}).values",
    "{x}.sum({axis}, keepdim=True)",
    "{x}.cumsum({axis})",
    "{x}.flip({axis}).cumsum({axis}).flip({axis})",
    "{x}.mean((0, -1), keepdim=True)",
    "{x}.logsumexp({axis})",
    "{x}.prod(-1)",
    "{x}.var({axis})",
    "{x}.std({axis}, unbiased=False)",
    "{x}.argmax({axis})",
    "{x}.amin(-1, keepdim=True)",
    "{x}.norm(dim={axis})",
    "{x}.any({axis})",
    "{x}.min({axis}).indices",
    "{x}.topk(1, -1).values",
    "{x}.sort(-1).values",
    "{x}.cumprod(-1)",
    "{x}.argsort(dim=-1, stable=True)",
    "{x}.median(-1).values",
    "{x}.all(-1)",
    "{x}.count_nonzero(-1)",
)


def _form(b: Builder, forms, x: str, **more) -> str:
    """One of the forms with what it names: weights {w}, {w2}, another tensor {y}, {axis}, {eps}."""
    form, width = b.pick(forms), b.size(b.value(x).shape[-1])
    given = {name: b.weights(width) for name in ("w", "w2") if "{" + name + "}" in form}
    given["y"] = another(b, x) if "{y}" in form else ""
    eps = b.pick(("1e-5", "1e-6", "1e-12", "1e-3", "0.1", "1e-8"))
    return b.let(form.format(x=x, axis=b.rng.randrange(-b.value(x).ndim, b.value(x).ndim), eps=eps, **given, **more))


def another(b: Builder, x: str) -> str:
    """A float tensor that goes with x: one of those that are there, or an input."""
    shape = b.value(x).shape
    there = [
        name
        for name, value in b.space.items()
        if name[0] in "vx"
        and name[1:].isdigit()
        and getattr(value, "shape", None) == shape
        and value.is_floating_point()
    ]
    there = [name for name in there if b.knows(name)]
    if there and b.chance(0.7):
        return b.pick(there)
    sizes = b.shape(x)
    if b.chance(0.3):
        sizes[b.rng.randrange(len(sizes))] = "1"
    return b.input(floats(b.rng, ", ".join(sizes)))


def norm(b: Builder, x: str) -> str:
    if b.chance(0.15):
        width = b.size(b.value(x).shape[1])
        kind = b.pick(
            (
                "nn.BatchNorm1d({c})",
                "nn.GroupNorm(1, {c})",
                "nn.GroupNorm({c}, {c}, affine=False)",
                "nn.LayerNorm({l})",
                "nn.RMSNorm({l}, eps=1e-6)",
                "nn.LayerNorm({l}, elementwise_affine=False)",
                "nn.LayerNorm({l}, bias=False)",
                "nn.InstanceNorm1d({c}, affine=True)",
            )
        )
        m = b.state(kind.format(c=width, l=b.size(b.value(x).shape[-1])), "module")
        return b.let(f"{m}({x})")
    return _form(b, NORMS, x)


def activation(b: Builder, x: str) -> str:
    return _form(b, ACTIVATIONS, x)


def pool(b: Builder, x: str) -> str:
    return _form(b, POOLS, x)


def residual(b: Builder, x: str) -> str:
    return b.let(
        b.pick(
            (
                "{x} + {y}",
                "{y} + {x}",
                "{x} * 0.5 + {y}",
                "torch.add({x}, {y}, alpha=0.3)",
                "{x} - {y}",
                "{x} * {y}",
                "torch.lerp({x}, {y}, 0.3)",
                "{x} / ({y}.abs() + 1)",
                "torch.maximum({x}, {y})",
                "torch.atan2({x}, {y})",
                "torch.addcmul({x}, {y}, {y}, value=0.5)",
            )
        ).format(x=x, y=another(b, x))
    )


def product(b: Builder, x: str) -> str:
    """A linear layer, spelled in some way."""
    i = b.size(b.value(x).shape[-1])
    o = b.pick(("C", "D", "2 * C", "7", "1", i))
    form = b.pick(
        (
            "module",
            "module",
            "F.linear({x}, {w})",
            "{x} @ {w}.T",
            "torch.matmul({x}, {w}.t()) + {v}",
            "F.linear({x}, {w}, {v})",
            'torch.einsum("...i,oi->...o", {x}, {w})',
            "torch.addmm({v}, {x}.flatten(0, -2), {w}.t(), beta=0.5, alpha=2)",
        )
    )
    if form == "module":
        return b.let(f"{b.state(f'nn.Linear({i}, {o}, bias={b.chance(0.7)})', 'module')}({x})")
    return b.let(form.format(x=x, w=b.weights(o, i, scale=0.3), v=b.weights(o)))


def mlp(b: Builder, x: str) -> str:
    width = b.size(b.value(x).shape[-1])
    h = activation(b, product(b, x))
    m = b.state(f"nn.Linear({b.value(h).shape[-1]}, {width})", "module")
    h = b.let(f"{m}({h})")
    return b.let(f"{x} + {h}") if b.chance(0.6) else h


def gate(b: Builder, x: str) -> str:
    """A gated unit: halves of one product, two products, or two tensors."""
    if b.chance(0.6):
        width = b.size(b.value(x).shape[-1])
        m = b.state(f"nn.Linear({width}, 2 * {b.pick(('C', 'D', width))}, bias={b.chance(0.5)})", "module")
        h, g, u = b.let(f"{m}({x})"), b.name("g"), b.name("u")
        b.do(f"{g}, {u} = {b.pick(HALVES).format(h=h)}")
    elif b.chance(0.5):
        g, u = product(b, x), product(b, x)
    else:
        g, u = x, another(b, x)
    return b.let(b.pick(GATES).format(g=g, u=u))


def convolution(b: Builder, x: str) -> str:
    if b.value(x).ndim == 4:
        c = b.size(b.value(x).shape[1])
        m = b.state(
            b.pick(
                (
                    "nn.Conv2d({c}, 4, 2, 2)",
                    "nn.Conv2d({c}, 3, 3, padding=1)",
                    "nn.Conv2d({c}, {c}, 3, padding=1, groups={c})",
                    "nn.Conv2d({c}, 4, 1, bias=False)",
                    "nn.ConvTranspose2d({c}, 2, 2, 2)",
                )
            ).format(c=c),
            "module",
        )
        return b.let(f"{m}({x})" + b.pick(("", ".flatten(2).transpose(1, 2)")))
    if b.value(x).ndim != 3:
        x = b.let(f"{x}.flatten(2)" if b.value(x).ndim > 3 else f"{x}.unsqueeze(0)")
    turned = b.chance(0.6)
    c = b.size(b.value(x).shape[2 if turned else 1])
    m = b.state(
        b.pick(
            (
                "nn.Conv1d({c}, 5, 3, padding=1)",
                "nn.Conv1d({c}, {c}, 3, padding=1, groups={c})",
                "nn.Conv1d({c}, 4, 2, stride=2)",
                "nn.Conv1d({c}, 4, 1)",
                "nn.Conv1d({c}, 3, 2, dilation=2, padding=2)",
            )
        ).format(c=c),
        "module",
    )
    return b.let(f"{m}({x}.transpose(1, 2)).transpose(1, 2)" if turned else f"{m}({x})")


ROTATIONS = (
    "{x} * {cos} + torch.cat((-{x}[..., {x}.shape[-1] // 2 :], {x}[..., : {x}.shape[-1] // 2]), -1) * {sin}",
    "(lambda a, c: torch.cat([a * {cos}[..., : {x}.shape[-1] // 2] - c * {sin}[..., : {x}.shape[-1] // 2], c * {cos}[..., : {x}.shape[-1] // 2] + a * {sin}[..., : {x}.shape[-1] // 2]], -1))(*{x}.chunk(2, -1))",  # noqa: E501
    "{x} * {cos} + torch.stack((-{x}[..., 1::2], {x}[..., ::2]), -1).flatten(-2) * {sin}",
    "torch.view_as_real(torch.view_as_complex({x}.float().unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like({angle}), {angle})).flatten(-2).type_as({x})",  # noqa: E501
    "(lambda a, c: torch.stack([a * {angle}.cos() - c * {angle}.sin(), a * {angle}.sin() + c * {angle}.cos()], -1).flatten(-2))({x}[..., ::2], {x}[..., 1::2])",  # noqa: E501
    "{x} * {cos} + {x}.roll({x}.shape[-1] // 2, -1) * {sin}",
    "{x} * {cos} + torch.cat(({x}[..., {x}.shape[-1] // 2 :], -{x}[..., : {x}.shape[-1] // 2]), -1) * {sin}",
    "{x} * {cos} - torch.cat((-{x}[..., {x}.shape[-1] // 2 :], {x}[..., : {x}.shape[-1] // 2]), -1) * {sin}",
    "torch.cat([{x}[..., :2] * {cos}[..., :2] + {x}[..., :2].flip(-1) * {sin}[..., :2], {x}[..., 2:]], -1)",
)


def rotary(b: Builder, x: str) -> str:
    """Rotary embedding of the last axis along the one before it, with tables made in the graph or kept."""
    b.features.append("rotary")
    length, width = (b.size(n) for n in b.value(x).shape[-2:])
    base = f"torch.arange({length})[:, None] * 10000.0 ** (-torch.arange(0, {width}, 2) / {width})"
    angle = b.state(base) if b.chance(0.5) else b.let(f"({base}).to(DTYPE)")
    form = b.pick(ROTATIONS)
    if "{cos}" not in form:
        return b.let(form.format(x=x, angle=angle))
    full = b.let(b.pick((f"torch.cat(({angle}, {angle}), -1)", f"{angle}.repeat_interleave(2, -1)")))
    names = dict(cos=b.let(f"{full}.cos()"), sin=b.let(f"{full}.sin()"))
    if b.chance(0.25):
        out = b.name()
        b.do(f"{out} = torch.empty_like({x})")
        half = f"{x}.shape[-1] // 2"
        c, s = f"{names['cos']}[..., : {half}]", f"{names['sin']}[..., : {half}]"
        b.do(f"{out}[..., 0::2] = {x}[..., 0::2] * {c} - {x}[..., 1::2] * {s}")
        b.do(f"{out}[..., 1::2] = {x}[..., 0::2] * {s} + {x}[..., 1::2] * {c}")
        return out
    return b.let(form.format(x=x, **names))
