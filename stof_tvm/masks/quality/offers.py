"""What `calibrate` offers the heads of each attention: candidates that are given, also by path, or found."""

import reprlib
from collections.abc import Iterable, Mapping

from relax_passes.attention.site_names import THE_MODEL, matches, named
from stof_tvm.masks.mask import Mask
from stof_tvm.masks.quality.candidates import EVERYTHING, default_candidates, rule_candidates
from stof_tvm.masks.quality.weights import Attention
from stof_tvm.masks.runtime.per_head import OfHeads
from stof_tvm.masks.runtime.rule import Rule
from stof_tvm.masks.windows import causal
from tir_kernels.errors import InputError, MaskError

RULES = "rules"
Candidates = list[Mask | Rule] | str | None


class Offers:
    """The `candidates` of `calibrate`: those of all attentions, or a mapping from path patterns, as `mask=` has them.

    Raises
    ------
    MaskError
        Candidates that are neither masks nor rules of one head, rules of several blocks, keys that are no paths.
    InputError
        A text that is not "rules".
    """

    def __init__(self, given: Iterable[Mask | Rule] | str | Mapping | None):
        self.has_paths = isinstance(given, Mapping)
        by_pattern: Mapping = given if isinstance(given, Mapping) else {"*": given}
        if not by_pattern:
            raise MaskError('candidates={} names no attention: leave it out, or give {"encoder.layer.*": [mask]}')
        self.by_pattern: dict[str, Candidates] = {}
        for pattern, candidates in by_pattern.items():
            if not isinstance(pattern, str):
                raise MaskError(f"candidates={{{pattern!r}: …}}: keys are module paths, got {type(pattern).__name__}")
            checked = None if candidates is None else _checked(candidates)
            self.by_pattern["" if pattern == THE_MODEL else pattern] = checked

    def reaches(self, path: str) -> bool:
        """Whether an attention has candidates."""
        return self._pattern(path) is not None

    def finds_lines(self, path: str, attention: Attention) -> bool:
        """Whether the candidates are columns and diagonals of the first sample, which fit its lengths only."""
        return self._of(path) is None and attention.is_causal

    def options(self, path: str, attention: Attention, rows: int | None) -> list[list[Mask | Rule]]:
        """What each head of an attention chooses from."""
        candidates = self._of(path)
        if candidates is None:
            return [[*own] for own in default_candidates(attention, rows)]
        shared = rule_candidates(attention) if isinstance(candidates, str) else [*candidates, EVERYTHING]
        return [shared] * attention.sizes[1]

    def check(self, path: str, attention: Attention) -> None:
        """MaskError for a candidate of which an attention has nothing, which `build` would refuse."""
        candidates = self._of(path)
        for one in candidates if isinstance(candidates, list) else []:
            mask = one.within if isinstance(one, Rule) else one
            if attention.causal and mask is not None:
                mask &= causal()
            if mask is not None and mask.compile(*attention.sizes[2:]).is_empty:
                raise MaskError(
                    f"the candidate {one!r} keeps nothing of attention {path!r}, of {attention.sizes[2]} queries "
                    f"and {attention.sizes[3]} keys: build takes no such mask"
                )

    def told(self, path: str, attention: Attention, error: MaskError) -> MaskError:
        """The error of candidates that do not fit an attention, with its path and what may be given instead."""
        _, _, q_len, kv_len = attention.sizes
        others = "" if self.has_paths else '; candidates={"path.*": [mask]} are for the attentions of these paths only'
        return MaskError(f"attention {named(path)}, of {q_len} queries and {kv_len} keys: {error}{others}")

    def check_reached(self, paths: Iterable[str]) -> None:
        """MaskError for a pattern that matches none of the model's attentions."""
        known = [*paths]
        for pattern in self.by_pattern if self.has_paths else ():
            if not any(matches(pattern, path) for path in known):
                listed = ", ".join(map(named, known))
                raise MaskError(
                    f"candidates path {named(pattern)} matches no attention of the model; there are: {listed}"
                )

    def _of(self, path: str) -> Candidates:
        pattern = self._pattern(path)
        return None if pattern is None else self.by_pattern[pattern]

    def _pattern(self, path: str) -> str | None:
        """The last pattern that matches, as with masks."""
        return next((pattern for pattern in reversed(self.by_pattern) if matches(pattern, path)), None)


def _checked(candidates) -> list[Mask | Rule] | str:
    if isinstance(candidates, str):
        if candidates != RULES:
            raise InputError(f"candidates={reprlib.repr(candidates)} must be masks and rules, or {RULES!r}")
        return candidates
    given = list(candidates) if isinstance(candidates, Iterable) else [candidates]
    for one in given:
        mask = one.within if isinstance(one, Rule) else one
        is_divided = isinstance(one, Rule) and isinstance(one.function, OfHeads)
        if is_divided or not (isinstance(mask, Mask) or (mask is None and isinstance(one, Rule))) or _is_of_some(mask):
            raise MaskError(
                f"candidates are masks and rules of one head for all batch entries, got {reprlib.repr(one)}"
            )
    if not given:
        raise MaskError("candidates needs at least one mask, got none")
    blocks = {one.block: one for one in given if isinstance(one, Rule)}
    if len(blocks) > 1:
        told = ", ".join(f"{rule!r} {block[0]}x{block[1]}" for block, rule in blocks.items())
        raise MaskError(f"heads of one attention have rules of one block; the candidates have {told}")
    return given


def _is_of_some(mask: Mask | None) -> bool:
    """Whether a mask depends on the head or the batch entry."""
    return mask is not None and (mask.heads is not None or mask.batch is not None)
