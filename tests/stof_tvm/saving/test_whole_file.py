"""A file is replaced whole or stays."""

import pytest

from stof_tvm.saving.whole_file import replacing, write_whole


def test_a_file_is_replaced(tmp_path):
    for text in ("one", "two ä"):
        write_whole(tmp_path / "a.txt", text)
        assert (tmp_path / "a.txt").read_text() == text
    write_whole(tmp_path / "a.txt", b"\xff")
    assert (tmp_path / "a.txt").read_bytes() == b"\xff"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    write_whole(tmp_path / "a.txt", "old")
    with pytest.raises(RuntimeError), replacing(tmp_path / "a.txt") as unfinished:
        unfinished.write_text("half of the n")
        raise RuntimeError
    assert (tmp_path / "a.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("name", ["missing/a.txt", "folder", "/proc/a.txt"])
def test_a_file_that_cannot_be_written_is_named(tmp_path, name):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as raised:
        write_whole(tmp_path / name, "")
    assert raised.value.filename == str(tmp_path / name) and raised.value.filename2 is None
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_an_error_of_another_file_stays(tmp_path):
    with pytest.raises(OSError) as raised, replacing(tmp_path / "a.txt"):
        open(tmp_path / "other")
    assert raised.value.filename == str(tmp_path / "other")
