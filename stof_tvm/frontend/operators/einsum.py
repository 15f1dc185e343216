"""torch.einsum of two tensors as one matrix product, so that attention spelled with it is recognised."""

import math
import string

from tvm import relax

op = relax.op


def einsum(context, equation: str, tensors: list, *_):
    """A contraction of two tensors becomes one matmul between transposes; anything else becomes relax.einsum.

    Anything else is: a sum of one tensor, more than two, a letter twice in one tensor, a letter summed over one tensor
    only, a letter of two sizes.  One tensor whose letters all stay is transposed.
    """
    terms, output = _explicit(equation, [len(t.ty.shape) for t in tensors])
    if len(terms) == 1 and len(set(terms[0])) == len(terms[0]) and sorted(terms[0]) == sorted(output):
        return _transposed(context, tensors[0], terms[0], output)
    sizes = [dict(zip(term, (int(n) for n in t.ty.shape))) for term, t in zip(terms, tensors)]
    if not _is_matmul(terms, output, sizes):
        return context.emit(op.einsum(tensors, f"{','.join(terms)}->{output}"))
    a, b = terms
    size = sizes[0] | sizes[1]
    batch = [x for x in output if x in a and x in b]
    summed = [x for x in a if x in b and x not in output]
    rows = [x for x in a if x not in b]
    columns = [x for x in b if x not in a]
    left = _arranged(context, tensors[0], a, batch, rows, summed, size)
    right = _arranged(context, tensors[1], b, batch, summed, columns, size)
    product = context.emit_in_module(op.matmul(left, right))
    order = batch + rows + columns
    if len(rows) != 1 or len(columns) != 1:
        product = context.emit(op.reshape(product, [size[x] for x in order]))
    return _transposed(context, product, order, output)


def _explicit(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """The equation's terms and output with "..." and a missing output spelled out, as torch.einsum defines them."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    unused = [letter for letter in string.ascii_letters if letter not in equation]
    terms = inputs.split(",")
    dots = max(rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks)) if "..." in inputs else 0
    spare = "".join(unused[:dots])
    filled = []
    for term, rank in zip(terms, ranks):
        width = rank - len(term.replace("...", ""))
        filled.append(term.replace("...", spare[dots - width :] if width else ""))
    if not arrow:
        letters = inputs.replace("...", "").replace(",", "")
        output = "..." + "".join(sorted(x for x in letters if letters.count(x) == 1))
    return filled, output.replace("...", spare)


def _is_matmul(terms, output, sizes) -> bool:
    if len(terms) != 2 or any(len(set(term)) != len(term) for term in (*terms, output)):
        return False
    a, b = (set(term) for term in terms)
    return a ^ b <= set(output) and all(sizes[0][x] == sizes[1][x] for x in a & b)


def _arranged(context, x, letters, batch, first, second, size):
    """x with its dimensions in the order (batch…, first, second), the letters of `first` and of `second` merged."""
    x = _transposed(context, x, letters, batch + first + second)
    if len(first) == 1 and len(second) == 1:
        return x
    shape = [size[n] for n in batch] + [math.prod(size[n] for n in group) for group in (first, second)]
    return context.emit(op.reshape(x, shape))


def _transposed(context, x, current, wanted):
    axes = [list(current).index(letter) for letter in wanted]
    return x if axes == list(range(len(axes))) else context.emit(op.permute_dims(x, axes))
