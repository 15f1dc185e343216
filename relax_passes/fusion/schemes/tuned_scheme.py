"""The fusion scheme that a tuning log has for a graph of operators, or a default."""

import hashlib
from collections.abc import Callable

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
        record = self.tuned.scheme(graph_key(graph))
        if record is not None:
            try:
                scheme = FusionScheme.parse(record.scheme)
                check_scheme(scheme, graph.operators)
                self.tuned.scheme_in_use = record
                return scheme
            except SchemeError as error:
                self.tuned.note(f"the fusion scheme {record.scheme} of {record.date} no longer fits: {error}")
        return self.default(graph)
