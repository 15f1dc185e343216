"""Files of JSON lines that survive a killed writer."""

import pytest

from stof_tvm.tuning.logs.line_file import LineFile, locked
from tir_kernels.errors import TuningLogError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "log.json"


def test_lines_round_trip_with_their_numbers(path):
    first, other = LineFile(path), LineFile(path)
    assert first.read_new() == []
    first.append([1, "a"])
    assert other.read_new() == [(1, [1, "a"])]
    other.append({"b": None})
    assert first.read_new() == [(2, {"b": None})]
    assert first.read_new() == other.read_new() == []
    assert LineFile(path).read_new() == [(1, [1, "a"]), (2, {"b": None})]


def test_a_line_that_is_not_whole_is_moved_away(path):
    path.write_bytes(b"[1]\n[2]\n[3, 4")
    file = LineFile(path)
    with pytest.warns(UserWarning, match=r"log.json, line 3 is not whole and was moved to log.json.damaged"):
        assert file.read_new() == [(1, [1]), (2, [2])]
    assert path.read_bytes() == b"[1]\n[2]\n"
    assert path.with_name("log.json.damaged").read_bytes() == b"[3, 4\n"
    file.append([5])
    assert LineFile(path).read_new() == [(1, [1]), (2, [2]), (3, [5])]


def test_the_first_line_may_be_the_broken_one(path):
    path.write_bytes(b"[1")
    with pytest.warns(UserWarning, match="line 1"):
        assert LineFile(path).read_new() == []
    assert path.read_bytes() == b""


def test_a_broken_line_among_new_ones_is_moved_away(path):
    file = LineFile(path)
    file.append([1])
    with open(path, "ab") as other:
        other.write(b"[2]\n[3")
    with pytest.warns(UserWarning, match="line 3"):
        assert file.read_new() == [(2, [2])]
    assert path.read_bytes() == b"[1]\n[2]\n"


def test_a_whole_line_without_its_end_is_kept(path, recwarn):
    path.write_bytes(b"[1]\n[2]")
    file = LineFile(path)
    assert file.read_new() == [(1, [1]), (2, [2])]
    assert path.read_bytes() == b"[1]\n[2]\n" and not recwarn.list
    file.append([3])
    assert LineFile(path).read_new()[-1] == (3, [3])


def test_damage_in_the_middle_names_file_and_line(path):
    path.write_bytes(b"[1]\n[2\n[3]\n")
    with pytest.raises(TuningLogError, match=r"log.json, line 2 is damaged"):
        LineFile(path).read_new()
    assert path.read_bytes() == b"[1]\n[2\n[3]\n"


def test_a_lock_is_exclusive(tmp_path):
    import fcntl

    with locked(tmp_path), open(tmp_path / ".lock", "w") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(tmp_path / ".lock", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
