"""Composes programs: an attention alone, a block of a transformer, or a chain of whatever there is."""

from random import Random

from tests.robustness.spellings import heads, layers, tensors
from tests.robustness.spellings.builder import Builder, Refused
from tests.robustness.spellings.program import Program
from tests.robustness.spellings.values import floats

# What a chain is made of, with weights.
STEPS = {
    "norm": (layers.norm, 5),
    "activation": (layers.activation, 5),
    "residual": (layers.residual, 3),
    "product": (layers.product, 3),
    "mlp": (layers.mlp, 2),
    "gate": (layers.gate, 3),
    "rotary": (layers.rotary, 2),
    "convolution": (layers.convolution, 1),
    "pool": (layers.pool, 2),
    "view": (tensors.view, 4),
    "write": (tensors.write, 4),
    "cast": (tensors.cast, 2),
    "integer": (tensors.integer, 2),
    "scalar": (tensors.scalar, 2),
}
FEATURES = ("attention", "attentions", "sinks", "transposed", "module", "block", "masks", *STEPS)
OF_ATTENTION = ("attention", "attentions", "sinks", "transposed", "masks")
MASKS = (
    "masks.causal()",
    'masks.causal(align="bottom-right")',
    "masks.sliding_window({n})",
    "masks.sliding_window({n}, causal=True)",
    "masks.dilated_window({n}, 2)",
    "masks.global_tokens(1)",
    "masks.longformer({n}, 1)",
    "masks.bigbird({n}, 1, 0.3, block=2, seed={n})",
    "masks.strided(2)",
    "masks.fixed(2, 1)",
    "masks.prefix_lm({n})",
    "masks.a_shape(1, {n})",
    "masks.vertical_slash([0], [0, 1])",
    "masks.block_sparse((torch.arange(-(-S // 4))[:, None] + torch.arange(-(-T // 4))) % 2 == 0, 4)",
    "masks.sliding_window(2) & masks.causal()",
    "~masks.sliding_window({n}) | masks.global_tokens(1)",
    "masks.from_mask_mod(lambda b, h, q, k: (q + k) % 3 != 0)",
    "masks.from_mask_mod(lambda b, h, q, k: (q >= k) & (k != 1))",
    "masks.from_mask_mod(lambda b, h, q, k: q != 1)",
    "masks.per_head([masks.causal() if h % 2 else masks.sliding_window(2) for h in range(H)])",
    "masks.padding([max(1, T - i) for i in range(B)])",
    "masks.padding([i % (T + 1) for i in range(1, B + 1)])",
    "masks.from_tensor(torch.ones(S, T, dtype=torch.bool).tril())",
    "masks.document([S - S // 2, S // 2]) if S // 2 and S == T else masks.causal()",
)


def make_program(seed: int, index: int, only: str | None = None) -> Program:
    """Program `index` of a seed: a function of its arguments."""
    rng = Random(f"{seed} {index} {only}")
    for _ in range(50):
        try:
            return _program(rng, f"seed {seed}, program {index}" + (f", only {only}" if only else ""), only)
        except (Refused, IndexError, ValueError, ZeroDivisionError):
            continue
    raise AssertionError("nothing could be written")


def sizes(rng: Random) -> dict[str, int]:
    """Lengths, most of them small and odd; now and then 1, or those of two blocks of a kernel."""
    length = lambda: rng.choices(
        (1, 2, rng.randint(3, 9), rng.randint(10, 20), rng.choice((64, 65, 80))), (1, 1, 10, 3, 0.6)
    )[0]
    S = length()
    T = S if rng.random() < 0.6 else length()
    H = rng.choice((1, 2, 2, 3, 4, 4, 6))
    G = rng.choice([g for g in (1, 2, 3) if H % g == 0])
    D = rng.choices((1, 2, 3, 4, 8, 16, 5), (1, 1, 1, 4, 6, 3, 1))[0]
    E = D if rng.random() < 0.8 else rng.choice((1, 3, 4, 6))
    return {"B": rng.choice((1, 1, 2, 2, 3)), "H": H, "G": G, "S": S, "T": T, "D": D, "E": E, "C": H * D}


def _program(rng: Random, origin: str, only: str | None) -> Program:
    dtype = rng.choices(("torch.float32", "torch.float16", "torch.bfloat16"), (18, 1, 1))[0]
    kind = "attention" if only in OF_ATTENTION else only if only in ("module", "block") else None
    kind = kind or ("chain" if only else rng.choices(("attention", "block", "module", "chain"), (10, 5, 1, 9))[0])
    mask = None
    if kind in ("attention", "block") and (only == "masks" or rng.random() < 0.22):
        mask = _mask(rng)
    b = Builder(rng, sizes(rng), dtype, rng.randrange(1 << 30), mask)
    b.only = only
    _set_wildness(b, kind)
    results = {"attention": _attention, "block": _block, "module": _module, "chain": _chain}[kind](b, only)
    results = [name for name in (*results, *b.extra) if b.knows(name)]
    if any(b.value(name).is_complex() for name in results):
        raise Refused("complex")
    program = b.finish(results, origin)
    if only == "masks" and not program.mask:
        raise Refused("no mask")
    return program


def _set_wildness(b: Builder, kind: str) -> None:
    """Whether NaN and infinities come in, and may come out: as rows that a mask empties, for one.

    A difference by choice (docs/limits.md) is kept out of what is written rather than allowed for in what is compared:
    keys and values that a mask leaves out are not read, so that NaN or inf in them does not reach the result as it does
    in PyTorch by 0 · NaN.  With a mask only queries are wild, and no projection that keys and values share with them.
    """
    b.wild = b.chance(0.06) and kind != "module" and not (kind == "block" and b.mask)
    b.unmasked = b.wild and (kind == "block" or b.chance(0.5)) and not b.mask
    b.nan = bool(b.wild) or b.chance(0.3)
    if b.wild and kind in ("attention", "block"):
        b.wild = (
            "nan" if b.unmasked else False
        )  # of scores that infinite queries make -inf, kernels make what a mask would


def _mask(rng: Random) -> str:
    form = lambda: rng.choice(MASKS).format(n=rng.randint(0, 4))
    return f"({form()}) {rng.choice('&|')} ({form()})" if rng.random() < 0.15 else form()


def _steps(b: Builder, x: str, count: int, only: str | None = None) -> str:
    names = [only] if only in STEPS else list(STEPS)
    for _ in range(count):
        if not b.value(x).ndim:
            break
        (name,) = b.rng.choices(names, [STEPS[name][1] for name in names])
        y = b.attempt(STEPS[name][0], x if b.value(x).is_floating_point() else b.let(f"{x}.to(DTYPE)"))
        if y:
            b.features.append(name)
            b.history.append(x)
            x = y
    return x


def _attention(b: Builder, only) -> list[str]:
    out = heads.attention(b)
    if b.chance(0.3):
        out = b.let(b.pick(heads.MERGES).format(o=out)) if b.value(out).ndim == 4 else out
        out = _steps(b, out, b.rng.randint(0, 2))
    more = []
    if only == "attentions" or b.chance(0.12):  # whatever one leaves behind in the compiler, the next must not find
        more = [b.attempt(lambda b, _: heads.attention(b), out) for _ in range(b.rng.randint(1, 4))]
        b.features.append("attentions")
    return [out, *(name for name in more if name)]


def _block(b: Builder, only) -> list[str]:
    x = b.input(floats(b.rng, "B, S, C", b.wild))
    for _ in range(b.rng.choice((0, 1, 1, 2))):
        y = b.attempt(STEPS[b.pick(("norm", "residual", "scalar", "write"))][0], x)
        x = y if y and b.value(y).shape == b.value(x).shape and b.value(y).dtype == b.space["DTYPE"] else x
    out = heads.block(b, x)
    if b.value(out).shape == b.value(x).shape and b.chance(0.12):  # a second layer
        return [heads.block(b, out)]
    return [_steps(b, out, b.rng.randint(0, 3))]


def _module(b: Builder, only) -> list[str]:
    return [_steps(b, heads.module(b), b.rng.randint(0, 1))]


def _chain(b: Builder, only) -> list[str]:
    shape = b.pick(("B, S, C", "B, S, C", "B, S, C", "B, H, S, D", "S, C", "B, C"))
    x = b.input(floats(b.rng, shape, b.wild))
    out = _steps(b, x, b.rng.randint(1, 5), only)
    if out == x:
        raise Refused("nothing was written")
    more = [name for name in b.history if name != x and b.chance(0.15)]
    return [out, *more]
