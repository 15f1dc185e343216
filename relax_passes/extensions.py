"""A user's own kernel templates and fusion rules for one build."""

from collections.abc import Iterable

import tvm

from tir_kernels.errors import InputError

# The attributes that a template for fused segments must have (tir_kernels/template.py).
TEMPLATE = ("NAME", "TARGET_KIND", "unsupported", "configs", "predict_us", "operands", "instantiate")


class Extensions:
    """Templates and rules, checked.

    Parameters
    ----------
    templates : iterable
        Modules or other objects with the attributes listed in `TEMPLATE`.  Templates for the target's kind are tried
        before the project's own.
    rules : iterable of tvm.transform.Pass
        Passes that run on the Relax module after `CanonicalizeOperators`, when common operators have one spelling, and
        before the operators are cut into segments.

    Raises InputError for an attention template, for a template that lacks one of the attributes, and for a rule that is
    not a pass.
    """

    def __init__(self, templates: Iterable = (), rules: Iterable[tvm.transform.Pass] = ()):
        self.templates, self.rules = tuple(templates), tuple(rules)
        for template in self.templates:
            if missing := [name for name in TEMPLATE if not hasattr(template, name)]:
                raise InputError(f"template {getattr(template, 'NAME', template)!r} has no {', '.join(missing)}")
            if hasattr(template, "TAKES_TOKEN_STRIDES"):
                raise InputError(
                    f"template {template.NAME!r} computes attentions, and templates= takes those of fused segments; "
                    f"attention's are listed in tir_kernels/attention/registry.py"
                )
        for rule in self.rules:
            if not isinstance(rule, tvm.transform.Pass):
                raise InputError(f"a rule is a tvm.transform.Pass, got {type(rule).__name__}")

    def templates_for(self, target: tvm.target.Target) -> list:
        """The templates of a target's kind, in the order given."""
        return [template for template in self.templates if template.TARGET_KIND == target.kind.name]


NO_EXTENSIONS = Extensions()
