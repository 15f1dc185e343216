"""Help, exit statuses, errors and progress of all commands."""

import fcntl
import json
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

import stof_tvm
from stof_tvm.cli import main
from stof_tvm.cli.commands import bench
from stof_tvm.cli.table import COMMANDS, parser
from stof_tvm.errors import StofError
from tests.stof_tvm.cli import documented

ROOT = Path(__file__).parents[3]
ACTIONS = [["logs", action] for action in ("list", "verify", "merge", "export")]
NAMES = [[command.__name__.rpartition(".")[2]] for command in COMMANDS] + ACTIONS
RUN_HERE = ("env", "mask", "build", "bench", "report")  # the others search, or need a GPU or logs


def help_of(names, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*names, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def example_of(names, capsys):
    (example,) = re.findall(r"^example: stof (.+)$", help_of(names, capsys), re.M)
    return shlex.split(example)


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
def test_every_command_shows_an_example_that_parses(names, capsys):
    example = example_of(names, capsys)
    assert example[: len(names)] == names
    assert callable(parser().parse_args([*example, "--json"]).run)


@pytest.mark.parametrize("name", RUN_HERE)
def test_examples_run(name, built, tmp_path, monkeypatch, stof, capsys):
    # In a folder of its own: an example of build writes the engine that other tests read.
    shutil.copytree(built, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    if name == "mask":
        pytest.importorskip("matplotlib", reason="matplotlib is an optional dependency")
    status, found, errors = stof(*example_of([name], capsys), "--json")
    assert (status, errors) == (0, "") and found.keys() <= documented.fields(name)


def test_help_lists_commands_and_exit_statuses(capsys):
    text = help_of([], capsys)
    assert all(f"\n    {names[0]} " in text for names in NAMES)
    assert re.findall(r"^  (\d+)  ", text, re.M) == ["0", "1", "2", "130"]


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (["biuld"], "invalid choice: 'biuld'"),
        (["mask", "causal", "0"], "'0' must be an integer of at least 1"),
        (["mask", "causal", "ten"], "'ten' must be an integer of at least 1"),
        (["mask", "causal", "8", "--block", "8xx"], "'8xx' must be HEIGHTxWIDTH"),
        (["mask", "causal", "8", "--block", "8x"], "'8x' must be HEIGHTxWIDTH"),
        (["mask", "causal", "8", "--picture", "x"], "x must end in .png or .svg"),
        (["tune", "demo", "--max-trials", "-3"], "'-3' must be an integer of at least 1"),
        (["tune", "demo", "--seconds", "0"], "'0' must be a number of seconds above 0"),
        (["tune", "demo", "--seconds", "soon"], "'soon' must be a number of seconds above 0"),
    ],
)
def test_wrong_usage_is_2(wrong, why, capsys):
    with pytest.raises(SystemExit) as stop:
        main(wrong)
    told = capsys.readouterr()
    assert stop.value.code == 2 and told.out == "" and told.err.startswith("usage: stof") and why in told.err


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (
            ["build", "demo", "x.stof", "--maks", "causal"],
            "unrecognized arguments: --maks causal; did you mean --mask?",
        ),
        (["build", "--maks", "causal"], "arguments are required: file; did you mean --mask?"),
        (["bench", "demo", "--repeat=3", "--tarrget=llvm"], "arguments: --tarrget=llvm; did you mean --target?"),
        (["logs", "merge", "a", "--tot", "b"], "required: --to; did you mean --to?"),
        (["mask", "causal", "8", "--qqqq"], "unrecognized arguments: --qqqq"),
        (["--versoin"], "unrecognized arguments: --versoin; did you mean --version?"),
    ],
)
def test_a_misspelled_option_is_answered_by_the_one_it_resembles(wrong, told, capsys):
    with pytest.raises(SystemExit) as stop:
        main(wrong)
    assert stop.value.code == 2 and capsys.readouterr().err.endswith(f"{told}\n")


@pytest.mark.parametrize(("arguments", "shown"), [([], "bench"), (["logs"], "merge")])
def test_no_command_shows_what_there_is(arguments, shown, stof):
    status, text, errors = stof(*arguments)
    assert (status, text) == (2, "") and errors.startswith("usage: stof") and f"\n    {shown} " in errors


def test_errors_are_one_line(stof, monkeypatch):
    def fail(_):
        raise StofError("the compiler said:\n  line 1\n  line 2")

    monkeypatch.setattr(bench, "_bench", fail)
    assert stof("bench", "x.stof") == (1, "", "stof: the compiler said: line 1 line 2\n")


def test_an_interrupt_is_130(stof, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "_bench", interrupt)
    assert stof("bench", "x.stof") == (130, "", "stof: interrupted\n")


def command(*arguments):
    return [sys.executable, "-m", "stof_tvm.cli", *arguments]


def test_the_package_is_the_command():
    run = subprocess.run(
        [sys.executable, "-m", "stof_tvm", "--version"], env=environment(), capture_output=True, text=True, check=True
    )
    assert run.stdout == f"stof_tvm {stof_tvm.__version__}\n"


def environment():
    return {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}


def in_a_terminal(arguments, folder) -> tuple[int, str]:
    """Status of a command on a pseudo-terminal, and all that it shows there."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    process = subprocess.Popen(arguments, cwd=folder, env=environment(), stdin=its, stdout=its, stderr=its)
    os.close(its)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # how Linux says that the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    return process.wait(), shown.decode()


@pytest.mark.slow  # starts Python
def test_progress_is_shown_on_a_terminal_only(work, capfd):
    arguments = ("bench", "encoder.stof", "--repeats", "5")
    status, shown = in_a_terminal(command(*arguments), work)
    assert status == 0 and "5/5" in shown and "bench: 100%" in shown and "quartiles" in shown
    assert main([*arguments, "--json"]) == 0
    piped = capfd.readouterr()
    assert piped.err == "" and json.loads(piped.out)["systems"][0]["system"] == "stof"


@pytest.mark.slow  # starts Python
def test_a_reader_that_has_enough_is_no_crash(built):
    run = subprocess.Popen(command("env"), cwd=built, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    run.stdout.close()
    with run.stderr:
        assert run.stderr.read() == b""
    assert run.wait() == 1


def test_the_version_is_told_without_torch():
    code = "import sys; from stof_tvm.cli import main; main(['--version']); sys.exit('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout.startswith("stof_tvm ")


@pytest.mark.parametrize("command", ["build", "bench"])
def test_a_bug_of_the_model_shows_its_lines_only(command, stof, work):
    status, text, errors = stof(command, "my_models:broken", *(["out.stof"] if command == "build" else []))
    assert (status, text) == (1, "") and errors.startswith("stof: ")
    files = re.findall(r'File "([^"]+)"', errors)
    assert files and {Path(file).name for file in files} == {"my_models.py"}
    assert "return x + torch.zeros(3)" in errors


@pytest.mark.slow
def test_sizes_that_a_model_refuses_are_told_once(tmp_path):
    """PyTorch logs a traceback of its own, to the stream that stderr was when it was imported."""
    model = "class Model(torch.nn.Module):\n    def forward(self, x):\n        return x.expand(2, 3)\n"
    function = "def model():\n    return Model().eval(), (torch.zeros(2, 4),)\n"
    (tmp_path / "sizes.py").write_text(f"import torch\n\n\n{model}\n\n{function}")
    command = [sys.executable, "-m", "stof_tvm.cli", "bench", "sizes.py:model"]
    told = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True)
    assert told.returncode == 1 and told.stderr.startswith(b"stof: ") and b"fake_tensor" not in told.stderr


def test_a_function_that_fails_shows_its_lines_only(stof, work):
    (work / "failing.py").write_text("def f():\n    return undefined_name\n")
    status, _, errors = stof("bench", "failing.py:f")
    assert status == 1 and "NameError" in errors and "return undefined_name" in errors and "stof_tvm/" not in errors
