"""Mutated saved engines: damaged bytes, other members, other contents, with and without checksums that fit."""

import hashlib
import io
import json
import re
import struct
import warnings
import zipfile
from random import Random

from tests.robustness.fuzz.mutate import mutated_bytes, mutated_json

NAMES = [
    "../evil",
    "/tmp/evil",
    "library.so",
    "weights",
    "./library.so",
    "a/../library.so",
    "LIBRARY.SO",
    "",
    "x" * 5000,
    "ä",
]
LINK = 0o120777 << 16  # external attributes of a symbolic link
CENTRAL = b"PK\1\2"
FIELDS = [(8, "H"), (10, "H"), (16, "I"), (20, "I"), (24, "I"), (28, "H"), (30, "H"), (38, "I"), (42, "I")]


def members_of(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def mutated_archive(rng: Random, base: bytes) -> bytes:
    kind = rng.randrange(8)
    if kind == 0:
        return mutated_bytes(rng, base)
    if kind == 1:
        return _header_changed(rng, base)
    members = list(members_of(base).items())
    if kind == 2:
        return _written(_other_members(rng, members))
    if kind == 3:
        return _written(members, compression=rng.choice((zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)))
    if kind == 4:
        return mutated_bytes(rng, _written(members, comment=rng.randbytes(20), linked=rng.randrange(len(members))))
    name = rng.choice(("manifest.json", "signature.json", "report.json", "checksum", "library.so", "weights"))
    old = dict(members)[name]
    new = mutated_json(rng, json.loads(old)) if name.endswith(".json") else mutated_bytes(rng, old)
    changed = dict(members) | {name: new}
    if kind >= 6 and name not in ("library.so", "weights"):
        changed = sealed(changed, also_manifest=name != "checksum")
    return _written(changed.items())


def sealed(members: dict[str, bytes], also_manifest: bool = True) -> dict[str, bytes]:
    """With the checksums of what is there, where the manifest has a place for them."""
    manifest = members["manifest.json"]
    try:
        data = json.loads(manifest)
        checksums = {name: hashlib.sha256(members[name]).hexdigest() for name in data["sha256"] if name in members}
        if checksums != data["sha256"]:
            data["sha256"] |= checksums
            manifest = json.dumps(data).encode()
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError):
        pass  # a manifest that is none keeps what it has
    members = members | {"manifest.json": manifest}
    return members | {"checksum": hashlib.sha256(manifest).hexdigest().encode()} if also_manifest else members


def _other_members(rng: Random, members: list) -> list:
    kind, at = rng.randrange(4), rng.randrange(len(members))
    name, data = members[at]
    if kind == 0:
        return members[:at] + members[at + 1 :]
    if kind == 1:
        return [*members, (rng.choice(NAMES), rng.choice((b"", data)))]
    if kind == 2:
        return [*members[:at], (rng.choice(NAMES), data), *members[at + 1 :]]
    other = members[rng.randrange(len(members))][1]
    return [*members[:at], (name, other), *members[at + 1 :]]


def _header_changed(rng: Random, base: bytes) -> bytes:
    """A field of a member's entry in the directory: method, checksum, sizes, lengths, mode or place."""
    starts = [match.start() for match in re.finditer(re.escape(CENTRAL), base)]
    offset, kind = rng.choice(FIELDS)
    place, size = rng.choice(starts) + offset, struct.calcsize(kind)
    largest = 256**size - 1
    value = rng.choice((0, 1, 8, 0xFFFF, largest, largest - 1, 1 << 30, rng.randrange(largest)))
    return base[:place] + struct.pack("<" + kind, value & largest) + base[place + size :]


def _written(members, compression=zipfile.ZIP_STORED, comment=b"", linked=None) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", compression) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are there twice
        archive.comment = comment
        for number, (name, data) in enumerate(members):
            info = zipfile.ZipInfo(name)
            info.compress_type = compression
            if number == linked:
                info.external_attr = LINK
            archive.writestr(info, data)
    return file.getvalue()
