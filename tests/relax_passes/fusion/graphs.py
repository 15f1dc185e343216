"""Random operator graphs for property tests."""

from hypothesis import strategies as st

from relax_passes.fusion.operators import ATTENTION, CI, MI, Operator


@st.composite
def operator_graphs(draw, max_size: int = 9) -> list[Operator]:
    """Up to `max_size` operators in topological order, most reading their predecessor, some others besides."""
    operators = []
    for i in range(draw(st.integers(1, max_size))):
        kind = draw(st.sampled_from([CI, MI, MI, MI, ATTENTION]))
        inputs = set(draw(st.lists(st.integers(0, i - 1), max_size=2))) if i else set()
        if i and draw(st.integers(0, 3)):
            inputs.add(i - 1)
        site = draw(st.sampled_from("ab")) if kind == ATTENTION else ""
        operators.append(Operator(kind.lower(), kind, tuple(sorted(inputs)), site))
    return operators
