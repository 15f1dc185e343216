"""A model's weights from files, mapped into memory: of what nobody reads, nothing leaves the file.

So ranks that divide a model copy their own parts only, and what they read is in the page cache of their host once.
"""

import copy
from pathlib import Path

import torch

from tir_kernels.errors import InputError

SAFETENSORS, PICKLED = (".safetensors",), (".pt", ".pth", ".bin")


def with_weights(model: torch.nn.Module | torch.export.ExportedProgram, weights: str | Path) -> torch.nn.Module:
    """A copy of a model, of which tensors may be on the meta device, with the tensors of a file.

    Parameters
    ----------
    model : torch.nn.Module
        It stays as it is.  Tensors that are not on the meta device and not in the file stay.
    weights : path
        A .safetensors file, a folder of some, or a file of `torch.save(model.state_dict())` (.pt, .pth, .bin).

    Raises
    ------
    InputError
        There is no such file, or its tensors are not the model's: names, shapes, dtypes.
    """
    if not isinstance(model, torch.nn.Module):
        raise InputError(f"weights are those of a torch.nn.Module, got a {type(model).__name__}")
    found = _mapped(weights)
    memo = {id(x): x for x in (*model.parameters(), *model.buffers()) if not x.is_meta}  # which are not copied
    model = copy.deepcopy(model, memo)
    places: dict[int, list[tuple[torch.nn.Module, str, str]]] = {}  # of each tensor, tied ones in several
    for path, module in model.named_modules():
        for tensors in (module._parameters, module._buffers):
            for name, x in tensors.items():
                if x is not None:
                    places.setdefault(id(x), []).append((module, name, f"{path}.{name}" if path else name))
    known = {name for tied in places.values() for _, _, name in tied}
    if unknown := sorted(found.keys() - known):
        raise InputError(
            f"{weights} has {unknown[0]!r}, and the model has no tensor of that name ({len(unknown)} such)"
        )
    for tied in places.values():
        module, name, path = tied[0]
        old = getattr(module, name)
        stored = next((found[path] for _, _, path in tied if path in found), None)
        if stored is None:
            if old.is_meta:
                raise InputError(f"{path} is on the meta device, and {weights} does not have it")
            continue
        if stored.shape != old.shape or stored.dtype != old.dtype:
            kinds = [f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for x in (stored, old)]
            raise InputError(f"{path} in {weights} is {kinds[0]}, in the model {kinds[1]}")
        is_parameter = isinstance(old, torch.nn.Parameter)
        new = torch.nn.Parameter(stored, requires_grad=False) if is_parameter else stored
        for module, name, _ in tied:
            setattr(module, name, new)
    return model


def _mapped(weights: str | Path) -> dict[str, torch.Tensor]:
    """The tensors of files by name, in memory that is mapped to them."""
    path = Path(weights)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise InputError(f"weights={str(weights)!r} is no file, and no folder with .safetensors files")
    found: dict[str, torch.Tensor] = {}
    for file in files:
        tensors = _of_file(file)
        if twice := sorted(found.keys() & tensors.keys()):
            raise InputError(f"{twice[0]} is in {file.name} and in another file of {path}")
        found |= tensors
    return found


def _of_file(file: Path) -> dict[str, torch.Tensor]:
    try:
        if file.suffix in SAFETENSORS:
            from safetensors import safe_open

            with safe_open(str(file), "pt") as opened:
                return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no dict
        if file.suffix not in PICKLED:
            raise InputError(f"weights={str(file)!r} ends neither in .safetensors nor in {', '.join(PICKLED)}")
        tensors = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except InputError:
        raise
    except ImportError:
        raise InputError(f"{file} needs the package safetensors: pip install safetensors") from None
    except Exception as error:  # of either library, for a damaged file
        raise InputError(f"{file} cannot be read: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(x, torch.Tensor) for x in tensors.values()):
        raise InputError(f"{file} is no state_dict: it must hold tensors by their names")
    return tensors
