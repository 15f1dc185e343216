"""A rule as passes see it: its function, exported by PyTorch for the shapes of an attention, as a Relax module."""

import torch
import tvm

from relax_passes.attention.site_names import named
from stof_tvm.frontend import import_model
from stof_tvm.masks.runtime.rule import Rule
from tir_kernels.errors import ExportError, MaskError, StofError, UnsupportedError


class TracedRule:
    """The rule of an attention, for the operands that the attention has.

    Parameters
    ----------
    rule : Rule
    path : str
        The attention, for messages.
    known : dict
        Modules that were traced before, which attentions with equal rules and operands share; filled here.
    """

    def __init__(self, rule: Rule, path: str, known: dict):
        self.rule, self.path, self.known = rule, path, known

    def __repr__(self):
        return repr(self.rule)

    @property
    def block(self) -> tuple[int, int]:
        """Height and width of a block."""
        return self.rule.block

    def traced(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...], dtype: str) -> tvm.IRModule:
        """A module whose "main" takes q and k, of these shapes, and returns a tuple of the block map alone.

        Parameters
        ----------
        q_shape, k_shape : tuple of int
            (B, H, Sq, D) and (B, Hkv, Skv, D).
        dtype : str
            Of q and k.

        Raises
        ------
        MaskError
            A function that gives no block map, or refuses the shapes.
        ExportError
            A function that torch.export refuses: one that decides by values, or keeps tensors of its own.
        UnsupportedError
            An operator that has no converter.
        """
        key = self.rule.identity, self.rule.block, q_shape, k_shape, dtype
        if key not in self.known:
            self.known[key] = self._traced(q_shape, k_shape, getattr(torch, dtype))
        return self.known[key]

    def _traced(self, q_shape, k_shape, dtype: torch.dtype) -> tvm.IRModule:
        tensors = tuple(torch.empty(shape, dtype=dtype) for shape in (q_shape, k_shape))  # their values are not read
        try:
            imported = import_model(_AsModel(self.rule), tensors)
            if imported.states:
                raise UnsupportedError(f"it writes into {', '.join(state.name for state in imported.states)}")
            return imported.mod
        except MaskError as error:
            raise MaskError(f"attention {named(self.path)}: {error}") from None
        except StofError as error:
            kind = type(error) if isinstance(error, ExportError | UnsupportedError) else UnsupportedError
            raise kind(
                f"attention {named(self.path)}: the function of {self.rule.text} cannot be a part of an engine; as a "
                f"model of its own: {error}"
            ) from error.__cause__


class _AsModel(torch.nn.Module):
    """A rule as a model of q and k, which gives the block map."""

    def __init__(self, rule: Rule):
        super().__init__()
        self.rule = rule

    def forward(self, q, k):
        return self.rule.block_map(q, k)
