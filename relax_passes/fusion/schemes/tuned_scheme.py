"""The fusion scheme that a tuning log has for a graph of operators, or a default."""

import hashlib
from collections.abc import Callable
from typing import Any

from relax_passes.fusion.operators import OperatorGraph
from relax_passes.fusion.schemes.fusion_scheme import FusionScheme, check_scheme
from relax_passes.fusion.schemes.segment_signature import signature
from relax_passes.tuned_choices import TunedChoices
from tir_kernels.errors import SchemeError


def graph_key(graph: OperatorGraph) -> str:
    """A key equal for graphs of one structure: operators, shapes, dtypes and connections, whatever the weights."""
    whole = signature(graph, range(len(graph.operators)))
    return hashlib.sha256(repr(whole).encode()).hexdigest()[:32]


class TunedScheme:
    """A function from an OperatorGraph to its best known scheme, or to what `default` gives for it."""

    def __init__(self, tuned: TunedChoices, default: Callable[[OperatorGraph], FusionScheme]):
        self.tuned = tuned
        self.default = default

    def __call__(self, graph: OperatorGraph) -> FusionScheme:
        if (known := self.known(graph)) is None:
            return self.default(graph)
        scheme, self.tuned.scheme_in_use = known
        return scheme

    def known(self, graph: OperatorGraph) -> tuple[FusionScheme, Any] | None:
        """The scheme that the log has for a graph, and its record; None where it has none that fits."""
        record = self.tuned.scheme(graph_key(graph))
        if record is None:
            return None
        try:
            scheme = FusionScheme.parse(record.scheme)
            check_scheme(scheme, graph.operators)
        except SchemeError as error:
            self.tuned.note(f"the fusion scheme {record.scheme} of {record.date} no longer fits: {error}")
            return None
        return scheme, record

    def is_faster_with(self, graph: OperatorGraph, other: OperatorGraph) -> bool:
        """Whether the log has a scheme for a graph, and none for another of the same model that is as fast.

        Schemes that were found on this GPU go before those of other GPUs.
        """
        if (of_graph := self.known(graph)) is None:  # as in most builds: a key takes a third of a second for 28 layers
            return False
        if (of_other := self.known(other)) is None:
            return True
        first, second = ((record.gpu != self.tuned.gpu, record.us) for _, record in (of_graph, of_other))
        return first < second
