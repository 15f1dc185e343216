"""From Relax operators to PrimFuncs that TVM's rules have fused and nothing has scheduled, for any target."""

from collections.abc import Callable, Sequence

import tvm
from tvm import relax

from relax_passes.schedule.cut_views import CutViews
from relax_passes.schedule.fold_layouts import FoldLayouts


def fused_functions(
    prepared: Sequence[tvm.transform.Pass],
    legalizations: dict[str, Callable],
    inspections: Sequence[tvm.transform.Pass] = (),
) -> list:
    """The passes that legalize and fuse the operators of a Relax module, which then calls unscheduled PrimFuncs.

    `prepared` are the target's passes before its `legalizations`.  `inspections` are passes that look at segments after
    their operators are fused and before they are inlined.
    """
    return [
        *prepared,
        # Weights are stored (out, in): their transposes are constants from here on.
        FoldLayouts(),
        CutViews(),
        relax.transform.LegalizeOps(legalizations),
        relax.transform.AnnotateTIROpPattern(),
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        *inspections,
        # Segments that no template computes: TVM's rules have fused inside them, and never across their borders.
        relax.transform.InlinePrivateFunctions(),
        relax.transform.CanonicalizeBindings(),
        relax.transform.DeadCodeElimination(),
    ]
