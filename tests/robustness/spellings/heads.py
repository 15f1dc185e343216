"""Where q, k and v come from and where the result goes: projections, packings, groups of heads, whole modules."""

from tests.robustness.spellings.attention import by_hand
from tests.robustness.spellings.builder import Builder
from tests.robustness.spellings.masking import kept
from tests.robustness.spellings.values import floats

# x (B, S, C) with a linear layer {p} of 3 C outputs to q, k, v.
PACKED = (
    "({p}({x}).view(B, S, 3, H, D).permute(2, 0, 3, 1, 4)).unbind(0)",
    "[t.view(B, S, H, D).transpose(1, 2) for t in {p}({x}).chunk(3, dim=-1)]",
    "[t.reshape(B, -1, H, D).permute(0, 2, 1, 3) for t in {p}({x}).split(H * D, -1)]",
    "{p}({x}).view(B, S, H, 3 * D).transpose(1, 2).chunk(3, dim=-1)",
    "{p}({x}).reshape(B, S, H, D, 3).permute(4, 0, 2, 1, 3)",
    "torch.tensor_split({p}({x}).unflatten(-1, (3 * H, D)).transpose(1, 2), 3, dim=1)",
    "{p}({x}).unflatten(-1, (3, H, D)).unbind(2)",
    "{p}({x}).view(B, S, 3, H, D).unbind(2)",
    "[t.transpose(0, 1).reshape(S, B * H, D).transpose(0, 1).view(B, H, S, D) for t in {p}({x}).chunk(3, -1)]",
    "[{p}({x})[..., i * H * D : (i + 1) * H * D].view(B, S, H, D).transpose(1, 2) for i in range(3)]",
)
LINEAR = ("nn.Linear({i}, {o})", "nn.Linear({i}, {o}, bias=False)")
SPLIT = (
    "{y}.view(B, {n}, {h}, {d}).transpose(1, 2)",
    "{y}.unflatten(-1, ({h}, {d})).transpose(1, 2)",
    "{y}.reshape(B, {n}, {h}, {d}).permute(0, 2, 1, 3)",
    "torch.stack({y}.split({d}, -1), 1)",
    "{y}.view(B, -1, {h}, {d}).permute(0, 2, 1, 3).contiguous()",
)
# (B, G, T, D) to (B, H, T, D).
GROUPS = (
    "{k}.repeat_interleave(H // G, dim=1)",
    "{k}[:, :, None].expand(-1, -1, H // G, -1, -1).reshape(B, H, {k}.shape[2], -1)",
    "{k}[:, torch.arange(H) // (H // G)]",
    "{k}.repeat(1, H // G, 1, 1)",
    "{k}.unsqueeze(2).repeat(1, 1, H // G, 1, 1).flatten(1, 2)",
    "torch.cat([{k}] * (H // G), 1)",
    "{k}.index_select(1, torch.arange(H) // (H // G))",
    "{k}[:, :1]",
    "{k}[:, :1].expand(B, H, -1, -1)",
)
MERGES = (
    "{o}.transpose(1, 2).reshape(B, {o}.shape[2], -1)",
    "{o}.permute(0, 2, 1, 3).flatten(2)",
    "{o}.transpose(1, 2).contiguous().view(B, {o}.shape[2], -1)",
    "torch.cat([t.squeeze(1) for t in {o}.split(1, 1)], -1)",
    'torch.einsum("bhsd->bshd", {o}).flatten(-2)',
    "{o}.reshape(B, {o}.shape[2], -1)",
    "{o}.mean(1)",
    "{o}.sum(1)",
)


def operands(b: Builder) -> tuple[str, str, str]:
    """q (B, H, S, D), k (B, H, T, D), v (B, H, T, E) from inputs; keys and values may have fewer heads to repeat."""
    heads = "G" if b.chance(0.3) else "H"
    q = b.input(floats(b.rng, "B, H, S, D", b.wild))
    k, v = (b.input(floats(b.rng, f"B, {heads}, T, {d}", b.unmasked and b.wild)) for d in "DE")
    if heads == "G":
        form = b.pick(GROUPS)
        k, v = b.let(form.format(k=k)), b.let(form.format(k=v))
    if b.chance(0.06):
        k = v = q if b.sizes["S"] == b.sizes["T"] and b.chance(0.5) else k
    return q, k, v


def attention(b: Builder) -> str:
    """One attention on inputs of its own."""
    b.sites += 1
    q, k, v = operands(b)
    if b.only in ("sinks", "transposed"):
        return by_hand(b, q, k, v)
    weights = (10, 5, 0 if b.mask else 1, 0 if b.mask or b.unmasked else 1)
    return b.rng.choices((by_hand, sdpa, looped, three), weights)[0](b, q, k, v)


def block(b: Builder, x: str) -> str:
    """Attention on x (B, S, C) with projections and heads; (B, S, C) again."""
    b.sites += 1
    C, S = b.size(b.value(x).shape[-1]), b.size(b.value(x).shape[1])
    if b.chance(0.4) and C == "C" and b.sizes["S"] == b.sizes["T"] and b.sizes["D"] == b.sizes["E"]:
        p = b.state(b.pick(LINEAR).format(i=C, o="3 * H * D"), "module")
        form = b.pick(PACKED)
        q, k, v = b.name("q"), b.name("k"), b.name("v")
        b.do(f"{q}, {k}, {v} = {form.format(p=p, x=x)}")
        if tuple(b.value(q).shape)[1] != b.sizes["H"]:
            q, k, v = (b.let(f"{name}.transpose(1, 2)") for name in (q, k, v))
    else:
        split = b.pick(SPLIT)
        y = x if b.sizes["S"] == b.sizes["T"] and b.chance(0.7) else b.input(floats(b.rng, "B, T, C", b.wild))
        heads = "G" if b.chance(0.3) else "H"
        made = []
        for source, n, h, d in ((x, S, "H", "D"), (y, "T", heads, "D"), (y, "T", heads, "E")):
            p = b.state(b.pick(LINEAR).format(i=b.size(b.value(source).shape[-1]), o=f"{h} * {d}"), "module")
            made.append(b.let(split.format(y=b.let(f"{p}({source})"), n=n, h=h, d=d)))
        q, k, v = made
        if heads == "G":
            form = b.pick(GROUPS)
            k, v = b.let(form.format(k=k)), b.let(form.format(k=v))
    if b.chance(0.25):
        from tests.robustness.spellings.layers import rotary

        q, k = rotary(b, q), rotary(b, k)
    out = b.rng.choices((by_hand, sdpa), (2, 1))[0](b, q, k, v)
    out = b.let(b.pick(MERGES).format(o=out))
    p = b.state(b.pick(LINEAR).format(i=b.value(out).shape[-1], o=C), "module")
    out = b.let(f"{p}({out})")
    return b.let(f"{x} + {out}") if b.chance(0.6) else out


def sdpa(b: Builder, q: str, k: str, v: str) -> str:
    b.features.append("sdpa")
    options = []
    causal = b.chance(0.25) and not b.unmasked
    mask = "None"
    if not causal and not b.unmasked and b.chance(0.6):
        mask = b.attempt(_sdpa_mask, q) or "None"
    if b.mask:
        b.masked_sites += 1
        options.append(f"attn_mask=with_mask({mask}, {q}, {k}, causal={causal})")
        options += ["is_causal=not REFERENCE"] * causal
    else:
        options += [f"attn_mask={mask}"] * (mask != "None") + ["is_causal=True"] * causal
    if b.chance(0.35):
        options.append("scale=" + b.pick(("0.5", "1.0", "0.0", "-0.3", "2", "1 / D", "D**-0.5", "100.0", "0")))
    if b.value(k).shape[1] != b.value(q).shape[1]:
        options.append("enable_gqa=True")
    elif b.chance(0.1):
        options.append("dropout_p=0.0")
    return b.let(f"F.scaled_dot_product_attention({', '.join((q, k, v, *options))})")


def _sdpa_mask(b: Builder, q: str) -> str:
    keep = kept(b, "S", "T")
    if b.value(keep).ndim == 1:
        keep = b.let(f"{keep}.expand(S, T)")
    form = b.pick(
        (
            "{keep}",
            "{keep}",
            "torch.zeros({keep}.shape, dtype=DTYPE).masked_fill(~{keep}, {f})",
            "torch.where({keep}, {x}, {f}).to(DTYPE)",
            "(1.0 - {keep}.to(DTYPE)) * {f2}",
            "{keep}.to(DTYPE)",
            "{bias}.expand(B, H, S, T)",
            "{bias}",
        )
    )
    fill = b.pick(('float("-inf")', "-math.inf", "-1e9", "-1e4", "torch.finfo(DTYPE).min"))
    bias = b.weights(b.pick(("S, T", "1, H, S, T", "B, 1, 1, T", "H, S, T"))) if "{bias}" in form else ""
    return b.let(form.format(keep=keep, f=fill, f2="-1e4", x=b.pick(("0.0", "1.0", "0.5")), bias=bias))


def looped(b: Builder, q: str, k: str, v: str) -> str:
    """A loop over heads, or over the batch."""
    b.features.append("loop")
    if b.value(k).shape[1] != b.sizes["H"]:
        k, v = (b.let(f"{x}.expand(B, H, -1, -1)") for x in (k, v))
    s = b.pick(
        ("q @ k.mT / math.sqrt(D)", "q @ k.transpose(-2, -1) * 0.5", "torch.bmm(q, k.transpose(1, 2)) * D**-0.5")
    )
    one = f"(lambda q, k, v: ({s}).softmax(-1) @ v)({{q}}, {{k}}, {{v}})"
    if b.chance(0.3):
        one = "F.scaled_dot_product_attention({q}, {k}, {v})"
    if b.chance(0.7):
        heads = one.format(**{name: f"{x}[:, h]" for name, x in zip("qkv", (q, k, v))})
        return b.let(f"torch.stack([{heads} for h in range(H)], 1)")
    batch = one.format(**{name: f"{x}[n]" for name, x in zip("qkv", (q, k, v))})
    return b.let(f"torch.stack([{batch} for n in range(B)])")


def three(b: Builder, q: str, k: str, v: str) -> str:
    """Attention of (batch, length, dim), heads folded into the batch or one only."""
    b.features.append("three")
    if b.value(k).shape[1] != b.sizes["H"]:
        k, v = (b.let(f"{x}.expand(B, H, -1, -1)") for x in (k, v))
    fold = b.pick((".flatten(0, 1)", "[:, 0]", ".reshape(B * H, -1, {d})", ".sum(1)", "[0]"))
    q, k, v = (b.let(x + fold.format(d=b.size(b.value(x).shape[-1]))) for x in (q, k, v))
    s = b.let(
        b.pick(
            (
                "torch.bmm({q}, {k}.transpose(1, 2))",
                "{q} @ {k}.mT",
                'torch.einsum("bid,bjd->bij", {q}, {k})',
                "torch.baddbmm(torch.zeros(S, T, dtype=DTYPE).masked_fill(torch.ones(S, T, dtype=torch.bool).triu(1), -math.inf), {q}, {k}.mT, alpha=0.5)",  # noqa: E501
                "torch.baddbmm(torch.ones(1, 1, T, dtype=DTYPE), {q}, {k}.mT, beta=2, alpha=D**-0.5)",
            )
        ).format(q=q, k=k)
    )
    if b.chance(0.6):
        s = b.let(
            b.pick(
                (
                    f"{s} * D**-0.5",
                    f"{s} / 2",
                    f"{s} * -1",
                    f"{s} + torch.ones(S, T).triu(1) * -1e9",
                    f"{s}.masked_fill(torch.ones(S, T).tril() == 0, -math.inf)",
                )
            )
        )
    w = b.let(
        b.pick((f"{s}.softmax(-1)", f"{s}.softmax(2)", f"F.softmax({s}, dim=2)", f"{s}.softmax(1)", f"{s}.softmax(0)"))
    )
    return b.let(b.pick((f"{w} @ {v}", f"torch.bmm({w}, {v})", f'torch.einsum("bij,bjd->bid", {w}, {v})')))


def module(b: Builder) -> str:
    """nn.MultiheadAttention, nn.TransformerEncoderLayer and nn.TransformerDecoderLayer as they are."""
    b.sites += 1
    b.features.append("module")
    first = b.chance(0.6)
    shape = (lambda n: f"B, {n}, C") if first else (lambda n: f"{n}, B, C")
    x = b.input(floats(b.rng, shape("S"), b.wild))
    kind = b.pick(("mha", "mha", "encoder", "decoder"))
    if kind == "mha":
        options = f"batch_first={first}" + b.pick(
            ("", ", bias=False", ", add_bias_kv=True", ", add_zero_attn=True", ", kdim=E, vdim=E")
        )
        m = b.state(f"nn.MultiheadAttention(C, H, {options})", "module")
        width = "E" if "kdim" in options else "C"
        y = x if width == "C" and b.chance(0.5) else b.input(floats(b.rng, shape("T").replace("C", width), b.wild))
        q_len, kv_len = "S", ("S" if y == x else "T")
        call = b.pick(("", ", need_weights=False", ", need_weights=False", ", average_attn_weights=False"))
        if b.chance(0.4):
            call += ", key_padding_mask=" + b.input(f"torch.rand(B, {kv_len}) < 0.3")
        if b.chance(0.5):
            call += ", attn_mask=" + b.state(
                b.pick(
                    (
                        f"torch.rand({q_len}, {kv_len}) < 0.3",
                        f"torch.ones({q_len}, {kv_len}, dtype=torch.bool).triu(1)",
                        f"torch.randn({q_len}, {kv_len})",
                        f"torch.full(({q_len}, {kv_len}), -math.inf).triu(1)",
                        f"torch.rand(B * H, {q_len}, {kv_len}) < 0.3",
                    )
                )
            )
        return b.let(f"{m}({x}, {y}, {y}{call})[0]")
    options = f"C, H, 2 * C, batch_first={first}, norm_first={b.chance(0.5)}" + b.pick(
        ("", ", activation='gelu'", ", bias=False", ", layer_norm_eps=1e-3", ", dropout=0.0")
    )
    if kind == "decoder":
        m = b.state(f"nn.TransformerDecoderLayer({options})", "module")
        y = b.input(floats(b.rng, shape("T"), b.wild))
        call = b.pick(
            (
                "",
                ", tgt_mask=torch.full((S, S), -math.inf).triu(1)",
                ", tgt_mask=torch.ones(S, S, dtype=torch.bool).triu(1)",
                ", tgt_is_causal=False",
            )
        )
        return b.let(f"{m}({x}, {y}{call})")
    m = b.state(f"nn.TransformerEncoderLayer({options})", "module")
    padding = b.input("torch.rand(B, S) < 0.3") if b.chance(0.4) else ""
    call = b.pick(
        (
            "",
            ", src_mask=torch.full((S, S), -math.inf).triu(1)",
            ", src_mask=torch.ones(S, S, dtype=torch.bool).triu(1)",
            ", src_mask=nn.Transformer.generate_square_subsequent_mask(S), is_causal=True",
        )
    )
    return b.let(f"{m}({x}{call}{f', src_key_padding_mask={padding}' if padding else ''})")
