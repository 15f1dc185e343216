"""The identity by which masks compare and hash: a digest of their contents, which keeps no tensor alive."""

import hashlib

from stof_tvm.masks.arguments import ArrayKey


class Identity:
    """Equal for equal contents; caches are keyed by it, so that they do not keep a mask's dense arrays in memory.

    Parameters
    ----------
    parts : tuple
        Numbers, texts, bytes, None, `ArrayKey`s, functions and classes that a module names, other identities, and
        tuples of these.
    held : tuple
        Objects that `parts` name by their address alone: the identity keeps them alive, so no other gets that address.
    """

    __slots__ = ("digest", "held")

    def __init__(self, parts: tuple, held: tuple = ()):
        sha = hashlib.sha256()
        found = list(held)
        _tell(parts, sha, found)
        self.digest, self.held = sha.digest(), tuple(found)

    def __eq__(self, other):
        return isinstance(other, Identity) and self.digest == other.digest

    def __hash__(self):
        return hash(self.digest)


def _tell(part, sha, held: list) -> None:
    """Feed a part to the hash, its kind and length first, so that no two sequences of parts hash alike."""
    if isinstance(part, tuple):
        sha.update(b"(%d:" % len(part))
        for each in part:
            _tell(each, sha, held)
        return
    if isinstance(part, Identity):
        held.extend(part.held)
        data = part.digest
    elif isinstance(part, ArrayKey):
        data = part.digest.encode()
    elif isinstance(part, bytes):
        data = part
    elif callable(part):
        data = f"{part.__module__}.{part.__qualname__}".encode()
    else:
        data = repr(part).encode()
    sha.update(b"%s %d:" % (type(part).__name__.encode(), len(data)))
    sha.update(data)
