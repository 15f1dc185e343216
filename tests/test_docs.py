"""The pages are right: links and anchors lead somewhere, examples run, commands exist, limits raise what they quote."""

import argparse
import pydoc
import re
import shlex
from pathlib import Path

import pytest

from stof_tvm import errors
from stof_tvm.cli.table import parser

ROOT = Path(__file__).parent.parent
ELSEWHERE = {"build", "dist", "node_modules"}
PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in ELSEWHERE for part in page.relative_to(ROOT).parts)
)
WRITTEN = [page for page in PAGES if "results" not in page.parts]  # by hand
named = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
by_hand = pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


def anchors(text: str) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@named
def test_links_and_anchors_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        assert not anchor or anchor in anchors(other.read_text()), target


def test_anchors_are_as_on_github():
    assert anchors("# A *b*: c/d, `e`\n```\n# no\n```\n## 1 – 2") == {"a-b-cd-e", "1--2"}


@pytest.mark.parametrize(
    "page",
    # README.md's is run by test_readme.py, that of the limits below, the doctest by test_block_sparse_mask.py.
    [page for page in ROOT.glob("docs/*.md") if page.stem != "limits" and blocks(page.read_text(), "python")],
    ids=lambda page: page.name,
)
def test_examples_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page.stem}
    for example in blocks(page.read_text(), "python"):
        exec(compile(example, str(page), "exec"), namespace)


def test_the_api_page_says_how_to_read_it_without_the_site():
    text = (ROOT / "docs" / "reference" / "index.md").read_text()
    read = re.findall(r"`help\(([\w.]+)\)`", text)
    assert "stof_tvm.build" in read
    assert all(pydoc.locate(name).__doc__ for name in read)


def commands(text: str) -> list[str]:
    """Lines of blocks of the shell, or of no language, and code spans."""
    lines = [line for block in blocks(text, "(?:sh)?") for line in block.splitlines()]
    return lines + re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))


def find(texts: list[str], start: str) -> list[str]:
    return [text.partition(" #")[0] for text in texts if re.match(rf"{start}\b", text)]


@by_hand
def test_commands_of_stof_exist(page):
    for command in find(commands(page.read_text()), r"stof [a-z]+"):
        *words, options = subcommand(command)
        unknown = set(re.findall(r"--[\w-]+", command)) - options
        assert not unknown, f"{' '.join(words)}: {command}"


def subcommand(command: str) -> tuple:
    """The words that name it and the options that it takes; KeyError for one that does not exist."""
    words, current = ["stof"], parser()
    for word in command.split()[1:]:
        choices = [a for a in current._actions if isinstance(a, argparse._SubParsersAction)]
        if not choices or not re.fullmatch(r"[a-z]+", word):
            break
        current = choices[0].choices[word]
        words.append(word)
    return *words, {option for action in current._actions for option in action.option_strings}


def test_a_command_that_does_not_exist_is_found():
    assert find(commands("`make tea`\n```sh\nstof polish x  # now\n```"), "stof [a-z]+") == ["stof polish x "]
    assert find(commands("`make tea` `stof_tvm` `stof`"), "(stof|make) [a-z]+") == ["make tea"]
    with pytest.raises(KeyError):
        subcommand("stof polish engine.stof")
    assert "--picture" in subcommand("stof mask causal 64")[-1] and "--to" in subcommand("stof logs merge a")[-1]


@by_hand
def test_shell_examples_of_stof_parse(page):
    for command in find([line for block in blocks(page.read_text(), "sh") for line in block.splitlines()], "stof"):
        parser().parse_args(shlex.split(command)[1:])


@by_hand
def test_goals_and_scripts_exist(page):
    makefile = (ROOT / "Makefile").read_text()
    texts = commands(page.read_text())
    for goal in find(texts, r"make [a-z]+"):
        for word in goal.split()[1:]:
            assert re.search(rf"^{word}:", makefile, re.M), goal
    for script in find(texts, r"python [\w/]+\.py"):
        file = ROOT / script.split()[1]
        assert file.exists(), script
        source = with_shared_options(file)
        assert not [option for option in re.findall(r"--[\w-]+", script) if f'"{option}"' not in source], script


def with_shared_options(script: Path) -> str:
    """A script's source, and that of the modules of benchmarks that it imports: some of its options may be theirs."""
    source = script.read_text()
    modules = re.findall(r"^from (benchmarks\.[\w.]+) import", source, re.M)
    return "\n".join([source, *((ROOT / f"{module.replace('.', '/')}.py").read_text() for module in modules)])


LIMITS = (ROOT / "docs" / "limits.md").read_text()
ROW = re.compile(r"^\| (.+?) \| `(.+)` \| `(\w+Error): (.*)` \|$", re.M)


@pytest.fixture(scope="module")
def limits(tmp_path_factory):
    namespace = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("limits"))
        for example in blocks(LIMITS, "python"):
            exec(compile(example, "limits.md", "exec"), namespace)
    return namespace


@pytest.mark.parametrize(
    ("attempt", "error", "message"), [pytest.param(*quoted, id=limit) for limit, *quoted in ROW.findall(LIMITS)]
)
def test_limits_raise_what_the_page_quotes(limits, attempt, error, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected, cut, _ = message.replace("\\|", "|").partition("…")
    with pytest.raises(getattr(errors, error)) as raised:
        eval(attempt.replace("\\|", "|"), limits)
    text = " ".join(str(raised.value).split())
    assert text.startswith(expected) if cut else text == expected


def test_every_row_of_the_limits_is_checked():
    assert len(ROW.findall(LIMITS)) == len(re.findall(r"^\|.*Error", LIMITS, re.M)) > 20
