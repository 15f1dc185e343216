"""How models mask scores: what is kept, in which form, and what is done with it."""

from tests.robustness.spellings.builder import Builder, Refused
from tests.robustness.spellings.values import bools

STATIC = (
    "torch.ones({s}, {t}, dtype=torch.bool).tril()",
    "torch.ones({s}, {t}, dtype=torch.bool).tril({k})",
    "torch.ones({s}, {t}).tril({k}) != 0",
    "torch.ones({s}, {t}, dtype=torch.bool).triu({k})",
    "~torch.triu(torch.ones({s}, {t}, dtype=torch.bool), 1)",
    "torch.rand({s}, {t}) < 0.6",
    "(torch.arange({s})[:, None] - torch.arange({t})).abs() <= {w}",
    "torch.arange({t}) <= torch.arange({s})[:, None]",
    "torch.arange({s})[:, None] // 2 == torch.arange({t}) // 2",
    "(torch.arange({t}) % 3 != 1).expand({s}, {t})",
    "torch.arange({t}) < {w} + 1",
    "(torch.rand(1, {h}, {s}, {t}) < 0.7)",
    "(torch.rand({h}, 1, {t}) < 0.8)",
    "torch.arange({s})[:, None] != {w}",
    "torch.tensor([True]).expand({s}, {t})",
    "torch.zeros({s}, {t}, dtype=torch.bool)",
)
FILLS = (
    ('float("-inf")', 8),
    ("-1e4", 3),
    ("-1e9", 4),
    ("torch.finfo({s}.dtype).min", 4),
    ("-10000", 1),
    ("-1e30", 1),
    ("-100.0", 1),
    ("0.0", 1),
    ("5.0", 1),
    ("-math.inf", 2),
    ("torch.tensor(-math.inf)", 1),
)
BY_KEPT = (
    ("{s}.masked_fill(~{keep}, {fill})", 6),
    ("{s}.masked_fill({keep} == 0, {fill})", 2),
    ("{s}.masked_fill({keep}.logical_not(), {fill})", 1),
    ("torch.where({keep}, {s}, {fill})", 4),
    ("torch.where(~{keep}, {fill}, {s})", 1),
    ("torch.where({keep}, {s}, torch.full_like({s}, {fill}))", 1),
    ("torch.where({keep}.expand({s}.shape), {s}, {s}.new_tensor({fill}))", 1),
    ("{s} + torch.where({keep}, 0.0, {fill})", 2),
    ("{s} + torch.zeros({keep}.shape, dtype={s}.dtype).masked_fill(~{keep}, {fill})", 2),
    ("{s} + (1.0 - {keep}.to({s}.dtype)) * {finite}", 3),
    ("{s} + (1 - {keep}.float()) * {finite}", 1),
    ("{s} + (1 - {keep}.int()) * {finite}", 1),
    ("{s} + (~{keep}) * {finite}", 1),
    ("{s} - 1e9 * (1 - {keep}.to({s}.dtype))", 1),
    ("{s} + {keep}.to({s}.dtype).log()", 1),
    ("{s} * {keep} + {finite} * ~{keep}", 1),
    ("{s} * {keep}", 1),
    ("{s} * {keep}.to({s}.dtype)", 1),
    ("{s} + {keep}", 1),
    ("{s} / {keep}", 1),
    ("torch.minimum({s}, torch.where({keep}, math.inf, {fill}))", 1),
)
IN_PLACE = (
    "{s}.masked_fill_(~{keep}, {fill})",
    "{s}.add_(torch.where({keep}, 0.0, {fill}))",
    "{s}[...] = torch.where({keep}, {s}, {fill})",
)


def kept(b: Builder, q_len: str, kv_len: str) -> str:
    """A boolean tensor that broadcasts to (B, H, q_len, kv_len); True is kept."""
    form = b.pick(("static", "static", "graph", "lengths", "lengths", "input", "both"))
    if form in ("static", "graph"):
        return _static(b, q_len, kv_len, form == "graph")
    if form == "input":
        shape = b.pick(
            (f"B, 1, 1, {kv_len}", f"B, 1, {q_len}, {kv_len}", f"{q_len}, {kv_len}", f"B, H, {q_len}, {kv_len}")
        )
        name = b.input(bools(b.rng, shape))
        return b.let(f"{name} != 0") if b.chance(0.2) else name
    lengths = _lengths(b, kv_len)
    if form == "both":
        return b.let(f"{lengths} & {_static(b, q_len, kv_len, b.chance(0.5))}")
    return lengths


def _static(b: Builder, q_len: str, kv_len: str, in_graph: bool) -> str:
    expression = b.pick(STATIC).format(s=q_len, t=kv_len, h="H", k=b.rng.randint(-2, 2), w=b.rng.randint(0, 3))
    if in_graph and "rand" not in expression:
        return b.let(expression)
    name = b.state(expression)
    return b.let(f"{name}[:{q_len}, :{kv_len}]") if b.value(name).ndim == 2 and b.chance(0.3) else name


def _lengths(b: Builder, kv_len: str) -> str:
    """Padding: keys before each sequence's length, or a row of numbers that are 0 or not."""
    if b.chance(0.3):
        padded = b.input(f"torch.randint(0, 2, (B, {kv_len}))")
        return b.let(
            b.pick(
                (
                    f"({padded} != 0)[:, None, None, :]",
                    f"{padded}.bool()[:, None, None, :]",
                    f"({padded} > 0).unsqueeze(1).unsqueeze(2)",
                )
            )
        )
    low = b.pick(("0", "1", "1"))
    lengths = b.input(f"torch.randint({low}, {kv_len} + 1, (B,))")
    compared = b.pick(
        (f"torch.arange({kv_len}) < {lengths}[:, None]", f"{lengths}.unsqueeze(1) > torch.arange({kv_len})[None]")
    )
    keep = f"({compared})[:, None, None, :]"
    if b.chance(0.15):
        keep = f"({compared})[:, None, :, None]"  # whole rows of queries
    return b.let(keep)


def fill(b: Builder, scores: str) -> str:
    return b.rng.choices([f for f, _ in FILLS], [w for _, w in FILLS])[0].format(s=scores)


ASSUMED = 4e8  # reports say that a finite fill is taken as a mask for scores of up to this


def masked(b: Builder, scores: str, q_len: str, kv_len: str) -> str:
    """Scores with a mask applied in one of many ways."""
    if b.value(scores).numel() and b.value(scores).abs().nan_to_num(0.0, 0.0).max() > ASSUMED:
        raise Refused("scores above what finite fills are taken for masks of")
    if b.chance(0.12):
        return _added(b, scores, q_len, kv_len)
    keep = kept(b, q_len, kv_len)
    if b.value(scores).ndim != 4:
        keep = _of_rank(b, keep, b.value(scores).ndim)
    finite = b.pick(("-1e9", "-1e4", "-10000.0", "-1e4", f"torch.finfo({scores}.dtype).min"))
    if b.chance(0.08):
        scores = b.let(f"{scores}.clone()") if b.chance(0.5) else scores
        b.do(b.pick(IN_PLACE).format(s=scores, keep=keep, fill=fill(b, scores)))
        return scores
    form = b.rng.choices([f for f, _ in BY_KEPT], [w for _, w in BY_KEPT])[0]
    return b.let(form.format(s=scores, keep=keep, fill=fill(b, scores), finite=finite))


def _of_rank(b: Builder, keep: str, rank: int) -> str:
    ndim = b.value(keep).ndim
    if ndim <= 2:
        return keep
    return b.let(f"{keep}[:, 0]" if rank == 3 else f"{keep}.unsqueeze(1)")


def _added(b: Builder, scores: str, q_len: str, kv_len: str) -> str:
    """A float mask that is made as such."""
    made = b.pick(
        (
            f"torch.full(({q_len}, {kv_len}), float('-inf')).triu(1)",
            f"torch.triu(torch.full(({q_len}, {kv_len}), -math.inf), diagonal=1)",
            f"torch.full(({q_len}, {kv_len}), -1e9).triu(1)",
            f"torch.ones({q_len}, {kv_len}).triu(1) * -1e4",
            f"torch.ones({q_len}, {kv_len}).triu(1) * torch.finfo(torch.float32).min",
            f"nn.Transformer.generate_square_subsequent_mask({q_len})",
        )
    )
    name = b.state(made) if b.chance(0.5) else b.let(f"({made}).to(DTYPE)")
    return b.let(f"{scores} + {name}")
