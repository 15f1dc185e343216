"""Fusion schemes: a binary digit for each operator, in canonical order; equal neighbours are a segment (paper, §3).

    operators   matmul add   attention   matmul add layer_norm   matmul
    digits        0     0        1          0    0      0          1

The digits mean nothing else, so a scheme and its complement are the same scheme; the canonical form begins with 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from relax_passes.fusion.operators import ATTENTION, CI, SORT, Operator
from tir_kernels.errors import SchemeError

MAX_CI = 2  # in a segment: the paper's templates hold one matrix product, or two in a chain


@dataclass(frozen=True)
class FusionScheme:
    """How a sequence of operators is cut into segments; equal schemes are equal and hash alike.

    Attributes
    ----------
    digits : str
        One "0" or "1" for each operator; spaces are ignored.  Kept in canonical form.
    """

    digits: str

    def __post_init__(self):
        digits = self.digits.replace(" ", "")
        for position, digit in enumerate(digits):
            if digit not in "01":
                raise SchemeError(f"digit {position} of the scheme is {digit!r}; it must be 0 or 1")
        if digits.startswith("1"):
            digits = digits.translate(str.maketrans("01", "10"))
        object.__setattr__(self, "digits", digits)

    @classmethod
    def from_lengths(cls, lengths: Iterable[int]) -> "FusionScheme":
        """The scheme whose segments have these lengths, in order."""
        return cls("".join("01"[number % 2] * length for number, length in enumerate(lengths)))

    @classmethod
    def from_segments(cls, segments: Iterable[Iterable[int]]) -> "FusionScheme":
        """The scheme of segments that partition 0 … n-1 into intervals, in any order; SchemeError for others."""
        ordered = sorted(sorted(segment) for segment in segments)
        expected = 0
        for segment in ordered:
            for operator in segment:
                if operator != expected:
                    raise SchemeError(
                        f"operator #{expected} is missing where segment {segment} goes on with #{operator}: segments "
                        f"are intervals of the canonical order and hold each operator once"
                    )
                expected += 1
        return cls.from_lengths(map(len, ordered))

    @classmethod
    def parse(cls, text: str) -> "FusionScheme":
        """Digits ("00 11111 0"), or the hexadecimal form, which begins with "0x"; SchemeError for anything else."""
        if not text.startswith("0x"):
            return cls(text)
        try:
            marked = bin(int(text, 16))[2:]
        except ValueError:
            raise SchemeError(f"{text[:40]!r} is not a hexadecimal scheme") from None
        return cls(marked[1:])

    @property
    def hex(self) -> str:
        """The digits as a hexadecimal number, after a leading 1 that keeps their count."""
        return hex(int("1" + self.digits, 2))

    @property
    def segments(self) -> tuple[range, ...]:
        """The operators of each segment, in order."""
        starts = [i for i in range(len(self)) if i == 0 or self.digits[i] != self.digits[i - 1]]
        return tuple(range(start, end) for start, end in zip(starts, [*starts[1:], len(self)]))

    @property
    def sets(self) -> frozenset[frozenset[int]]:
        """The segments as sets; `from_segments` is the inverse."""
        return frozenset(frozenset(segment) for segment in self.segments)

    def __len__(self) -> int:
        return len(self.digits)

    def __str__(self) -> str:
        return " ".join(self.digits[segment.start : segment.stop] for segment in self.segments)


def check_scheme(scheme: FusionScheme, operators: Sequence[Operator]) -> None:
    """SchemeError, naming an operator and the rule, unless the scheme cuts these operators into legal segments."""
    if len(scheme) != len(operators):
        first = min(len(scheme), len(operators))
        known = f"operator #{first} {operators[first].name!r} has none" if first < len(operators) else "no more follow"
        raise SchemeError(f"the scheme has {len(scheme)} digits for {len(operators)} operators: {known}")
    for segment in scheme.segments:
        check_segment(segment, operators)


def is_legal(scheme: FusionScheme, operators: Sequence[Operator]) -> bool:
    """Whether `check_scheme` accepts the scheme."""
    try:
        check_scheme(scheme, operators)
    except SchemeError:
        return False
    return True


def check_segment(segment: Iterable[int], operators: Sequence[Operator]) -> None:
    """SchemeError unless this set of operators can be one segment.

    A segment is convex: no path leaves it and comes back.  It is connected: its operators read one another, or share an
    input, as the rotations of a query and its key do.  An attention or a sort is a segment by itself.  No segment
    holds more than two compute-intensive operators.  Intervals of a topological order are always convex.
    """
    members = sorted(segment)
    inside = set(members)
    _check_attention(inside, operators)
    for i in members:
        if operators[i].kind == SORT and len(members) > 1:
            raise _error(i, operators, "sorts, and shares a segment, which must be its own")
    compute = [i for i in members if operators[i].kind == CI]
    if len(compute) > MAX_CI:
        raise _error(
            compute[MAX_CI], operators, f"is one too many: a segment has at most {MAX_CI} compute-intensive operators"
        )
    _check_convex(members, inside, operators)
    _check_connected(members, inside, operators)


def _check_attention(inside, operators):
    sites = {operators[i].site for i in inside if operators[i].kind == ATTENTION}
    if not sites:
        return
    for i in sorted(inside):
        if operators[i].kind != ATTENTION or len(sites) > 1:
            raise _error(i, operators, "shares a segment with an attention, which must be one of its own")
    (site,) = sites
    for i, operator in enumerate(operators):
        if operator.kind == ATTENTION and operator.site == site and i not in inside:
            raise _error(i, operators, "is cut off from its attention, which must be one segment")


def _check_convex(members, inside, operators):
    """Raise SchemeError if an operator outside reads a member, directly or not, and is read by another one."""
    tainted = set()  # operators outside that depend on a member
    for i in range(members[0], members[-1] + 1):
        returned = [j for j in operators[i].inputs if j in tainted]
        if i in inside and returned:
            raise _error(
                returned[0], operators, f"lies on a path from the segment of #{i} back to it: segments are convex"
            )
        if i not in inside and any(j in inside or j in tainted for j in operators[i].inputs):
            tainted.add(i)


def _check_connected(members, inside, operators):
    linked = {i: set() for i in members}
    reader = {}  # operator outside -> the first member that reads it
    for i in members:
        for j in operators[i].inputs:
            other = j if j in inside else reader.setdefault(j, i)
            linked[i].add(other)
            linked[other].add(i)
    reached, pending = {members[0]}, [members[0]]
    while pending:
        new = linked[pending.pop()] - reached
        reached |= new
        pending += new
    for i in members:
        if i not in reached:
            raise _error(i, operators, f"is not connected with #{members[0]}, the first of its segment")


def _error(index, operators, rule) -> SchemeError:
    return SchemeError(f"operator #{index} {operators[index].name!r} {rule}")
