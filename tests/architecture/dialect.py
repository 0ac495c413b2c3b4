"""Count constructions that plain technical English avoids, in docstrings, messages and documentation.

    python -m tests.architecture.dialect [--list] [PATH ...]

prints the number of occurrences of each construction per 1,000 words; `--list` also prints every occurrence.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

CONSTRUCTIONS = {
    "relative chains": r"\b(?:of|to|by|in|from|for|with|at|on) (?:which|whom)\b",
    "nobody, nothing, somebody": r"\b(?:nobody|nothing|somebody|whoever)\b",
    "who": r"\b(?:who|whom)\b",
    "archaic": r"\b(?:anew|lest|meanwhile|beside|besides|in vain|but for|as a rule|thereby|hitherto)\b",
    "is no": r"\b(?:is|are|was|were) no (?!longer\b|more than\b)",
    "so many, so long": r"\bso (?:many|long|much|often|far)\b(?! as\b)|\bhow-manieth\b",
}
"""Names and regular expressions of the constructions."""


class Text(NamedTuple):
    """A piece of prose and its location."""

    path: Path
    line: int
    text: str


def texts(paths: list[Path]) -> Iterator[Text]:
    """Yield the prose of Python files (docstrings, messages, comments) and Markdown files (outside code)."""
    for path in paths:
        source = path.read_text(encoding="utf-8")
        if path.suffix == ".md":
            yield from _of_markdown(path, source)
        else:
            yield from _of_python(path, source)


def words(text: str) -> int:
    """Return the number of words of a text."""
    return len(re.findall(r"[A-Za-z][A-Za-z'-]*", text))


def found(text: str) -> Iterator[tuple[str, str]]:
    """Yield the construction and the words of each occurrence in a text."""
    for name, pattern in CONSTRUCTIONS.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            yield name, " ".join(text[max(0, match.start() - 25) : match.end() + 25].split())


def per_thousand(paths: list[Path]) -> dict[str, float]:
    """Return the occurrences of each construction per 1,000 words."""
    count = dict.fromkeys(CONSTRUCTIONS, 0)
    total = 0
    for piece in texts(paths):
        total += words(piece.text)
        for name, _ in found(piece.text):
            count[name] += 1
    return {name: 1000 * each / max(1, total) for name, each in count.items()}


def prose_files() -> list[Path]:
    """Return the files whose prose is checked: the package, the documentation and the top-level pages."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    return sorted([*(ROOT / "pccl").rglob("*.py"), *pages])


def _of_markdown(path: Path, source: str) -> Iterator[Text]:
    is_code = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield Text(path, number, re.sub(r"`[^`]*`", "", line))


def _of_python(path: Path, source: str) -> Iterator[Text]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield Text(path, node.lineno, re.sub(r"`[^`]*`", "", node.value))
    for number, line in enumerate(source.splitlines(), 1):
        comment = re.search(r"(?:^|\s)# (.*)$", line)
        if comment is not None:
            yield Text(path, number, comment[1])


def main(arguments: list[str]) -> None:
    is_listed = "--list" in arguments
    given = [Path(each) for each in arguments if not each.startswith("--")]
    paths = [
        file
        for each in given
        for file in ([each] if each.is_file() else sorted(each.rglob("*.py")) + sorted(each.rglob("*.md")))
    ]
    paths = paths or prose_files()
    if is_listed:
        for piece in texts(paths):
            for name, where in found(piece.text):
                print(f"{piece.path}:{piece.line}: {name}: {where}")
    for name, share in per_thousand(paths).items():
        print(f"{share:5.2f}  {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
