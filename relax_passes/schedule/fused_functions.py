"""From Relax operators to PrimFuncs that TVM's rules have fused and nothing has scheduled, for any target."""

from collections.abc import Callable, Sequence

import tvm
from tvm import relax


def fused_functions(
    prepared: Sequence[tvm.transform.Pass],
    legalizations: dict[str, Callable],
    told: Sequence[tvm.transform.Pass] = (),
) -> list:
    """Legalise and fuse the operators of a Relax module: it calls PrimFuncs without schedules then.

    `prepared` are a target's passes before its `legalizations`, `told` those that look at fusion groups once they are
    fused and before they are inlined.
    """
    return [
        *prepared,
        relax.transform.LegalizeOps(legalizations),
        relax.transform.AnnotateTIROpPattern(),
        # Weights are stored (out, in): their transposes are constants from here on.
        relax.transform.FoldConstant(),
        relax.transform.FuseOps(),
        relax.transform.FuseTIR(),
        *told,
        # Fusion groups that no template computes: TVM's rules have fused inside them, and never across their borders.
        relax.transform.InlinePrivateFunctions(),
        relax.transform.CanonicalizeBindings(),
        relax.transform.DeadCodeElimination(),
    ]
