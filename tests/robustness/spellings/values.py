"""What tensors hold: ordinary numbers mostly; large and tiny ones, zeros, constant rows, now and then NaN and inf."""

from random import Random

ORDINARY = "torch.randn({shape})"
FLOATS = (
    ("torch.randn({shape}) * 1e3", 2),
    ("torch.randn({shape}) * min(1e6, torch.finfo(DTYPE).max / 8)", 1),
    ("torch.randn({shape}) * 1e-6", 1),
    ("torch.randn({shape}) * 1e-30", 1),
    ("torch.randn({shape}).relu()", 2),
    ("torch.randn({shape}).round()", 1),
    ("torch.rand({shape})", 1),
    ("torch.zeros({shape})", 1),
    ("torch.randn({rows}1).expand({shape}).clone()", 2),
    ("torch.randn({shape}) + 100.0", 1),
)
WILD = (
    "torch.randn({shape}).masked_fill(torch.rand({shape}) < 0.05, math.nan)",
    "torch.randn({shape}).masked_fill(torch.rand({shape}) < 0.05, math.inf)",
    "torch.randn({shape}).masked_fill(torch.rand({shape}) < 0.05, -math.inf)",
)
INTEGERS = (
    "torch.randint(-3, 4, ({shape},))",
    "torch.randint(0, 3, ({shape},))",
    "torch.randint(-100, 100, ({shape},))",
)
BOOLS = ("torch.rand({shape}) < 0.7", "torch.rand({shape}) < 0.3", "torch.ones({shape}, dtype=torch.bool)")


def floats(rng: Random, shape: str, wild: bool | str = False) -> str:
    """An expression of a float tensor; `wild`: it may hold NaN or inf, or NaN only where it is "nan"."""
    form = ORDINARY
    if wild and rng.random() < 0.5:
        form = rng.choice(WILD[:1] if wild == "nan" else WILD)
    elif rng.random() < 0.25:
        form = rng.choices([form for form, _ in FLOATS], [weight for _, weight in FLOATS])[0]
    rows = "".join(f"{size}, " for size in shape.split(", ")[:-1])
    return f"({form.format(shape=shape, rows=rows)}).to(DTYPE)"


def integers(rng: Random, shape: str) -> str:
    return rng.choice(INTEGERS).format(shape=shape) + rng.choice(("", "", ".int()"))


def bools(rng: Random, shape: str) -> str:
    return rng.choice(BOOLS).format(shape=shape)
