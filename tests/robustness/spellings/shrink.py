"""Makes a failing program small: fewer statements, simpler expressions, shorter lengths, ordinary inputs."""

import ast
import math
import re
import time
from collections.abc import Callable, Iterator

from tests.robustness.spellings.check import Verdict
from tests.robustness.spellings.program import Model, Program

SECONDS = 200


def shrink(
    program: Program, verdict: Verdict, check: Callable[[Program], Verdict], end: float = math.inf
) -> tuple[Program, Verdict]:
    """The smallest program found, until `end` by time.monotonic(), that fails in the same kind, and how it fails."""
    deadline, seen = min(end, time.monotonic() + SECONDS), {_key(program)}
    while (simpler := _first(program, verdict, check, seen, deadline)) is not None:
        program, verdict = simpler
    return program, verdict


def _first(program, verdict, check, seen: set[str], deadline: float) -> tuple[Program, Verdict] | None:
    """The first simpler program that fails alike."""
    for candidate in _simpler(program):
        if time.monotonic() > deadline:
            return None
        if _runs(candidate, seen):
            found = check(candidate)
            if found.kind == verdict.kind and (found.kind == "wrong" or found.cause == verdict.cause):
                return candidate, found
    return None


def _key(program: Program) -> str:
    return program.replace(origin="").source()


def _runs(program: Program, seen: set[str]) -> bool:
    """Whether PyTorch computes it, and it was not there before."""
    key = _key(program)
    if key in seen:
        return False
    seen.add(key)
    try:
        model = Model(program)
        results = model.run(model.inputs())
    except Exception:
        return False
    return all(0 < x.numel() and not x.is_complex() for x in results)


def _simpler(program: Program) -> Iterator[Program]:
    """Programs with something less, those with much less first."""
    yield from map(_without_unused, _shorter(program))
    if program.mask:
        for mask in ("masks.causal()", "masks.sliding_window(1)"):
            yield program.replace(mask=mask)
    for name, size in program.sizes:
        for less in (1, 2, 3, 5) if isinstance(size, int) else ():
            if less < size:
                yield program.replace(sizes=tuple((n, less if n == name else s) for n, s in program.sizes))
    plain = tuple(
        (name, re.sub(r"^\((torch\.randn\([^()]*\)).*\)\.to\(DTYPE\)$", r"\1.to(DTYPE)", value))
        for name, value in program.inputs
    )
    yield program.replace(inputs=plain)
    if program.dtype != "torch.float32":
        yield program.replace(dtype="torch.float32")
    for place, line in enumerate(program.body):
        for simpler in _simpler_statements(line):
            yield _without_unused(program.replace(body=(*program.body[:place], simpler, *program.body[place + 1 :])))
    for place, line in enumerate(program.setup):
        for simpler in _simpler_statements(line):
            yield program.replace(setup=(*program.setup[:place], simpler, *program.setup[place + 1 :]))


def _shorter(program: Program) -> Iterator[Program]:
    """Fewer results; statements left out; an earlier value returned; a value made an input."""
    for name in program.results if len(program.results) > 1 else ():
        yield program.replace(results=(name,))
    names = [_assigned(line) for line in program.body]
    for place in range(len(program.body)):
        if len(names[place]) == 1 and program.results != tuple(names[place]):
            yield program.replace(results=tuple(names[place]), body=program.body[: place + 1])
    for place, line in enumerate(program.body):
        rest = (*program.body[:place], *program.body[place + 1 :])
        if not names[place]:
            yield program.replace(body=rest)
            continue
        for other in dict.fromkeys(re.findall(r"\b[vxqkgu]\d+\b", line)):
            if len(names[place]) == 1 and other != names[place][0]:
                swap = lambda text: re.sub(rf"\b{names[place][0]}\b", other, text)
                yield program.replace(
                    body=(*program.body[:place], *map(swap, program.body[place + 1 :])),
                    results=tuple(map(swap, program.results)),
                )
    shapes = _shapes(program)
    for place in range(len(program.body)):
        if len(names[place]) == 1 and names[place][0] in shapes:
            name = names[place][0]
            rest = (*program.body[:place], *program.body[place + 1 :])
            yield program.replace(body=rest, inputs=(*program.inputs, (name, f"torch.randn({shapes[name]}).to(DTYPE)")))


def _shapes(program: Program) -> dict[str, str]:
    """Shapes of values of the program's own dtype."""
    try:
        model = Model(program)
        names = [name for line in program.body for name in _assigned(line) if len(_assigned(line)) == 1]
        values = Model(program.replace(results=tuple(dict.fromkeys(names)))).run(model.inputs())
    except Exception:
        return {}
    sizes = {size: name for name, size in reversed(program.sizes) if isinstance(size, int)}
    return {
        name: ", ".join(str(sizes.get(n, n)) for n in value.shape)
        for name, value in zip(dict.fromkeys(names), values)
        if value.dtype == model.dtype
    }


def _assigned(line: str) -> list[str]:
    tree = ast.parse(line).body[0]
    if not isinstance(tree, ast.Assign):
        return []
    target = tree.targets[0]
    names = target.elts if isinstance(target, ast.Tuple) else [target]
    return [n.id for n in names if isinstance(n, ast.Name)]


def _without_unused(program: Program) -> Program:
    """Without assignments, inputs and setup that nothing reads."""
    body = list(program.body)
    for place in reversed(range(len(body))):
        names, after = _assigned(body[place]), " ".join([*body[place + 1 :], *program.results])
        if names and not any(re.search(rf"\b{name}\b", after) for name in names):
            del body[place]
    text = " ".join([*body, *program.results])
    inputs = (
        tuple((name, value) for name, value in program.inputs if re.search(rf"\b{name}\b", text)) or program.inputs[:1]
    )
    setup = tuple(line for line in program.setup if re.search(rf"\b{_state(line)}\b", text))
    return program.replace(
        body=tuple(body),
        inputs=inputs,
        setup=setup,
        mask=program.mask if "restricted(" in text or "with_mask(" in text else None,
    )


def _state(line: str) -> str:
    found = re.search(r"\bp\d+\b", line)
    return found.group() if found else line


def _simpler_statements(line: str) -> Iterator[str]:
    """The statement with an expression replaced by a part of it, or a number by a simpler one."""
    count = sum(1 for _ in ast.walk(ast.parse(line)))
    for place in range(count):
        tree = ast.parse(line)
        node = list(ast.walk(tree))[place]
        if (
            not isinstance(node, ast.expr)
            or isinstance(node, ast.Name | ast.Attribute)
            and not isinstance(node, ast.Attribute)
        ):
            continue
        for simpler in _simpler_expressions(node):
            replaced = _Replace(node, simpler).visit(tree)
            yield ast.unparse(ast.fix_missing_locations(replaced))
            tree = ast.parse(line)
            node = list(ast.walk(tree))[place]


def _simpler_expressions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Constant):
        simpler = {bool: (), int: (1, 2), float: (1.0, 2.0)}.get(type(node.value), ())
        return [ast.Constant(value) for value in simpler if value != node.value]
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.Call):
        parts = list(node.args)
        if isinstance(node.func, ast.Attribute) and not (
            isinstance(node.func.value, ast.Name) and node.func.value.id in ("torch", "F", "nn", "math", "self")
        ):
            parts.insert(0, node.func.value)
        fewer = [ast.Call(node.func, node.args, [k for k in node.keywords if k is not one]) for one in node.keywords]
        return [p for p in parts if not isinstance(p, ast.Starred)] + fewer
    if isinstance(node, ast.Subscript):
        return [node.value]
    if isinstance(node, ast.IfExp):
        return [node.body]
    return []


class _Replace(ast.NodeTransformer):
    def __init__(self, old, new):
        self.old, self.new = old, new

    def visit(self, node):
        return self.new if node is self.old else super().generic_visit(node)
