"""The exceptions of the project: one family, so that a caller needs one `except`.

Every message names the value that was refused and the rule that refused it.  The built-in base of each class
lets code that never heard of this project catch it by meaning (`ValueError`, `NotImplementedError`, …).

The classes are registered with TVM's FFI, so an exception that a Python pass raises keeps its type when it leaves
`Sequential`.
"""

from tvm_ffi import register_error


@register_error
class StofError(Exception):
    """Base of every exception this project raises on purpose."""


@register_error
class MaskError(StofError, ValueError):
    """A mask is malformed, keeps nothing, holds NaN, or does not fit the attention that it is given to."""


@register_error
class InputError(StofError, ValueError):
    """An argument has the wrong shape, dtype, device or structure; the message says what was expected."""


@register_error
class UnsupportedError(StofError, NotImplementedError):
    """A valid request that no kernel, pass or target covers."""


@register_error
class TargetError(StofError, ValueError):
    """A compilation target that is unknown or incomplete."""


@register_error
class CompileError(StofError, RuntimeError):
    """A kernel or a model did not compile; the compiler's own message is kept."""


@register_error
class DeviceError(StofError, RuntimeError):
    """The device that a compiled program needs is not here."""


@register_error
class ExportError(StofError, RuntimeError):
    """PyTorch could not export the model; torch.export's own message is kept."""


@register_error
class SchemeError(StofError, ValueError):
    """A fusion scheme that is malformed or does not fit the operators of the model that it is given to."""


@register_error
class NotRewrittenError(StofError, RuntimeError):
    """An attention stayed dense although a mask was given for it, or although `strict=True` forbids that."""


@register_error
class VerificationError(StofError, RuntimeError):
    """An engine's results differ from PyTorch's; the message names output, error and the first module that differs."""


@register_error
class ArtifactError(StofError, RuntimeError):
    """A saved engine is truncated, altered, of another version or for another machine."""


@register_error
class ParallelError(StofError, RuntimeError):
    """Another rank failed, is gone or does not answer, or ranks were given different things; it names the rank."""


@register_error
class TuningLogError(StofError, RuntimeError):
    """A tuning log is damaged, missing or of another version; the message names file and line."""
