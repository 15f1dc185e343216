"""What Python's reader lets pass or trips over is refused."""

import json

import pytest

from stof_tvm.saving.strict_json import read_json


@pytest.mark.parametrize("value", [None, True, 3, -0.5, "ä😀", [], {"a": [1, {"b": 1e300}]}])
def test_json_is_read(value):
    assert read_json(json.dumps(value)) == read_json(json.dumps(value, ensure_ascii=False).encode()) == value


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[1]x", "Extra data"),
        ("[NaN]", "NaN is no number"),
        ("-Infinity", "-Infinity is no number"),
        ("1e999", "1e999 is no finite number"),
        ("9" * 10_000, "digits"),
        ('{"a": 1, "b": 2, "a": 3}', "name 'a' is there twice"),
        (r'"\uD800"', "surrogates not allowed"),
        (r'{"\udfff": 1}', "surrogates not allowed"),
        (b'"\xff"', "invalid start byte"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"a":' * 100_000, "nested too deeply"),
    ],
)
def test_everything_else_is_a_value_error(text, why):
    with pytest.raises(ValueError, match=why):
        read_json(text)
