"""Dimensions of a program whose batch and length are symbols: tuples of factors, outermost first.

A factor is BATCH, TOKEN or an int.  A view that joins the batch with the tokens has a dimension (BATCH, TOKEN), one
that joins it with four heads (BATCH, 4); a dimension of size 1 has no factor.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

BATCH, TOKEN = "batch", "token"

Factor: TypeAlias = Any  # BATCH, TOKEN or an int
Dim: TypeAlias = tuple[Factor, ...]


class UnknownSize(ValueError):
    """A size that is no product of a number, the batch and the length."""


def size_factors(size, roles: Mapping[str, str]) -> tuple[int, Counter]:
    """(a number, how often BATCH and TOKEN occur) whose product a recorded size is.

    `roles` says which of them each symbol's name is.  Raises UnknownSize for another size.
    """
    if not isinstance(size, torch.SymInt) or size.node.expr.is_number:
        return int(size), Counter()
    number, rest = size.node.expr.as_coeff_Mul()
    symbols: Counter = Counter()
    for symbol, power in rest.as_powers_dict().items():
        if str(symbol) not in roles or not power.is_Integer or power < 1:
            raise UnknownSize(str(size))
        symbols[roles[str(symbol)]] += int(power)
    return int(number), symbols


def dim_of(size, roles: Mapping[str, str]) -> Dim:
    """The dimension of a recorded size of an input; UnknownSize where its factors may come in several orders."""
    number, symbols = size_factors(size, roles)
    factors = [*symbols.elements(), *([number] if number != 1 else [])]
    if len(factors) > 1:
        raise UnknownSize(str(size))
    return tuple(factors)


def joined(factors: Sequence[Factor]) -> Dim:
    """The dimension of some factors: ints beside each other are one, and 1 is none."""
    dim: list[Factor] = []
    for factor in factors:
        if isinstance(factor, int) and dim and isinstance(dim[-1], int):
            dim[-1] *= factor
        elif factor != 1:
            dim.append(factor)
    return tuple(dim)


def regrouped(dims: Sequence[Dim], sizes: Sequence[tuple[int, Counter]]) -> list[Dim] | None:
    """The dimensions of a view with these sizes; None where it does not keep the batch and the tokens whole."""
    queue: list[Factor] = [factor for dim in dims for factor in dim]
    result = []
    for number, symbols in sizes:
        taken: list[Factor] = []
        symbols = Counter(symbols)
        while number != 1 or symbols.total():
            if not queue:
                return None
            factor = queue.pop(0)
            if not isinstance(factor, int):
                if not symbols[factor]:
                    return None
                symbols[factor] -= 1
                taken.append(factor)
            elif number % factor == 0:
                number //= factor
                taken.append(factor)
            elif factor % number == 0 and not symbols.total():
                taken.append(number)
                queue.insert(0, factor // number)
                number = 1
            else:
                return None
        result.append(joined(taken))
    return result if all(factor == 1 for factor in queue) else None


def has(dim: Dim, factor: Factor) -> bool:
    """Whether a dimension has a factor."""
    return factor in dim


def is_fixed(dim: Dim) -> bool:
    """Whether a dimension's size depends neither on the batch nor on the length."""
    return all(isinstance(factor, int) for factor in dim)


def words(dim: Dim) -> str:
    """A dimension for a message: "batch·token", "8"."""
    return "·".join(map(str, dim)) or "1"
