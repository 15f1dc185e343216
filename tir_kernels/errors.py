"""The exceptions of the project: one family, so that a caller needs one `except`.

Every message names the value that was refused and the rule that refused it.  The built-in base of each class
lets code that never heard of this project catch it by meaning (`ValueError`, `NotImplementedError`, …).
"""


class StofError(Exception):
    """Base of every exception this project raises on purpose."""


class MaskError(StofError, ValueError):
    """A mask is malformed, keeps nothing, holds NaN, or does not fit the attention that it is given to."""


class InputError(StofError, ValueError):
    """An argument has the wrong shape, dtype, device or structure; says what was expected and what came."""


class UnsupportedError(StofError, NotImplementedError):
    """A valid request that no kernel, pass or target covers."""


class TargetError(StofError, ValueError):
    """A compilation target that is unknown or incomplete."""


class CompileError(StofError, RuntimeError):
    """A kernel or a model did not compile; the compiler's own message is kept."""


class DeviceError(StofError, RuntimeError):
    """The device that a compiled program needs is not here."""


class ExportError(StofError, RuntimeError):
    """PyTorch could not export the model; torch.export's own message is kept."""


class NotRewrittenError(StofError, RuntimeError):
    """`strict=True` and an attention site stayed dense."""


class ArtifactError(StofError, RuntimeError):
    """A saved engine is truncated, altered, of another version or for another machine."""
