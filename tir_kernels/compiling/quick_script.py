"""TVMScript without its slow start: parsing a function asks Python for the source of every frame of the stack.

`@T.prim_func` calls `inspect.stack()`, which reads and searches the source file of each frame, although only the
nearest frames' lines are looked at (is the function defined in a class?).  Each expansion of a `T.inline` function
calls `inspect.getouterframes()` and looks at no line at all.  Below a deep stack that costs 0.15 s for each function:
half a minute for the 248 functions of `tvm.s_tir.tensor_intrin`, and more than half of the time that a kernel with
fifty inlined functions takes.

Frames that it has seen, and errors that it has caught, hold one another in circles, and with them all that variables
of the frames above hold: see `no_frames_left`.

Two more habits of the parser take half of what is left: each expansion of an inlined function parses its text again,
and each part of an expression, such as `x.name` or `f(x, y)`, is compiled by Python to be evaluated once.

`inspect` and the parser belong to the whole process, so only one thread at a time may patch them
(compiling/one_at_a_time.py).
"""

import contextlib
import functools
import gc
import inspect
import sys

from tvm.script.parser.core import doc, evaluator
from tvm.script.parser.core.diagnostics import Source

from tir_kernels.compiling.one_at_a_time import COMPILING

NEAR_FRAMES = 4  # the decorator's own and its callers', whose source the parser does read
TEXTS = 512  # whose syntax trees are kept
entered = 0  # how often a thread has begun to parse
PLACE = ("lineno", "col_offset", "end_lineno", "end_col_offset")  # of a node
CALL = compile("function(*given, **named)", "<TVMScript>", "eval")


@contextlib.contextmanager
def quick_script():
    """A context in which `inspect` reads fewer source lines: `stack()` those of near frames, `getouterframes()` none.

    TVMScript parses a text once, and evaluates the parts of most expressions without compiling them.
    Other threads wait to enter; the same thread may enter again.
    """
    global entered
    with COMPILING:
        entered += 1
        originals = inspect.stack, inspect.getouterframes, Source.as_ast, evaluator._eval_expr
        inspect.stack, inspect.getouterframes = _stack, _outer_frames
        Source.as_ast, evaluator._eval_expr = _syntax_tree, _evaluated
        try:
            yield
        finally:
            inspect.stack, inspect.getouterframes, Source.as_ast, evaluator._eval_expr = originals


@contextlib.contextmanager
def no_frames_left():
    """A context after which no frame is left that the parser has seen in it, if it was used within `quick_script`.

    Whose frames hold much, such as tensors on a GPU, enters it: else Python frees them when it next looks for circles.
    """
    before = entered
    try:
        yield
    finally:
        if entered > before:
            gc.collect()


def _stack(context: int = 1) -> list[inspect.FrameInfo]:
    return _outer_frames(sys._getframe(1), context, NEAR_FRAMES)


def _outer_frames(frame, context: int = 1, near: int = 0) -> list[inspect.FrameInfo]:
    frames = []
    while frame is not None:
        if len(frames) < near and not frame.f_code.co_filename.startswith("<"):
            frames.append(inspect.FrameInfo(frame, *inspect.getframeinfo(frame, context)))
        else:
            code = frame.f_code
            frames.append(inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None))
        frame = frame.f_back
    return frames


def _syntax_tree(source: Source):
    """The tree of a text, which is kept.

    Whoever visits it leaves it as it was, but for functions within functions: they lose a decorator, and move.
    """
    tree, functions = _kept(source.source)
    for function, decorators, place in functions:
        function.decorator_list = list(decorators)
        for name, number in zip(PLACE, place):
            setattr(function, name, number)
    return tree


@functools.lru_cache(TEXTS)
def _kept(text: str) -> tuple:
    """(the tree of a text, its functions with their decorators and places)."""
    tree, functions = doc.parse(text), _Functions()
    functions.visit(tree)
    return tree, [(x, tuple(x.decorator_list), [getattr(x, name) for name in PLACE]) for x in functions.found]


class _Functions(doc.NodeVisitor):
    """Finds the functions of a tree, also those within others."""

    def __init__(self):
        self.found = []

    def visit_FunctionDef(self, node) -> None:
        self.found.append(node)
        self.generic_visit(node)


_compiled_and_evaluated = evaluator._eval_expr


def _evaluated(node, names: dict):
    """The value of an expression whose variables are in `names`, as Python's `eval` gives it."""
    kind = type(node)
    if kind is doc.Name and node.id in names:
        return names[node.id]
    if kind is doc.Constant:
        return node.value
    if kind is doc.Attribute:
        return getattr(_evaluated(node.value, names), node.attr)
    if kind is doc.Subscript:
        return _evaluated(node.value, names)[_evaluated(node.slice, names)]
    if kind is doc.Tuple and not _has_starred(node.elts):
        return tuple(_evaluated(x, names) for x in node.elts)
    if kind is doc.Call and not _has_starred(node.args) and all(x.arg is not None for x in node.keywords):
        function = _evaluated(node.func, names)
        given = [_evaluated(x, names) for x in node.args]
        named = {x.arg: _evaluated(x.value, names) for x in node.keywords}
        # Inlined functions look for their parser among the globals of the frames below them.
        return eval(CALL, names, {"function": function, "given": given, "named": named})
    return _compiled_and_evaluated(node, names)


def _has_starred(nodes) -> bool:
    return any(type(x) is doc.Starred for x in nodes)
