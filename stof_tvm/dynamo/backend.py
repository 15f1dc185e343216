"""`torch.compile(model, backend="stof")`: TorchDynamo's graphs compiled to engines, one for each set of shapes.

Parts that TorchDynamo does not compile run in PyTorch, without the mask.  So with a mask the whole model must be one
graph (`fullgraph=True`, which is set here): a graph break, or more recompilations than TorchDynamo allows, is then an
error.
"""

import difflib
import functools

import torch
from torch._dynamo.eval_frame import OptimizeContext
from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported

from stof_tvm.dynamo.autocast import refuse_autocast
from stof_tvm.dynamo.fallback import GraphOrEager
from stof_tvm.dynamo.graph import MODES, DynamoGraph
from stof_tvm.given_masks import comparable, opened
from stof_tvm.site_masks import SiteMasks
from tir_kernels.cuda.float32.modes import check_mode
from tir_kernels.errors import InputError, StofError, UnsupportedError
from tir_kernels.target import parse_target

OPTIONS = ("mask", "target", "strict", "verify", "float32")
WHOLE = "stof.whole_graph"  # an internal option: TorchDynamo was told to make one graph of the whole model (fullgraph)


def stof(graph: torch.fx.GraphModule, example_inputs, *, options: dict | None = None, mode: str | None = None):
    """TorchDynamo's backend.

    `options` takes `mask`, `target`, `strict`, `verify` and `float32` of `stof_tvm.build`; `mode` has no effect.

    A graph that no engine can be built for runs in eager PyTorch, with a warning that says why, unless there is a mask
    or `fullgraph=True`; then this is an error.

    Inference only: raises InputError if autograd would have to record the graph.  Shapes may change: the first call
    with other shapes builds another engine.  Masks by path use the paths that `build` knows, except inside modules that
    TorchDynamo does not trace, such as nn.TransformerEncoder's layers.  Parameters are inputs of the engines.  Buffers
    are built in, and a call that finds one of them changed builds again.
    """
    _check(options, mode)
    options = dict(options or {})
    is_whole = options.pop(WHOLE, False)
    try:
        if options.get("mask") is not None and not is_whole:
            raise InputError(
                "a mask needs all of the model in one graph: torch.compile(model, backend='stof', "
                "options={'mask': mask})"
            )
        _refuse_gradients(graph, example_inputs)
        refuse_autocast(example_inputs, "call it")
    except StofError as error:
        return _refusing(type(error), str(error))
    kind = DynamoGraph if is_whole else GraphOrEager
    return kind(graph, example_inputs, options)


def _refusing(kind: type[StofError], message: str):
    """A function that raises an error when it is called: TorchDynamo would replace an error that is raised sooner."""

    def refuse(*_):
        raise kind(message)

    return refuse


def _check(options, mode) -> None:
    """Raise an error for the first wrong argument; callers of `torch.compile` get it at once."""
    if options is not None and not isinstance(options, dict):
        raise InputError(f"options={str(options)[:80]} must be a dict, such as {{'mask': mask}}")
    if mode is not None and mode not in MODES:
        raise InputError(f"mode={mode!r} is unknown: leave it out, since backend 'stof' has one way to compile")
    options = dict(options or {})
    for name in sorted(options.keys() - {*OPTIONS, WHOLE}, key=str):
        nearest = difflib.get_close_matches(str(name), OPTIONS, n=1)
        meant = f"did you mean {nearest[0]!r}? " if nearest else ""
        raise InputError(f"option {name!r} is unknown: {meant}There are {', '.join(map(repr, OPTIONS))}")
    for name in ("strict", "verify"):
        if not isinstance(options.get(name, True), bool):
            raise InputError(f"option {name!r} must be True or False, got {options[name]!r}")
    check_mode(options.get("float32", "ieee"))
    SiteMasks(options.get("mask"), takes_rules=True)
    if options.get("target") is not None:
        parse_target(options["target"])


def _refuse_gradients(graph: torch.fx.GraphModule, example_inputs) -> None:
    """InputError where a result would have to carry gradients."""
    if not torch.is_grad_enabled():
        return
    results = [node.meta.get("example_value") for node in graph.graph.output_node().all_input_nodes]
    if all(x is not None for x in results) and not any(getattr(x, "requires_grad", False) for x in results):
        return
    placeholders = graph.graph.find_nodes(op="placeholder")
    for node, x in zip(placeholders, example_inputs, strict=True):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            what = "a parameter" if isinstance(x, torch.nn.Parameter) else f"input {node.name}"
            raise InputError(
                f"{what} requires grad, but engines are for inference: call the model under torch.no_grad(), or "
                "model.requires_grad_(False) before"
            )


class WholeContext(OptimizeContext):
    """Compiles a function, or a module through its function; a graph break raises a one-line UnsupportedError."""

    def __call__(self, fn):
        compiled = super().__call__(fn)
        if isinstance(fn, torch.nn.Module | type):
            return compiled

        @functools.wraps(compiled)
        def whole(*args, **kwargs):
            try:
                return compiled(*args, **kwargs)
            except Unsupported as error:
                raise UnsupportedError(_broken(error)) from error.with_traceback(None)
            except FailOnRecompileLimitHit as error:
                raise UnsupportedError(_too_many()) from error.with_traceback(None)

        vars(whole)["_torchdynamo_wrapper_id"] = id(whole)  # marks TorchDynamo's own wrappers
        return whole


def _broken(error: Unsupported) -> str:
    """Where and why a graph breaks, in one line."""
    stack = getattr(error, "real_stack", None)
    where = (
        f"{stack[-1].filename}, line {stack[-1].lineno}, in {stack[-1].name} ({stack[-1].line})" if stack else "a call"
    )
    why = next((line.strip() for line in str(error).splitlines() if line.strip()), "unsupported")
    return (
        f"a mask needs all of the model in one graph, which TorchDynamo breaks at {where}: {why} "
        "(the cause has more of it; rewrite that line, or leave the mask out and use stof_tvm.sparse_attention)"
    )


def _too_many() -> str:
    """That TorchDynamo makes no more graphs, and what helps."""
    return (
        f"TorchDynamo has made {torch._dynamo.config.recompile_limit} graphs of this function and makes no more: raise "
        "torch._dynamo.config.recompile_limit, or pad inputs to a few shapes (causal language models of "
        "transformers have one function in common)"
    )


def _whole_where_masked(optimize):
    """Wrap `torch._dynamo.optimize`, which `torch.compile` calls: `nopython=True` if this backend has a mask.

    `nopython=True` is what `fullgraph=True` says; the backend is told either way.
    """

    @functools.wraps(optimize)
    def with_whole_graphs(*args, **kwargs):
        backend = kwargs.get("backend", args[0] if args else None)
        if backend is None or getattr(backend, "compiler_fn", None) is not stof:
            return optimize(*args, **kwargs)
        options = backend.kwargs.get("options")
        _check(options, backend.kwargs.get("mode"))
        if options and options.get("mask") is not None:
            mask = comparable(opened(options["mask"]))
            backend.kwargs = {**backend.kwargs, "options": {**options, "mask": mask, WHOLE: True}}
            kwargs["nopython"] = True
            context = optimize(*args, **kwargs)
            if isinstance(context, OptimizeContext):  # else TorchDynamo is turned off
                context.__class__ = WholeContext
            return context
        if kwargs.get("nopython"):
            backend.kwargs = {**backend.kwargs, "options": {**(options or {}), WHOLE: True}}
        return optimize(*args, **kwargs)

    return with_whole_graphs


# `torch.compile` imports this module before it calls `optimize`; no other backend sees a difference.
torch._dynamo.optimize = _whole_where_masked(torch._dynamo.optimize)
