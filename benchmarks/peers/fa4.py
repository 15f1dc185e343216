"""FlashAttention-4 by its own interface, where its arguments express the mask: dense, causal and windows."""

from benchmarks.peers.cases import Case
from benchmarks.peers.patterns import Pattern
from benchmarks.peers.system import Prepared


def prepare(system: str, case: Case, pattern: Pattern, device: str) -> Prepared:
    """ImportError where flash_attn.cute is not installed."""
    from flash_attn.cute import flash_attn_func

    arguments = {}
    if pattern.base == "causal":
        arguments["causal"] = True
    elif pattern.base == "sliding_window":
        arguments["window_size"] = (pattern.width, pattern.width)
    elif pattern.base == "causal_window":
        arguments["window_size"] = (pattern.width - 1, 0)

    def call(q, k, v):
        out = flash_attn_func(q, k, v, **arguments)
        return out[0] if isinstance(out, tuple) else out

    return Prepared(
        call,
        variant=" ".join(f"{name}={value}" for name, value in arguments.items()) or "dense",
        arrange=lambda *tensors: tuple(x.transpose(1, 2).contiguous() for x in tensors),
        restore=lambda out: out.transpose(1, 2),
    )
