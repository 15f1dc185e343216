"""`sparse_attention`: one sparse kernel on torch tensors, with the semantics of F.scaled_dot_product_attention."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, overload

import torch

from stof_tvm.given_masks import GivenAsMask, GivenMask, given_mask
from stof_tvm.launches.planned import planned
from stof_tvm.launches.sections import Section, in_sections, section_rows
from stof_tvm.masks.arguments import as_number
from stof_tvm.masks.runtime.rule import Rule, for_rule
from stof_tvm.running.alignment import aligned
from stof_tvm.running.between_graphs import between_graphs
from stof_tvm.running.gpus import on_gpu
from stof_tvm.running.has_data import check_has_data, check_makes_data
from tir_kernels.attention.problem import AttentionProblem, Layouts, View
from tir_kernels.cuda.float32.modes import check_mode
from tir_kernels.cuda.shared_tiles import CHUNK_BYTES, chunk_elements
from tir_kernels.errors import InputError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from stof_tvm.parallel.context.plan import ContextPlan

MAX_VIEW = 2**31 - 1  # most elements of a view: kernels address them with 32-bit indices
Float32 = Literal["ieee", "tf32"]
Kernel = Literal["block-wise", "row-wise", "warp-specialized"]
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
IN_TRACED = (
    "sparse_attention computes at once, with a compiled kernel. To trace a model, let it call "
    "F.scaled_dot_product_attention, and give stof_tvm.build the model and the mask; batch entries are dimension 0 of "
    "q, k and v, not one call each of torch.vmap"
)


@overload
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: GivenAsMask | Rule | None = None,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    enable_gqa: bool = False,
    kernel: Kernel | None = None,
    return_lse: Literal[False] = False,
    tuning_logs: str | Path | bool | None = None,
    sink: torch.Tensor | None = None,
    softcap: float | None = None,
    float32: Float32 = "ieee",
    group: "ProcessGroup | None" = None,
    plan: "ContextPlan | None" = None,
) -> torch.Tensor: ...


@overload
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: GivenAsMask | Rule | None = None,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    enable_gqa: bool = False,
    kernel: Kernel | None = None,
    *,
    return_lse: Literal[True],
    tuning_logs: str | Path | bool | None = None,
    sink: torch.Tensor | None = None,
    softcap: float | None = None,
    float32: Float32 = "ieee",
    group: "ProcessGroup | None" = None,
    plan: "ContextPlan | None" = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: GivenAsMask | Rule | None = None,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    enable_gqa: bool = False,
    kernel: Kernel | None = None,
    *,
    return_lse: bool,
    tuning_logs: str | Path | bool | None = None,
    sink: torch.Tensor | None = None,
    softcap: float | None = None,
    float32: Float32 = "ieee",
    group: "ProcessGroup | None" = None,
    plan: "ContextPlan | None" = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


# TorchDynamo would trace the planning of a first call, which computes with NumPy.
@between_graphs(IN_TRACED)
def sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: GivenAsMask | Rule | None = None,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
    enable_gqa: bool = False,
    kernel: Kernel | None = None,
    return_lse: bool = False,
    tuning_logs: str | Path | bool | None = None,
    sink: torch.Tensor | None = None,
    softcap: float | None = None,
    float32: Float32 = "ieee",
    group: "ProcessGroup | None" = None,
    plan: "ContextPlan | None" = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale * q kᵀ + bias) v over what the mask keeps, computed by a kernel that skips what the mask skips.

    Parameters
    ----------
    q : (B, H, Sq, D), k : (B, Hkv, Skv, D), v : (B, Hkv, Skv, Dv)
        float32, float16 or bfloat16, all on one device; D and Dv at most 256.  Tensors of three dimensions
        lack B, those of two lack B and H.  They are read in place with their strides (transposed, packed, expanded) if
        D is contiguous.  On CUDA the other strides must also be multiples of 8 (of 4 in float32) and rows must start on
        16 bytes; otherwise the tensors are copied first.
    mask : Mask, bool tensor or array, BlockMask, mask_mod function or Rule, optional
        True is kept.  A tensor must broadcast to (B, H, Sq, Skv).  Writes to it that PyTorch counts (its `_version`)
        are noticed, those through `.data` or NumPy are not.  A BlockMask or a function mask_mod(b, h, q_idx, kv_idx)
        is FlexAttention's.  It is read as `masks.from_block_mask` or `masks.from_mask_mod` reads it; a function is
        evaluated for each batch entry and head on which it depends.  A rule of `masks.runtime` finds the blocks to keep
        from q and k in each call, on GPUs without synchronization.  It sees the scaled scores, without bias and
        softcap.
    scale : float, optional
        1 / sqrt(D) by default.
    bias : tensor, optional
        Floating point, broadcasts to (B, H, Sq, Skv), added to the scaled scores.  -inf is allowed.
    enable_gqa : bool
        Allow H to be a multiple of Hkv.
    kernel : str, optional
        "block-wise", "row-wise" or "warp-specialized" (sm_90a) instead of the analytical choice.
    return_lse : bool
        Also return the log-sum-exp of each row's scores, by which attentions over different keys can be merged.
    tuning_logs : path or False, optional
        Folder of tuning logs, as for `build`: its fastest record is preferred to the analytical choice.  A process
        reads it once.
    sink : tensor, optional
        (H,), floating point: a logit of each head that is added to the softmax's denominator only, like one more key
        whose value is 0 (gpt-oss's attention sinks).  It is neither scaled nor masked.  -inf has no effect.
    softcap : float, optional
        Scaled scores s become softcap * tanh(s / softcap) before the bias is added (Gemma 2's logit softcapping).
    float32 : str
        How a GPU multiplies float32: "ieee", as exactly as PyTorch by default, or "tf32", with 11 bits of each number,
        faster.  On CPUs and for other dtypes it has no effect.
    group : ProcessGroup, optional
        Ranks that share the sequence (docs/parallel.md): Sq = Skv is the number of this rank's tokens, and the mask is
        that of the whole sequence.  Each rank calls with the same arguments but for the tensors' contents, and receives
        the keys and values that its rows keep.  A bias is not supported.
    plan : ContextPlan, optional
        With a group: who has which tokens, such as `parallel.context_plan(mask, length, ranks)`, which shares out kept
        blocks evenly.  By default rank r has the r-th of equal parts.  Where no mask is given, the plan's holds.

    Returns
    -------
    (B, H, Sq, Dv) in q's dtype.  A row with nothing kept is 0, never NaN.  With `return_lse`, a tuple of this output
    and the log-sum-exp: (B, H, Sq) in float32, natural logarithm, the sink included; -inf for a row with nothing kept
    and no sink.

    Raises InputError (shape, dtype, device), MaskError (the mask), UnsupportedError (no kernel), DeviceError (no GPU),
    TuningLogError (a log that is missing or damaged), ParallelError (another rank of the group failed or did not
    answer).
    On a GPU a CUDA graph may capture a call once an ordinary one has had the same mask, shapes and options.  What the
    mask needs then stays in the GPU's memory for as long as the process runs.  With a group, all ranks capture the call
    and replay it together, and delete the graph before they destroy the group.
    Inference only: raises InputError if autograd would have to record the call, and for tensors without data, as
    torch.export and torch.vmap have.  In a function that torch.compile compiles, it runs between two graphs.
    """
    options = Options(scale, kernel, return_lse, tuning_logs, softcap, float32)
    if group is not None:
        from stof_tvm.parallel.context.attention import context_attention

        return context_attention(q, k, v, mask, bias, enable_gqa, sink, options, group, plan)
    check_mode(float32)
    if plan is not None:
        raise InputError("plan says how a group of ranks shares a sequence: give group, too")
    rank, q, k, v = check_inputs(q, k, v, bias, sink, enable_gqa)
    rule, mask = (mask, mask.within) if isinstance(mask, Rule) else (None, mask)
    given = given_mask(mask, (*q.shape[:3], k.shape[2]))
    results = attend(q, k, v, given, bias, sink, options, rule=rule)
    return without_added_dimensions(results, rank, return_lse)


class Options(NamedTuple):
    """Arguments of `sparse_attention` that are neither tensors nor the mask."""

    scale: float | None = None
    kernel: str | None = None
    return_lse: bool = False
    tuning_logs: str | Path | bool | None = None
    softcap: float | None = None
    float32: str = "ieee"


def check_inputs(q, k, v, bias, sink, enable_gqa: bool) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rank of the inputs, and q, k and v in four dimensions; InputError if they do not fit one another."""
    rank = _check_tensors(q, k, v, bias, sink)
    q, k, v = (x[(None,) * (4 - rank)] for x in (q, k, v))
    if k.shape[0] != q.shape[0]:
        k, v = (x.expand(q.shape[0], -1, -1, -1) if x.shape[0] == 1 else x for x in (k, v))
    _check_shapes(q, k, v, enable_gqa)
    if sink is not None:
        _check_sink(sink, q.shape[1])
    return rank, q, k, v


def attend(
    q,
    k,
    v,
    given: GivenMask,
    bias,
    sink,
    options: Options,
    earlier: tuple[torch.Tensor, ...] = (),
    rule: Rule | None = None,
) -> tuple[torch.Tensor, ...]:
    """(out,), or (out, lse) with `return_lse`, of inputs in four dimensions that `check_inputs` accepts.

    `earlier` is (out, lse) of an attention of the same queries over other keys, on a GPU: the result is that of both
    together.  A sink counts in the earlier one.  A `rule` finds blocks to keep among those of the mask.
    """
    if sink is not None:
        sink = _own_sink(sink)
    if 0 in q.shape or 0 in v.shape or k.shape[2] == 0:
        return _of_no_keys(q, v, sink)
    scale = 1.0 / math.sqrt(q.shape[3]) if options.scale is None else as_number("scale", options.scale)
    if bias is not None:
        bias = _narrow_bias(bias, q, k)
    if rule is None:
        return _attend(q, k, v, given, bias, sink, options, scale, earlier)
    of_rule = for_rule(q, k, scale)
    rows = None if earlier else section_rows(q, k, v, rule.block, given)
    if rows is None:
        whole = Section(given, rule.block_map(*of_rule), rule.block)
        return _attend(q, k, v, given, bias, sink, options, scale, earlier, whole)
    k, v = _readable(k), _readable(v)

    def attend_rows(some: torch.Tensor, bias_rows, section: Section):
        return _attend(some, k, v, section.given, bias_rows, sink, options, scale, (), section)

    of_no_keys = lambda some: _of_no_keys(some, v, sink)
    return in_sections(attend_rows, of_no_keys, q, bias, rule.maps_of_rows(*of_rule), rule.block, given, rows)


def _attend(
    q, k, v, given: GivenMask, bias, sink, options: Options, scale: float, earlier, section: Section | None = None
) -> tuple[torch.Tensor, ...]:
    """As `attend`, of no empty tensors, with what a rule found; () for one of several sections that keeps nothing."""
    block_map = None if section is None else section.block_map.contiguous()
    (batch, q_heads, q_len, head_dim), (_, kv_heads, kv_len, v_head_dim) = q.shape, v.shape
    (q, q_layout), (k, k_layout), (v, v_layout) = (_in_place(x) for x in (q, k, v))
    out_layout = q_layout
    if isinstance(out_layout, View):
        out_layout = "bshd" if out_layout.token > out_layout.head else "bhsd"
    problem = AttentionProblem(
        batch,
        q_heads,
        kv_heads,
        q_len,
        kv_len,
        head_dim,
        v_head_dim,
        dtype=_DTYPES[q.dtype],
        scale=scale,
        bias_shape=None if bias is None else (bias.shape[0], bias.shape[1], bias.shape[2], bias.shape[3]),
        bias_dtype="float32" if bias is None else _DTYPES[bias.dtype],
        layouts=Layouts(q_layout, k_layout, v_layout, out_layout),
        continues=bool(earlier),
        gives_lse=options.return_lse,
        sink_dtype=None if sink is None else _DTYPES[sink.dtype],
        softcap=None if options.softcap is None else as_number("softcap", options.softcap),
        float32=options.float32 if q.device.type == "cuda" and q.dtype == torch.float32 else "ieee",
        block_map=None if section is None else section.described,
    )
    inputs = (q, k, v) if bias is None else (q, k, v, bias)
    results: tuple[torch.Tensor, ...] = ()
    if earlier:
        prior = earlier[0].transpose(1, 2) if out_layout == "bshd" else earlier[0]
        results = prior.contiguous(), earlier[1].contiguous()
    alike = None if section is None else section.alike
    with on_gpu(q.device.index):
        launches = planned(problem, given, q.device, options.kernel, options.tuning_logs, alike)
        if not launches:
            return ()
        for launch in launches:
            results = launch(inputs, sink, block_map, results)
    out = results[0].transpose(1, 2) if out_layout == "bshd" else results[0]
    return (out, *results[1:])


def without_added_dimensions(results: tuple[torch.Tensor, ...], rank: int, return_lse: bool):
    """The output, with the log-sum-exp if it is asked for, without the dimensions that the inputs did not have."""
    if rank < 4:
        results = tuple(x.reshape(x.shape[4 - rank :]) for x in results)
    return (results[0], results[1]) if return_lse else results[0]


def _check_tensors(q, k, v, bias, sink) -> int:
    """Dtypes, devices and ranks; returns the common rank."""
    optional = {name: x for name, x in (("bias", bias), ("sink", sink)) if x is not None}
    tensors = {"q": q, "k": k, "v": v} | optional
    check_makes_data(IN_TRACED)
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise InputError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.layout is not torch.strided:
            raise InputError(f"{name} must be a dense tensor, got one of layout {x.layout}")
        if x.dtype not in _DTYPES:
            raise InputError(f"{name} has dtype {x.dtype}; supported are float32, float16 and bfloat16")
        if x.device != q.device:
            raise InputError(f"{name} is on {x.device}, q on {q.device}")
        if name not in optional and x.dtype != q.dtype:
            raise InputError(f"{name} has dtype {x.dtype}, q {q.dtype}")
        if not x.is_meta:  # `planned` says where kernels run
            check_has_data(name, x, IN_TRACED)
        if x.requires_grad and torch.is_grad_enabled():
            raise InputError(
                f"{name} requires grad, but sparse_attention is for inference: call it under torch.no_grad()"
            )
    if not q.dim() == k.dim() == v.dim() or q.dim() not in (2, 3, 4):
        raise InputError(
            "q, k and v must have the same number of dimensions, 2 to 4: (B, H, S, D); "
            f"got {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    return q.dim()


def _check_shapes(q, k, v, enable_gqa: bool) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        raise InputError(f"q, k and v must have the same batch size: {shapes}")
    if k.shape[1:3] != v.shape[1:3]:
        raise InputError(f"k and v must have the same heads and length: {shapes}")
    if q.shape[3] != k.shape[3]:
        raise InputError(f"q and k must have the same head dimension: {shapes}")
    if q.shape[1] != k.shape[1]:
        if not enable_gqa:
            is_turned = q.shape[1:3] == (k.shape[2], k.shape[1])
            or_else = ", or transpose the one that is (batch, length, heads, dim)" if is_turned else ""
            raise InputError(
                f"q has {q.shape[1]} heads and k {k.shape[1]}; pass enable_gqa=True to share them{or_else}: {shapes}"
            )
        if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
            raise InputError(f"the heads of q, {q.shape[1]}, must be a multiple of those of k, {k.shape[1]}")


def _check_sink(sink: torch.Tensor, q_heads: int) -> None:
    if sink.shape != (q_heads,):
        raise InputError(f"a sink has one logit for each head of q, shape ({q_heads},), got {tuple(sink.shape)}")


def _own_sink(sink: torch.Tensor) -> torch.Tensor:
    return aligned(sink.resolve_neg().contiguous())


def _of_no_keys(q, v, sink) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the log-sum-exp of a call without keys: only the sink, if any, counts."""
    out, lse = q.new_zeros(*q.shape[:3], v.shape[3]), q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
    if sink is not None:
        logit = sink.float().masked_fill(sink == math.inf, math.nan)[:, None]
        out, lse = out.masked_fill(logit[..., None].isnan(), math.nan), logit.expand_as(lse).contiguous()
    return out, lse


def _narrow_bias(bias: torch.Tensor, q, k) -> torch.Tensor:
    """The bias in four dimensions, each of full size or 1, contiguous; expanded dimensions shrink to 1."""
    full = (*q.shape[:3], k.shape[2])
    if bias.dim() > 4 or any(n not in (1, f) for n, f in zip(reversed(bias.shape), reversed(full), strict=False)):
        raise InputError(f"a bias of shape {tuple(bias.shape)} does not broadcast to (B, H, Sq, Skv) = {full}")
    bias = bias[(None,) * (4 - bias.dim())]
    for dim in range(4):
        if bias.stride(dim) == 0 and bias.shape[dim] > 1:
            bias = bias.narrow(dim, 0, 1)
    return aligned(bias.resolve_neg().contiguous())


def _readable(x: torch.Tensor) -> torch.Tensor:
    """x, or its copy if `_in_place` would copy it."""
    buffer, layout = _in_place(x)
    return buffer if layout == "bhsd" else x


def _in_place(x: torch.Tensor) -> tuple[torch.Tensor, str | View]:
    """(a contiguous buffer with x's data, its layout); nothing is copied where a kernel can read x's strides."""
    x = x.resolve_neg()
    swapped = x.transpose(1, 2)
    if x.is_contiguous():
        return aligned(x), "bhsd"
    if swapped.is_contiguous():
        return aligned(swapped), "bshd"
    strides = [0 if n == 1 else stride for n, stride in zip(x.shape[:3], x.stride())]
    size = sum((n - 1) * stride for n, stride in zip(x.shape, strides)) + x.shape[3]
    chunk = chunk_elements(_DTYPES[x.dtype])
    in_chunks = x.data_ptr() % CHUNK_BYTES == 0 and all(stride % chunk == 0 for stride in strides)
    if 1 in (x.shape[3], x.stride(3)) and size <= MAX_VIEW and (in_chunks or x.device.type == "cpu"):
        return x.as_strided((size,), (1,)), View(size, 0, *strides)
    return aligned(x.contiguous()), "bhsd"
