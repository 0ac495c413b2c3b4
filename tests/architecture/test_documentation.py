"""The documentation is in plain English and agrees with the code: wire messages, named paths, blocks that CI runs."""

from __future__ import annotations

import argparse
import ast
import re
import runpy
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import pccl
from pccl.cli import parser
from pccl.protocol import messages as m
from pccl.runtime.threads.process import VARIABLES
from pccl.types import DataType, Result
from tests.architecture import dialect

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
WIRE = " ".join((ROOT / "docs/design/wire.md").read_text(encoding="utf-8").split())
NAMES = {path.name for folder in ("pccl", "native", "tests", "examples") for path in (ROOT / folder).rglob("*.*")}
FOLDERS = {"pccl", "native", "tests", "examples", "bindings", "docs"}
MADE = {"native/build"}
"""Paths that a build creates."""
TYPED = {"script.py"}
"""Files that the reader creates."""
DIALECT_MAX = 0.3
"""Limit on constructions per 1,000 words, over all pages."""


def _notation(of: Any) -> str:
    """A field's type as the wire format writes it."""
    origin, arguments = typing.get_origin(of), typing.get_args(of)
    if origin is typing.Annotated:
        return _notation(arguments[0])
    if origin is list:
        return f"[{_notation(arguments[0])}]"
    if origin is tuple:
        return f"({', '.join(map(_notation, arguments))})"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_notation(each) for each in arguments)
    return "nil" if of is types.NoneType else str(of.__name__)


def _row(of: type[msgspec.Struct]) -> str:
    """Return the beginning of a message's row."""
    fields = []
    hints = typing.get_type_hints(of, include_extras=True)
    for field in msgspec.structs.fields(of):
        text = f"{field.name} {_notation(hints[field.name])}"
        default = field.default if field.default is not msgspec.NODEFAULT else field.default_factory
        if default is list:
            text += " = []"
        elif default is None:
            text += " = nil"
        elif default is not msgspec.NODEFAULT:
            text += " = " + ('""' if default in ("", b"") else str(default).lower())
        fields.append(text)
    return f"| `{of.__name__}` | {', '.join(fields)} |"


def _schemas() -> Iterator[type[msgspec.Struct]]:
    for each in vars(m).values():
        if isinstance(each, type) and issubclass(each, m.Message | m.Part) and each not in (m.Message, m.Part):
            yield each


def test_wire_format_lists_each_message() -> None:
    assert not [row for schema in _schemas() if (row := " ".join(_row(schema).split())) not in WIRE]


def test_wire_format_lists_the_numbers() -> None:
    assert f"`PROTOCOL_VERSION` is {m.PROTOCOL_VERSION}" in WIRE
    frames = re.search(r"PCCL_FRAME_VERSION = (\d+)", (ROOT / "native/src/frame.h").read_text(encoding="utf-8"))
    assert frames
    assert f"`PCCL_FRAME_VERSION` is {frames[1]}" in WIRE
    for code in Result:
        assert f"{code.value} `{code.name}`" in WIRE
    for dtype in DataType:
        assert f"{dtype.value} `{dtype.name}`" in WIRE


def _named_paths(text: str) -> Iterator[str]:
    """Repository paths in backticks, and modules that commands run, exist."""
    for quoted in re.findall(r"`([^`\n]+)`|^```\w*\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
        for word in re.findall(r"[\w./*{},-]+", "".join(quoted)):
            if word.partition("/")[0] in FOLDERS and "/" in word and not any(each in word for each in "*{,"):
                yield word.rstrip(".")
    for name in re.findall(r"`(\w+\.(?:py|[ch]))`", text):
        if name not in NAMES | TYPED:
            yield name
    for module in re.findall(r"-m\s(tests\.[\w.]+)", text):
        yield module.rstrip(".").replace(".", "/")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_paths_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = {
        path
        for path in _named_paths(text)
        if path not in MADE and not (ROOT / path).exists() and not (ROOT / f"{path}.py").exists()
    }
    assert not missing, f"{page.relative_to(ROOT)} names missing paths"


def test_every_block_has_a_ci_mark() -> None:
    check = runpy.run_path(str(ROOT / ".ci/readme_commands.py"))["check"]
    assert check(ROOT) == []


def test_pages_are_in_plain_english() -> None:
    shares = dialect.per_thousand(PAGES)
    assert not {name: share for name, share in shares.items() if share > DIALECT_MAX}


def test_changelog_has_the_version() -> None:
    assert f"## {pccl.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_no_text_installs_from_the_package_index() -> None:
    """pccl is not published there."""
    texts = [*dialect.prose_files(), *(ROOT / "examples").rglob("*.py")]
    wrong = re.compile(r"pip install ([^\n`']* )?'?pccl(-collectives)?\b")
    assert not [path for path in texts if wrong.search(path.read_text(encoding="utf-8"))]


COMMAND_LINE = (ROOT / "docs/command-line.md").read_text(encoding="utf-8")


def test_command_line_page_lists_all_options() -> None:
    subparsers = next(each for each in parser()._actions if isinstance(each, argparse._SubParsersAction))
    for name, command in subparsers.choices.items():
        if name == "completion":
            continue
        section = re.search(rf"^## pccl {name}\n(.*?)^## ", COMMAND_LINE, re.M | re.S)
        text = section[1] if section else next(re.finditer(rf"^\| `pccl {name}.*$", COMMAND_LINE, re.M))[0]
        options = {
            option
            for action in command._actions
            if action.help != argparse.SUPPRESS
            for option in action.option_strings
            if not option.startswith("--no-") or isinstance(action, argparse._StoreTrueAction)
        }
        assert set(re.findall(r"`(--?[a-z][\w-]*)", text)) == options - {"-h", "--help"}, name


def test_command_line_page_lists_all_variables() -> None:
    """pccl's list of known variables is equal to those that its sources read and to those on the page."""
    read = {
        node.value
        for path in (ROOT / "pccl").rglob("*.py")
        if path.name != "process.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and re.fullmatch(r"PCCL_[A-Z_]+", str(node.value))
    }
    table = COMMAND_LINE.partition("## Environment variables")[2]
    listed = re.findall(
        r"`(PCCL_\w+)`", " ".join(row.split(" | ")[0] for row in table.splitlines() if row[:3] == "| `")
    )
    assert sorted(VARIABLES) == sorted(read)
    assert sorted(VARIABLES) == sorted(listed)
