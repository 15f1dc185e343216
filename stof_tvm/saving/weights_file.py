"""The weights of a saved engine: one stored member of its zip file, which is mapped and read in place.

The member comes first and its data begin on a page; each tensor begins on the next 64-byte boundary after the
previous one.  So compiled code reads the mapping itself, and no weight is ever copied on a CPU.
"""

import mmap
import struct
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BufferedReader

import torch

from stof_tvm.running.alignment import ALIGNMENT, aligned
from tir_kernels.errors import ArtifactError

PAGE = 4096
CHUNK = 1 << 20  # bytes that are read at a time
LOCAL_HEADER, LOCAL_SIZE, LENGTHS_AT = b"PK\3\4", 30, 26  # a member's header before its name: PKWARE's APPNOTE 4.3.7
PADDING_FIELD = 0x5057  # an extra field that other programs skip
PADDING_HEAD = struct.calcsize("<HH")


@dataclass(frozen=True)
class Weights:
    """Tensors in memory or in a mapped file; `crc32` is the file's checksum when it was mapped, None in memory."""

    tensors: Sequence[torch.Tensor] = ()
    crc32: int | None = None

    def to_json(self, crc32: int) -> dict:
        """The description by which `mapped` finds the tensors again."""
        specs = [[str(x.dtype).removeprefix("torch."), list(x.shape)] for x in self.tensors]
        return {"crc32": crc32, "tensors": specs}


def write_weights(archive: zipfile.ZipFile, name: str, weights: Weights) -> dict:
    """Write the weights as an archive's first member; returns the description for `mapped`.  Copies nothing in memory.

    Raises ArtifactError where the file that the weights are mapped from has changed since it was loaded.
    """
    info = zipfile.ZipInfo(name)
    info.CRC = 0
    padding = -(len(info.FileHeader(zip64=True)) + PADDING_HEAD) % PAGE
    info.extra = struct.pack("<HH", PADDING_FIELD, padding) + bytes(padding)
    with archive.open(info, "w", force_zip64=True) as member:
        for tensor in weights.tensors:
            member.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            member.write(bytes(-tensor.nbytes % ALIGNMENT))
    if weights.crc32 not in (None, info.CRC):
        raise ArtifactError("the file that this engine was loaded from was altered: its weights are others now")
    return weights.to_json(info.CRC)


def is_description(value) -> bool:
    """Whether JSON data are what `write_weights` returns."""
    return (
        isinstance(value, dict)
        and type(value.get("crc32")) is int
        and isinstance(value.get("tensors"), list)
        and all(isinstance(entry, list) and len(entry) == 2 and _is_tensor(*entry) for entry in value["tensors"])
    )


def mapped(file: BufferedReader, info: zipfile.ZipInfo, described: dict) -> Weights:
    """The weights, in a private mapping of the file that lasts as long as they do.

    Raises ArtifactError where the file does not hold the weights that were written.
    """
    start = data_start(file, info)
    if _crc32(file, start, info.file_size) != described["crc32"]:
        raise ArtifactError(f"{info.filename} in {file.name} does not have its checksum: the file was altered")
    sizes = [_size(*entry) for entry in described["tensors"]]
    if sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes) != info.file_size:
        raise ArtifactError(f"{info.filename} has {info.file_size} bytes, which are not those of its tensors")
    # A write to a tensor, which nobody should do, goes to a copy of the page: the file stays as it is.
    data = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    tensors = []
    for (dtype, shape), size in zip(described["tensors"], sizes, strict=True):
        # The data are unaligned only if another program packed the file again.
        tensors.append(aligned(data[start : start + size]).view(getattr(torch, dtype)).view(shape))
        start += -(-size // ALIGNMENT) * ALIGNMENT
    return Weights(tensors, described["crc32"])


def data_start(file: BufferedReader, info: zipfile.ZipInfo) -> int:
    """Where the data of a stored member begin; ArtifactError where the file has no member there."""
    file.seek(info.header_offset)
    header = file.read(LOCAL_SIZE)
    if len(header) < LOCAL_SIZE or not header.startswith(LOCAL_HEADER):
        raise ArtifactError(f"{info.filename} is not where the directory says")
    return info.header_offset + LOCAL_SIZE + sum(struct.unpack_from("<HH", header, LENGTHS_AT))


def _crc32(file: BufferedReader, start: int, size: int) -> int:
    """The CRC-32 of a part of a file, not of the mapping: a disk that fails within a mapping ends the process."""
    file.seek(start)
    buffer, crc = memoryview(bytearray(CHUNK)), 0
    while size:
        count = file.readinto(buffer[: min(size, CHUNK)])
        if not count:
            raise ArtifactError("the file ends within its weights")
        crc, size = zlib.crc32(buffer[:count], crc), size - count
    return crc


def _is_tensor(dtype, shape) -> bool:
    is_dtype = isinstance(dtype, str) and isinstance(getattr(torch, dtype, None), torch.dtype)
    return is_dtype and isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)


def _size(dtype: str, shape: Iterable[int]) -> int:
    size = getattr(torch, dtype).itemsize
    for n in shape:
        size *= n
    return size
