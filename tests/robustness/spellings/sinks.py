"""Attention with a logit of each head in the softmax's denominator, and with keys by queries for scores, by hand."""

from tests.robustness.spellings.builder import Builder, Refused
from tests.robustness.spellings.masking import masked

# Of scores s (B, H, S, T) and x = (1, H, 1, 1), with the row's maximum or without.
TOPS = (
    ("{s}.amax(-1, keepdim=True)", 8),
    ("{s}.max(-1, keepdim=True).values", 6),
    ("{s}.max(-1)[0].unsqueeze(-1)", 1),
    ("torch.maximum({s}.amax(-1, keepdim=True), {x})", 8),
    ("torch.cat([{s}, {x}.expand({s}.shape[0], H, {s}.shape[2], 1)], -1).amax(-1, keepdim=True)", 1),
    ("{s}.amax(-1, keepdim=True).clamp(min=0)", 2),
    ("{s}.amax(-1, keepdim=True).clamp(min=-1e30)", 1),
    ("{s}.amax(-1, keepdim=True).nan_to_num(neginf=0.0)", 1),
    ("torch.where({s}.amax(-1, keepdim=True) == -math.inf, 0.0, {s}.amax(-1, keepdim=True))", 1),
    # Near misses.
    ("{s}.amax(-2, keepdim=True)", 1),
    ("{s}.amax()", 1),
    ("{s}.abs().amax(-1, keepdim=True)", 1),
    ("{s}.mean(-1, keepdim=True)", 1),
)
# Added to the sum of exp(s - m).
TERMS = (
    ("torch.exp({x} - {m})", 16),
    ("({x} - {m}).exp()", 8),
    ("torch.exp(-{m})", 8),
    ("torch.exp(0 - {m})", 1),
    ("torch.exp({x}[:, :1] - {m})", 1),
    # Near misses.
    ("torch.exp({x})", 1),
    ("torch.exp({m})", 1),
    ("1", 1),
    ("1e-9", 1),
    ("2 * torch.exp({x} - {m})", 1),
    ("torch.exp({x} - {m}).round()", 1),
    ("torch.exp({x} - {m}) + torch.exp(-{m})", 1),
    ("torch.exp({q}.mean(-1, keepdim=True) - {m})", 1),
    ("torch.exp(torch.arange(S)[:, None] * 0.1 - {m})", 1),
    ("torch.exp({x}.half().to(DTYPE) - {m})", 1),
)
# Added to the sum of exp(s).
BARE_TERMS = (
    ("{x}.exp()", 5),
    ("1", 4),
    ("1.0", 2),
    ("torch.ones(1, dtype=DTYPE)", 1),
    ("{x}.view(H).exp()[:, None, None]", 1),
    # Near misses.
    ("{x}.abs()", 1),
    ("0.5", 1),
    ("1e-6", 1),
    ("{x}.exp().int()", 1),
    ("torch.exp(torch.arange(S)[:, None] * 0.1)", 1),
)
WHOLE = (
    "torch.exp({s} - torch.logaddexp(torch.logsumexp({s}, -1, keepdim=True), {x}))",
    "torch.exp({s} - torch.logaddexp({x}, {s}.logsumexp(-1, keepdim=True)))",
    "torch.exp({s} - torch.logaddexp({s}.logsumexp(-1).unsqueeze(-1), {x} * 0))",
    "torch.exp({s} - torch.cat([{s}, {x}.expand({s}.shape[0], H, {s}.shape[2], 1)], -1).logsumexp(-1, keepdim=True))",
    "torch.exp({s} - torch.log(torch.exp({s}).sum(-1, keepdim=True) + {x}.exp()))",
    "torch.exp({s} - torch.log1p(torch.exp({s}).sum(-1, keepdim=True)))",
    "torch.softmax({s}, -1) * torch.sigmoid(torch.logsumexp({s}, -1, keepdim=True) - {x})",
    "torch.softmax({s}, -1) * torch.sigmoid({x} - torch.logsumexp({s}, -1, keepdim=True))",
    "torch.softmax({s}, -1) * torch.sigmoid(torch.logsumexp({s} * 2, -1, keepdim=True) - {x})",
    "torch.cat([{s}, torch.zeros_like({s}[..., :1])], -1).softmax(-1)[..., :-1]",
    "torch.cat([{x}.expand({s}.shape[0], H, {s}.shape[2], 1), {s}], -1).softmax(-1)[..., 1:]",
    "torch.cat([{x}.expand({s}.shape[0], H, {s}.shape[2], 1), {s}], -1).softmax(-1)[..., :-1]",
    "F.softmax(F.pad({s}, (0, 1)), -1)[..., :-1]",
    "F.softmax(F.pad({s}, (1, 0), value=0.5), -1)[..., 1:]",
    "F.softmax(F.pad({s}, (0, 2)), -1)[..., :-2]",
)
GATES = (
    "{o} * torch.sigmoid({l} - {x})",
    "{o} * ({l} - {x}).sigmoid()",
    "torch.sigmoid({l}) * {o}",
    "{o} * torch.sigmoid({x} - {l})",
    "{o} * torch.sigmoid({l} + {x})",
    "{o} / (1 + torch.exp({x} - {l}))",
)
# k (B, H, T, D) and q (B, H, S, D) to (B, H, T, S).
TRANSPOSED = (
    ("{k} @ {q}.transpose(-1, -2)", 5),
    ("torch.matmul({k}, {q}.mT)", 2),
    ('torch.einsum("bhkd,bhqd->bhkq", {k}, {q})', 3),
    ("torch.bmm({k}.flatten(0, 1), {q}.flatten(0, 1).transpose(1, 2)).view(B, H, T, S)", 1),
    ("({q} @ {k}.mT).mT", 1),
)
OVER_KEYS = (
    ("torch.softmax({s}, -2)", 5),
    ("F.softmax({s}, dim=2)", 3),
    ("(lambda e: e / e.sum(-2, keepdim=True))(torch.exp({s} - {s}.amax(-2, keepdim=True)))", 2),
    ("(lambda e: e / e.sum(2).unsqueeze(2))(torch.exp({s}))", 1),
    ("torch.exp({s} - torch.logsumexp({s}, 2, keepdim=True))", 1),
    ("(lambda e: e / (1 + e.sum(-2, keepdim=True)))(torch.exp({s}))", 1),
    # Near misses.
    ("torch.softmax({s}, -1)", 1),
    ("(lambda e: e / e.sum(-1, keepdim=True))(torch.exp({s}))", 1),
    ("torch.softmax({s}.round(), -2)", 1),
    ("torch.softmax({s}.int().to(DTYPE), -2)", 1),
)
OF_KEYS = (
    ("{w}.transpose(-1, -2) @ {v}", 5),
    ("({v}.mT @ {w}).mT", 3),
    ('torch.einsum("bhkq,bhkd->bhqd", {w}, {v})', 3),
    ('torch.einsum("bhkd,bhkq->bhqd", {v}, {w})', 1),
    ("torch.bmm({w}.flatten(0, 1).mT, {v}.flatten(0, 1)).view(B, H, {w}.shape[3], -1)", 1),
)


LARGEST = 30.0  # score whose exponential is taken as it is: what overflows in PyTorch is a number by choice


def _chosen(b: Builder, form: str, s: str) -> str:
    if f"exp({s})" in form and not b.value(s).amax() < LARGEST:
        raise Refused("overflows")
    return form


def _one(b: Builder, forms) -> str:
    return b.rng.choices([form for form, _ in forms], [weight for _, weight in forms])[0]


def with_sink(b: Builder, q: str, v: str, s: str, own: str) -> str:
    """The attention of scores with a sink; `own` are the scores without the user's mask."""
    b.features.append("sinks")
    x = b.let(
        f"{b.weights('H', scale=b.pick((1.0, 1.0, 5.0)))}" + b.pick((".view(1, H, 1, 1)", "[None, :, None, None]"))
    )
    cleared = lambda w: b.let(f"unless_emptied({w}, {own})") if b.mask else w
    kind = b.pick(("sum", "sum", "sum", "bare", "whole", "whole", "gate"))
    if kind == "gate":
        o = b.let(f"{cleared(b.let(f'torch.softmax({s}, -1)'))} @ {v}")
        length = b.let(b.pick(("torch.logsumexp({s}, -1, keepdim=True)", "{s}.logsumexp(-1)[..., None]")).format(s=s))
        return b.let(b.pick(GATES).format(o=o, l=length, x=x))
    if kind == "whole":
        return b.let(f"{cleared(b.let(_chosen(b, b.pick(WHOLE).format(s=s, x=x), s)))} @ {v}")
    if kind == "bare":
        e, term = b.let(_chosen(b, f"torch.exp({s})", s)), _one(b, BARE_TERMS).format(x=x)
    else:
        m = b.let(_one(b, TOPS).format(s=s, x=x))
        e, term = b.let(f"torch.exp({s} - {m})"), _one(b, TERMS).format(x=x, m=m, q=q)
    axis = b.rng.choices(("-1", "3", "-2"), (12, 2, 1))[0]
    total = b.let(b.pick((f"{e}.sum({axis}, keepdim=True) + {term}", f"{term} + {e}.sum(dim={axis}, keepdim=True)")))
    if b.chance(0.3) and not b.mask:
        return b.let(f"({e} @ {v}) / {total}")
    return b.let(f"{cleared(b.let(f'{e} / {total}'))} @ {v}")


def transposed(b: Builder, q: str, k: str, v: str) -> str:
    """The attention of scores that are keys by queries."""
    b.features.append("transposed")
    s = b.let(_one(b, TRANSPOSED).format(q=q, k=k))
    if b.chance(0.7):
        s = b.let(b.pick(("{s} / math.sqrt(D)", "{s} * 0.5", "{s} * D**-0.5")).format(s=s))
    if b.chance(0.7) and not b.unmasked:
        s = b.attempt(masked, s, "T", "S") or s
    if b.chance(0.3):
        s = b.let(f"{s} + {b.weights(b.pick(('T, S', 'T, 1', 'S', 'H, T, 1', '1, H, T, S')))}")
    own = s
    if b.mask:
        s = b.let(f"restricted({s}, True)")
        b.masked_sites += 1
    w = b.let(_chosen(b, _one(b, OVER_KEYS).format(s=s), s))
    if b.mask:
        w = b.let(f"unless_emptied({w}, {own}, True)")
    return b.let(_one(b, OF_KEYS).format(w=w, v=v))
