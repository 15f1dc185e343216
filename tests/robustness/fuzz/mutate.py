"""Mutators that know what they mutate: bytes, text, JSON, files of JSON lines.  All chance comes from the caller."""

import json
from random import Random

NUMBERS = [0, 1, -1, 2, 7, 255, 2**31, -(2**31), 2**63, 2**64, 10**30, 0.0, -0.0, 0.5, -1.5, 1e-320, 1e308, True, False]
TEXTS = ["", "x", "0x", "0xZZ", "\0", "\ud800", "ä😀", "²", "../../x", "/etc/passwd", "NaN", "null", "1e999", "x" * 500]
RAW = [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"9" * 5000, b"00", b"tru", b'"', b"'a'", b"\xff", b"\0"]
DEEP = 20_000  # levels: more than Python's stack has


def mutated_bytes(rng: Random, data: bytes) -> bytes:
    """One to four edits that know nothing: flips, cuts, insertions, repetitions, a swap."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(out) + 1)
        end = min(len(out), at + rng.choice((1, 2, 8, 64, 1000)))
        kind = rng.randrange(7)
        if kind <= 1 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 2:
            del out[at:end]
        elif kind == 3:
            del out[at:]
        elif kind == 4:
            out[at:at] = rng.choice((b"\0", b"\n", b"\xff\xfe", bytes(rng.randbytes(8)), b"[" * 50))
        elif kind == 5:
            out[at:at] = out[at:end]
        else:
            out[at:end] = bytes(len(out[at:end]))
    return bytes(out)


def mutated_text(rng: Random, text: str, words: list[str]) -> str:
    """One to three edits among the words of a language: one in place of another, one more, one less, one twice."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(text) + 1)
        end = min(len(text), at + rng.choice((0, 1, 2, 5, 20)))
        word = rng.choice((*words, *TEXTS, str(rng.choice(NUMBERS))))
        text = rng.choice(
            (
                text[:at] + word + text[end:],
                text[:at] + word + text[at:],
                text[:at] + text[end:],
                text[:end] + text[at:end] * rng.choice((1, 2, 300)) + text[end:],
            )
        )
    return text


def mutated_json(rng: Random, value) -> bytes:
    """A JSON text with one to three edits: other types and numbers, names less, more or twice, depth."""
    value = json.loads(json.dumps(value))
    tokens = {}
    for _ in range(rng.choice((1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            break
        parent, key = rng.choice(places)
        kind = rng.randrange(8)
        if kind == 0:
            del parent[key]
        elif kind == 1 and isinstance(parent, list):
            parent.insert(key, parent[rng.randrange(len(parent))])
        elif kind == 1:
            parent[rng.choice(TEXTS)] = parent[key]
        elif kind == 2:
            # What no value of Python's prints as.
            token = f"<{len(tokens)}>"
            tokens[token], parent[key] = rng.choice((*RAW, b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP)), token
        else:
            parent[key] = _other_value(rng, parent[key])
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 1)))
    data = text.encode(errors="surrogatepass")
    for token, raw in tokens.items():
        data = data.replace(f'"{token}"'.encode(), raw)
    return _with_a_name_twice(rng, data) if rng.random() < 0.05 else data


def mutated_lines(rng: Random, data: bytes) -> bytes:
    """A file of JSON lines with lines changed, lost, doubled, swapped, cut or joined."""
    lines = data.split(b"\n")[:-1]
    if not lines:
        return mutated_bytes(rng, data)
    at = rng.randrange(len(lines))
    kind = rng.randrange(9)
    if kind <= 3:
        lines[at] = mutated_json(rng, json.loads(lines[at])).replace(b"\n", b" ")
    elif kind == 4:
        del lines[at]
    elif kind == 5:
        lines.insert(at, rng.choice((lines[rng.randrange(len(lines))], b"", b"\r", b"[]", b"null")))
    elif kind == 6:
        rng.shuffle(lines)
    elif kind == 7:
        return b"\n".join([*lines, lines[at][: rng.randrange(len(lines[at]))]])
    else:
        return mutated_bytes(rng, data)
    return rng.choice((b"\n", b"\n", b"\n", b"\r\n", b"")).join(lines) + b"\n"


def _places(value):
    """(container, key) of everything inside a JSON value."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in list(entries):
        yield value, key
        yield from _places(entry)


def _other_value(rng: Random, value):
    near = [rng.choice(NUMBERS), rng.choice(TEXTS), None, [], {}, [value], {"a": value}]
    if isinstance(value, str):
        near += [value[: rng.randrange(len(value) + 1)], value + rng.choice(TEXTS), value.swapcase(), value[::-1]] * 2
    elif isinstance(value, int | float):
        near += [value + 1, value - 1, -value, value * 2, float(value), str(value), value + 0.5] * 2
    elif isinstance(value, list):
        near += [value[::-1], value[1:], value + value, value[:1] * 2] * 2
    elif isinstance(value, dict):
        near += [list(value.values()), list(value), dict(list(value.items())[1:])]
    return rng.choice(near)


def _with_a_name_twice(rng: Random, data: bytes) -> bytes:
    at = data.find(b"{", rng.randrange(len(data) + 1))
    end = data.find(b",", at)
    return data[: at + 1] + data[at + 1 : end + 1] + data[at + 1 :] if 0 <= at < end else data
