"""The commands and programs in README.md and docs/, as CI runs them.

    python3 .ci/readme_commands.py NAME      # a shell script that runs the block of that name
    python3 .ci/readme_commands.py --list    # all names, one per line
    python3 .ci/readme_commands.py --check   # check that Python blocks compile and that every block has a mark

Each fenced shell or Python block must be preceded by one of

    <!-- ci: NAME -->           CI runs it. Blocks with the same name must be identical.
    <!-- ci: NAME (4 copies) -->
    <!-- by hand: REASON -->    CI cannot: it takes a second host, root, torch, minutes ...

A Python block is a whole program: `pccl launch` starts two copies of it, or the given number. A shell block runs as it
is, or in place of the word `BLOCK` in `.ci/snippets/NAME.sh.in` (which starts a master, for example).
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(
    r"^(?: *<!-- (?P<kind>ci|by hand): (?P<text>[^\n]+?)(?: \((?P<copies>\d+) copies\))? -->\n+)?"
    r"^(?P<indent> *)```(?P<language>sh|python)\n(?P<body>.*?)^(?P=indent)```$",
    flags=re.MULTILINE | re.DOTALL,
)
PLACE = re.compile(r"^(?P<indent> *)BLOCK$", flags=re.MULTILINE)


@dataclass(frozen=True)
class Block:
    where: str
    name: str
    """Empty if CI does not run the block."""
    is_judged: bool
    """Whether the block has a mark that states whether CI runs it."""
    language: str
    body: str
    copies: int = 2


def blocks(root: Path) -> Iterator[Block]:
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        for found in BLOCK.finditer(text):
            line = text.count("\n", 0, found.start("language")) + 1
            name = found["text"] if found["kind"] == "ci" else ""
            where, body = f"{page.relative_to(root)}:{line}", textwrap.dedent(found["body"])
            yield Block(where, name, bool(found["kind"]), found["language"], body, int(found["copies"] or 2))


def named(root: Path) -> dict[str, Block]:
    """Return the blocks that CI runs, by name."""
    result: dict[str, Block] = {}
    for block in blocks(root):
        if block.name and result.setdefault(block.name, block).body != block.body:
            sys.exit(f"{block.where}: {result[block.name].where} shows something else under the name {block.name!r}")
    return result


def script(root: Path, block: Block) -> str:
    """Return shell commands that run a block."""
    if block.language == "python":
        file = f"build/snippets/{block.name}.py"
        write = f"mkdir -p build/snippets\ncat >{file} <<'END OF {block.name}'\n{block.body}END OF {block.name}\n"
        return (
            f"{write}(cd build/snippets && ../../.venv/bin/pccl launch -n {block.copies} --fail-fast {block.name}.py)"
        )
    surroundings = root / ".ci" / "snippets" / f"{block.name}.sh.in"
    if not surroundings.exists():
        return block.body.rstrip("\n")
    around = surroundings.read_text(encoding="utf-8")
    text = PLACE.sub(lambda place: textwrap.indent(block.body, place["indent"]).rstrip("\n"), around)
    return text.rstrip("\n")


def check(root: Path) -> list[str]:
    """Return the problems with the blocks, one line each."""
    wrong = []
    for block in blocks(root):
        if not block.is_judged:
            wrong.append(f"{block.where}: neither '<!-- ci: NAME -->' nor '<!-- by hand: REASON -->' stands above it")
        if block.language == "python":
            try:
                compile(block.body, block.where, "exec")
            except SyntaxError as error:
                wrong.append(f"{block.where}: {error}")
    return wrong


def main(arguments: list[str]) -> None:
    if arguments == ["--check"]:
        named(ROOT)
        sys.exit("\n".join(check(ROOT)) or None)
    found = named(ROOT)
    if arguments == ["--list"]:
        print("\n".join(found))
    elif len(arguments) == 1 and arguments[0] in found:
        print(script(ROOT, found[arguments[0]]))
    else:
        sys.exit(f"README.md and docs/ have no block under '<!-- ci: {' '.join(arguments)} -->'")


if __name__ == "__main__":
    main(sys.argv[1:])
