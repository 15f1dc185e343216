"""Attention by hand: how heads, scores, scale, bias, softmax and the product with the values are spelled."""

from tests.robustness.spellings.builder import Builder, Refused
from tests.robustness.spellings.masking import fill, kept, masked
from tests.robustness.spellings.sinks import transposed, with_sink

# q (B, H, S, D) and k (B, H, T, D) to (B, H, S, T).
SCORES = (
    ("{q} @ {k}.transpose(-2, -1)", 6),
    ("torch.matmul({q}, {k}.transpose(2, 3))", 3),
    ("torch.matmul({q}, {k}.permute(0, 1, 3, 2))", 1),
    ("{q}.matmul({k}.mT)", 1),
    ("({k} @ {q}.mT).mT", 1),
    ('torch.einsum("bhqd,bhkd->bhqk", {q}, {k})', 2),
    ('torch.einsum("b h i d, b h j d -> b h i j", {q}, {k})', 1),
    ('torch.einsum("bhkd,bhqd->bhqk", {k}, {q})', 1),
    ("({q}.unsqueeze(-2) * {k}.unsqueeze(-3)).sum(-1)", 1),
    ("torch.bmm({q}.flatten(0, 1), {k}.flatten(0, 1).transpose(1, 2)).view(B, H, S, T)", 2),
    (
        "torch.baddbmm(torch.zeros(1, 1, 1, dtype=DTYPE), {q}.flatten(0, 1), {k}.flatten(0, 1).mT, beta=0, alpha={c3}).view(B, H, S, T)",  # noqa: E501
        1,
    ),
    (
        "torch.baddbmm(torch.ones(B * H, S, T, dtype=DTYPE), {q}.flatten(0, 1), {k}.flatten(0, 1).mT, beta={c2}, alpha={c3}).view(B, H, S, T)",  # noqa: E501
        1,
    ),
    ("(({q} * {c}) @ {k}.transpose(-2, -1))", 2),
    ("{q} @ ({k} / {c}).transpose(-2, -1)", 1),
    ("({q} / D**0.25) @ ({k} / D**0.25).transpose(-2, -1)", 1),
    ("({q} * math.sqrt({c3})) @ ({k} * math.sqrt({c3})).mT", 1),
    ("-({q} @ {k}.mT)", 1),
    ("({q} * {c}) @ ({k} * {c2}).mT", 1),
    ("({q} + {c2}) @ {k}.mT", 1),
    ("torch.cdist({q}, {k}) * -1", 1),
)
NUMBERS = (
    "0.5",
    "D**-0.5",
    "1 / math.sqrt(D)",
    "0.125",
    "2",
    "1",
    "0",
    "0.0",
    "-1.0",
    "-0.3",
    "3",
    "True",
    "10.0",
    "100",
    "1e3",
    "1e-3",
)
SCALES = (
    ("{s} * {c}", 5),
    ("{s} / {n}", 4),
    ("{s} / math.sqrt(D)", 5),
    ("{s}.mul({c})", 1),
    ("{s}.div({n})", 1),
    ("{c} * {s}", 1),
    ("{s} * torch.tensor({c})", 1),
    ("{s} / torch.sqrt(torch.tensor(D))", 1),
    ("{s} / torch.tensor(float(D)).sqrt()", 1),
    ("{s} * {k4}", 1),  # learned, a head
    ("{s} * {k0}", 1),
    ("{s} / {k0}.exp()", 1),
    ("{s} * {i0}", 1),
    ("{s} * {b0}", 1),
    ("{s} * {r4}", 1),  # a row of queries
    ("torch.div({s}, 3, rounding_mode='floor')", 1),
    ("{s} * {k}.shape[-1] ** -0.5", 2),
)
SHIFTS = (
    "{s} + {c}",
    "{s} - {c}",
    "{s} - {s}.mean(-1, keepdim=True)",
    "{s}.clamp(min=-5.0)",
    "{s}.clamp(-3, 3)",
    "{c2} * torch.tanh({s} / {c2})",
    "torch.tanh({s}) * 5.0",
    "torch.nan_to_num({s})",
    "F.relu({s})",
    "{s}.abs()",
    "{s}.neg()",
    "{s}.square()",
    "{s}.contiguous()",
    "{s} * 1",
    "{s} + 0",
    "{s}.flip(-1)",
    "{s}.log1p()",
)
CASTS = (
    "{s}.int()",
    "{s}.long().to(DTYPE)",
    "{s}.half().to(DTYPE)",
    "{s}.to(torch.bfloat16).to(DTYPE)",
    "{s}.bool().to(DTYPE)",
    "({s} > 0).to(DTYPE)",
    "{s}.to(torch.float32)",
    "{s}.round()",
    "{s}.to(torch.int8).to(DTYPE)",
    "{s}.double().to(DTYPE)",
    "{s}.to(torch.float64)",
    "{s}.type_as({q})",
    "{s}.trunc()",
)
BIASES = (
    "1, H, {s}, {t}",
    "H, 1, {t}",
    "{s}, {t}",
    "{t}",
    "B, 1, 1, {t}",
    "B, H, 1, 1",
    "{s}, 1",
    "1, 1, {s}, {t}",
    "B, H, {s}, {t}",
    "H, {s}, {t}",
    "1",
)
SOFTMAXES = (
    ("torch.softmax({s}, -1)", 6),
    ("torch.softmax({s}, dim=3)", 1),
    ("F.softmax({s}, dim=-1)", 5),
    ("F.softmax({s}, dim=-1, dtype=torch.float32).to({q}.dtype)", 2),
    ("F.softmax({s}.float(), dim=-1).type_as({q})", 1),
    ("{s}.softmax(-1)", 4),
    ("{s}.softmax(-1).to({q}.dtype)", 1),
    ("nn.functional.softmax({s}, dim=-1, dtype={q}.dtype)", 1),
    ("{s}.exp() / {s}.exp().sum(-1, keepdim=True)", 2),
    (
        "torch.exp({s} - {s}.amax(-1, keepdim=True)) / torch.exp({s} - {s}.amax(-1, keepdim=True)).sum(-1, keepdim=True)",  # noqa: E501
        1,
    ),
    ("(lambda e: e / e.sum(dim=-1, keepdim=True))(torch.exp({s} - {s}.max(-1, keepdim=True).values))", 2),
    ("F.log_softmax({s}, -1).exp()", 1),
    ("torch.exp(torch.log_softmax({s}, dim=-1))", 1),
    ("torch.exp({s} - torch.logsumexp({s}, -1, keepdim=True))", 2),
    ("({s} - {s}.logsumexp(dim=-1, keepdim=True)).exp()", 1),
    ("F.softmin(-{s}, dim=-1)", 1),
    ("torch.cat([{s}, {sink}.view(1, H, 1, 1).expand({s}.shape[0], H, {s}.shape[2], 1)], -1).softmax(-1)[..., :-1]", 2),
    (
        "torch.cat([{sink}.reshape(1, -1, 1, 1).expand({s}.shape[0], -1, {s}.shape[2], -1), {s}], dim=-1).softmax(-1)[..., 1:]",  # noqa: E501
        1,
    ),
    ("{s}.exp() / (1 + {s}.exp().sum(-1, keepdim=True))", 1),
    # Near misses.
    ("torch.sigmoid({s})", 1),
    ("F.relu({s}) / T", 1),
    ("torch.softmax({s}, 1)", 1),
    ("torch.softmax({s}, 2)", 1),
    ("F.log_softmax({s}, -1)", 1),
    ("torch.exp({s}) / torch.exp({s}).sum(-2, keepdim=True)", 1),
    ("{s}.exp() / ({s}.exp().sum(-1, keepdim=True) + 1e-6)", 1),
    ("{s}.exp2() / {s}.exp2().sum(-1, keepdim=True)", 1),
    ("{s}.softmax(-1).softmax(-1)", 1),
    ("{s}.softmax(-1) ** 2", 1),
    ("F.normalize({s}.exp(), p=1, dim=-1)", 1),
    ("{s} / {s}.sum(-1, keepdim=True)", 1),
    ("F.gumbel_softmax({s}.detach() * 0 + {s}, hard=False) * 0 + {s}.softmax(-1)", 0),
)
AFTER = (
    "{w} * {keep}",
    "{w}.masked_fill(~{keep}, 0.0)",
    "(lambda w: w / w.sum(-1, keepdim=True))({w} * {keep})",
    "(lambda w: w / (w.sum(-1, keepdim=True) + 1e-9))({w} * {keep})",
    "{w} / {w}.sum(-1, keepdim=True)",
    "F.dropout({w}, 0.1, self.training)",
    "F.dropout({w}, p=0.0)",
    "{w}.nan_to_num()",
    "{w} * {c}",
    "{w}.to({q}.dtype)",
    "{w}.half().to(DTYPE)",
    "{w} + 0.01",
    "{w}.clamp(min=1e-3)",
    "{w}.round()",
    "({w} > 0.2).to(DTYPE)",
    "F.normalize({w}, dim=-1)",
    "{w}.to(torch.bfloat16).to(DTYPE)",
    "{w}.bool().to(DTYPE)",
    "{w}.int().to(DTYPE)",
    "1 - {w}",
)
PRODUCTS = (
    ("{w} @ {v}", 6),
    ("torch.matmul({w}, {v})", 4),
    ('torch.einsum("bhqk,bhkd->bhqd", {w}, {v})', 2),
    ("torch.bmm({w}.flatten(0, 1), {v}.flatten(0, 1)).view(B, H, {w}.shape[2], -1)", 1),
    ("({w}.unsqueeze(-1) * {v}.unsqueeze(-3)).sum(-2)", 1),
    ("({v}.mT @ {w}.mT).mT", 1),
    ('torch.einsum("bhqk,bhkd->bqhd", {w}, {v}).transpose(1, 2)', 1),
    (
        "torch.baddbmm(torch.zeros(1, 1, 1, dtype=DTYPE), {w}.flatten(0, 1), {v}.flatten(0, 1)).view(B, H, {w}.shape[2], -1)",  # noqa: E501
        1,
    ),
)
NORMALISED_LATE = (
    "({e} @ {v}) / {e}.sum(-1, keepdim=True)",
    "torch.matmul({e}, {v}) * {e}.sum(-1, keepdim=True).reciprocal()",
    "({e} @ {v}) / ({e} @ torch.ones_like({v}))",
    "({e} @ {v}) / {e}.sum(-1).unsqueeze(-1)",
)


def weighted(b: Builder, forms):
    return b.rng.choices([form for form, _ in forms], [weight for _, weight in forms])[0]


def by_hand(b: Builder, q: str, k: str, v: str) -> str:
    """softmax(q kᵀ …) v of q (B, H, S, D), k (B, H, T, D), v (B, H, T, E) to (B, H, S, E), each step spelled at random."""  # noqa: E501
    b.features.append("attention")
    if b.only == "transposed" or b.only != "sinks" and b.chance(0.08):
        return transposed(b, q, k, v)
    numbers = dict(c=b.pick(NUMBERS), c2=b.pick(("2.0", "0.5", "10.0", "30.0")), c3=b.pick(("0.5", "D**-0.5")))
    s = b.let(weighted(b, SCORES).format(q=q, k=k, **numbers))
    steps = ["scale"] * b.chance(0.8) + ["mask"] * b.chance(0.75) + ["bias"] * b.chance(0.4)
    steps += (
        ["mask"] * b.chance(0.15) + ["scale"] * b.chance(0.12) + ["cast"] * b.chance(0.12) + ["shift"] * b.chance(0.18)
    )
    if b.chance(0.35):
        b.rng.shuffle(steps)
    for step in steps:
        if step == "mask" and b.unmasked:
            continue
        s = b.attempt(STEPS[step], q, k, s) or s
    own = s
    if b.mask:
        s = b.let(f"restricted({s})")
        b.masked_sites += 1
    if b.only == "sinks" or b.chance(0.1):
        return with_sink(b, q, v, s, own)
    out = b.attempt(_normalised_late, s, v) if b.chance(0.08) and not b.mask else None
    if out:
        return out
    form = weighted(b, SOFTMAXES)
    sink = b.weights("H") if "{sink}" in form else ""
    w = b.let(form.format(s=s, q=q, sink=sink))
    if b.mask:
        w = b.let(f"unless_emptied({w}, {own})")
    if b.chance(0.22):
        w = b.attempt(_after, q, w) or w
    if b.chance(0.05):
        b.extra.append(w)
    return b.let(weighted(b, PRODUCTS).format(w=w, v=v))


def _normalised_late(b: Builder, s: str, v: str) -> str:
    e = b.let(b.pick((f"{s}.exp()", f"torch.exp({s} - {s}.amax(-1, keepdim=True))")))
    return b.let(b.pick(NORMALISED_LATE).format(e=e, v=v))


def _after(b: Builder, q: str, w: str) -> str:
    form = b.pick(AFTER)
    if b.unmasked and "{keep}" in form:
        raise Refused("masked")
    keep = kept(b, "S", "T") if "{keep}" in form else ""
    return b.let(form.format(w=w, q=q, keep=keep, c=b.number()))


def _scale(b: Builder, q: str, k: str, s: str) -> str:
    form = weighted(b, SCALES)
    states = {
        "k4": ("torch.rand(1, H, 1, 1) * 2", "parameter"),
        "k0": ("torch.tensor(0.3)", "parameter"),
        "i0": (b.pick(("torch.tensor(2)", "torch.randint(-2, 3, (1, H, 1, 1))", "torch.arange(T)")), "buffer"),
        "b0": (b.pick(("torch.tensor(True)", "torch.rand(S, T) < 0.5", "torch.rand(H, 1, 1) < 0.5")), "buffer"),
        "r4": ("torch.rand(S, 1)", "buffer"),
    }
    made = {name: b.state(*how) for name, how in states.items() if "{" + name + "}" in form}
    if b.chance(0.06):
        b.do(b.pick((f"{s}.mul_({b.pick(NUMBERS)})", f"{s} *= {b.pick(NUMBERS)}", f"{s}.div_(2.0)")))
        return s
    return b.let(form.format(s=s, k=k, c=b.pick(NUMBERS), n=b.pick(("2.0", "4", "D", "-1.0", "D**0.5", "0.1")), **made))


def _mask(b: Builder, q: str, k: str, s: str) -> str:
    s = masked(b, s, "S", "T")
    if b.chance(0.06):  # filled, then shifted or scaled back
        s = b.let(b.pick(("{s} + 1e9", "{s} * 0.5", "{s} / 1e4", "{s} + 1e4", "{s} * -1", "{s} * 1e-9")).format(s=s))
    if b.chance(0.05):  # other rows filled with other values
        row = b.let(b.pick(("torch.arange(S)[:, None] % 2 == 0", "torch.arange(S)[:, None] < 2")))
        s = b.let(f"torch.where({row}, {s}, {fill(b, s)})")
    return s


def _bias(b: Builder, q: str, k: str, s: str) -> str:
    kind = b.pick(("alibi", "table", "buffer", "buffer", "buffer", "integer", "bool", "input", "product"))
    shape = b.pick(BIASES).format(s="S", t="T")
    if kind == "alibi":
        slopes = b.state("torch.tensor([2.0 ** -(i + 1) for i in range(H)])")
        distance = b.pick(
            (
                "torch.arange(T)[None, :] - torch.arange(S)[:, None]",
                "-(torch.arange(S)[:, None] - torch.arange(T)).abs()",
                "torch.arange(T)",
            )
        )
        return b.let(f"{s} + {slopes}[:, None, None] * ({distance})")
    if kind == "table":
        table = b.weights("S + T", "H")
        index = "torch.arange(T)[None, :] - torch.arange(S)[:, None] + S"
        return b.let(f"{s} + {table}[{index}].permute(2, 0, 1)" + b.pick(("", "[None]", ".unsqueeze(0)")))
    if kind == "product":
        query = b.weights("T", "D")
        return b.let(f"{s} + {q} @ {query}.T")
    made = {
        "buffer": lambda: b.weights(shape, scale=b.pick((1.0, 1.0, 5.0, 100.0, -1.0))),
        "integer": lambda: b.state(f"torch.randint(-2, 3, ({shape},))"),
        "bool": lambda: b.state(f"torch.rand({shape}) < 0.5"),
        "input": lambda: b.input(b.pick((f"torch.randn({shape}).to(DTYPE)", f"torch.randint(-2, 3, ({shape},))"))),
    }[kind]()
    if kind == "buffer" and b.chance(0.2):
        made = b.let(
            b.pick(
                (
                    f"{made} * 0.5",
                    f"{made}.to(torch.int32)",
                    f"{made}.half()",
                    f"{made}.sigmoid() * 16",
                    f"{made} > 0",
                    f"{made}.contiguous()",
                )
            )
        )
    return b.let(
        b.pick(
            (
                f"{s} + {made}",
                f"{s} + {made}",
                f"{made} + {s}",
                f"{s}.add({made})",
                f"{s} - {made}",
                f"torch.add({s}, {made}, alpha=2)",
            )
        )
    )


def _cast(b: Builder, q: str, k: str, s: str) -> str:
    return b.let(b.pick(CASTS).format(s=s, q=q))


def _shift(b: Builder, q: str, k: str, s: str) -> str:
    return b.let(b.pick(SHIFTS).format(s=s, c=b.pick(NUMBERS), c2=b.pick(("30.0", "50.0", "1.0", "5"))))


STEPS = {"scale": _scale, "mask": _mask, "bias": _bias, "cast": _cast, "shift": _shift}
