"""Every command that README and docs show exists, with its options, arguments and files, and says where it needs a GPU.

The command line's own parsers read the commands; nothing is run. Other tests run the commands (tests/api, tests/bench,
tests/eplb, tests/serve, tests/train), in sizes for a CPU.
"""

import argparse
import importlib
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import typer

from dspark_jax.cli import app
from helpers.pages import ROOT

PAGES = ["README.md", "CONTRIBUTING.md", "kernels/README.md", "tests/oracles/README.md", "dspark_jax/assets/nano/README.md"]
PAGES += sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md"))
MAKEFILE = (ROOT / "Makefile").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
CLI = typer.main.get_command(app)
PLACEHOLDER = "2"  # a number and a word
# They time a device, or want the memory of one.
GPU = re.compile(
    r"dspark-jax bench (kernels|round|mesh)|dspark_kernels\.\w+\.bench|bench\.(stage_times|schedule_step)|--shape v4-flash"
    r"|test-gpu|JAX_PLATFORMS=cuda"
)


class Command(NamedTuple):
    """A command as a page has it; `whole` unless it stands inside a sentence, which may leave arguments out."""

    page: str
    text: str
    section: str
    whole: bool

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


class Parsed(BaseException):
    """A parser of argparse was content."""


def commands(page: str) -> Iterator[Command]:
    text = (ROOT / page).read_text()
    starts = [0, *(m.start() for m in re.finditer(r"^#+ ", text, re.MULTILINE)), len(text)]
    for begin, end in zip(starts, starts[1:], strict=False):
        section = text[begin:end]
        fenced = re.findall(r"^```(?:\w*)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
        prose = re.sub(r"^```.*?^```$", "", section, flags=re.MULTILINE | re.DOTALL)
        indented = re.findall(r"(?:^ {4}\S.*\n)(?:^ {4}.*\n)*", prose, re.MULTILINE)
        for block in [*fenced, *indented]:
            for line in block.replace("\\\n", " ").splitlines():
                for part in re.split(r" && |; ", line.strip()):
                    if is_command(part):
                        yield Command(page, part, section, True)
        for quoted in re.findall(r"`([^`\n]+)`", prose):
            if is_command(quoted):
                yield Command(page, quoted, section, False)


def words(text: str) -> list[str]:
    """The command's words, without comments and settings of the environment."""
    found = shlex.split(text, comments=True)
    while found and re.fullmatch(r"[A-Z_]+=.*", found[0]):
        found = found[1:]
    return found


def is_command(text: str) -> bool:
    program = re.match(r"(?:[A-Z_0-9]+=(?:\"[^\"]*\"|\S*) +)*(\S+) +\S", text)
    return bool(program) and program[1] in ("dspark-jax", "python", ".venv-oracles/bin/python", "make", "pip", "jupyter")


def faults(command: Command) -> Iterator[str]:
    program, *rest = words(command.text)
    if not command.whole:  # placeholders of any kind
        rest = [PLACEHOLDER if re.fullmatch("[A-Z]+|PxE", word) else word for word in rest if word != "…"]
    for word in rest:
        if re.match(r"(tests|docs|notebooks|dspark_jax|configs|scripts)/", word) and not list(ROOT.glob(word)):
            yield f"there is no {word}"
    if program == "make":
        targets = [w for w in rest if "=" not in w]
        known = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split()
        yield from (f"no target {t}" for t in targets if t not in known)
        yield from (f"no setting {w}" for w in rest if "=" in w and not re.search(rf"\b{w.partition('=')[0]}\b", MAKEFILE))
    elif program == "pip":
        yield from (f"no extra {e}" for e in re.findall(r"\[(\w+)\]", command.text) if e not in EXTRAS)
    elif program == "dspark-jax":
        yield from cli_faults(rest, command.whole)
    elif rest[0] == "-m" and rest[1].startswith("dspark_"):
        yield from module_faults(rest[1], rest[2:])


def cli_faults(arguments: list[str], whole: bool) -> Iterator[str]:
    """What typer's parser says, group by group; `launch`'s and the benches' own commands are read on."""
    if "--" in arguments:
        at = arguments.index("--")
        if arguments[at + 1 :] != [PLACEHOLDER]:
            yield from cli_faults(arguments[at + 1 :], whole)
    command = CLI
    while hasattr(command, "commands") and arguments:
        group = command.commands  # type: ignore[attr-defined]
        if arguments[0] not in group:
            yield f"there is no command {arguments[0]}"
            return
        command, arguments = group[arguments[0]], arguments[1:]
    if hasattr(command, "commands"):
        return
    if command.name in ("load", "mesh"):
        yield from module_faults(f"dspark_jax.bench.{command.name}", arguments)
        return
    try:
        command.make_context(command.name, list(arguments))
    except Exception as error:
        if whole or type(error).__name__ not in ("MissingParameter", "BadOptionUsage"):  # what is missing is left out
            yield f"{error}"


def module_faults(module: str, arguments: list[str]) -> Iterator[str]:
    """What the parser of a module's `main` says."""

    def parse(self, args=None, namespace=None, real=argparse.ArgumentParser.parse_args):
        real(self, args, namespace)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        patch.setattr(sys, "argv", [module, *arguments])
        try:
            importlib.import_module(module).main()
        except Parsed:
            return
        except SystemExit:
            yield f"{module} does not take {shlex.join(arguments)}"
            return
    yield f"{module} has parsed nothing"


ALL = [command for page in PAGES for command in commands(page)]


def test_commands_are_found():
    texts = [str(c) for c in ALL]
    assert len(ALL) > 100
    launch = 'dspark-jax launch --processes 2 --mesh 2x1 --emulate-devices 1 -- generate --prompt "def fib(n):"'
    assert f"README.md: {launch}" in texts
    assert "docs/pipeline.md: python -m dspark_jax.bench.stage_times --model v4-flash --out stage_times.json" in texts
    assert "README.md: make test-gpu EXTRAS=dev,cuda12" in texts


@pytest.mark.parametrize("page", sorted({c.page for c in ALL}))
def test_commands_exist(page):
    found = [f"{c}: {fault}" for c in ALL if c.page == page for fault in faults(c)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", sorted({c.page for c in ALL if GPU.search(c.text)}))
def test_commands_for_a_gpu_say_so(page):
    assert not [str(c) for c in ALL if c.page == page and GPU.search(c.text) and not re.search("GPU|H200", c.section)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dspark-jax generate --promt x", "No such option: --promt"),
        ("dspark-jax bench server --rate 2", "there is no command server"),
        ("dspark-jax launch --processes 2 -- generate --prompt", "--prompt"),
        ("dspark-jax bench load --concurency 4", "does not take --concurency 4"),
        ("dspark-jax bench mesh --part smoke --mesh 2x1 --devices 4", "does not take"),
        ("python -m dspark_jax.bench.stage_times --request 4 --nofit", "does not take"),
        ("dspark-jax evaluate --prompts tests/data/none.jsonl", "there is no tests/data/none.jsonl"),
        ("make tests ARGS=-x", "no target tests"),
        ("make test ARG=-x", "no setting ARG=-x"),
        ("pip install 'dspark-jax[cuda11]'", "no extra cuda11"),
    ],
)
def test_wrong_commands_are_found(text, message, capsys):
    assert message in "\n".join(faults(Command("page", text, "", True)))
