"""Prints the shell commands of the fenced block that follows `<!-- ci: NAME -->` in README.md or a page of docs/.

    python3 .ci/readme_commands.py demo      # the commands of that name
    python3 .ci/readme_commands.py --list    # all names, one a line

CI runs what this prints, so what users are told to type is what is tested. Blocks of one name say the same.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^<!-- ci: (\S+) -->\s*\n```\w*\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def documented(root: Path) -> dict[str, str]:
    """The commands by name."""
    found: dict[str, str] = {}
    for page in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        for name, block in BLOCK.findall(page.read_text(encoding="utf-8")):
            if found.setdefault(name, block) != block:
                sys.exit(f"{page}: another page says something else after '<!-- ci: {name} -->'")
    return found


def commands(block: str) -> str:
    return "\n".join(line.removeprefix("$ ") for line in block.splitlines())


if __name__ == "__main__":
    blocks = documented(ROOT)
    if sys.argv[1] == "--list":
        print("\n".join(blocks))
    elif sys.argv[1] in blocks:
        print(commands(blocks[sys.argv[1]]))
    else:
        sys.exit(f"no block follows '<!-- ci: {sys.argv[1]} -->' in README.md or docs/")
