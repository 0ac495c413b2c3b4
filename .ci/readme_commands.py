"""Prints the shell commands of README.md's fenced block that follows the comment `<!-- ci: NAME -->`.

    python3 .ci/readme_commands.py demo

CI runs what this prints, so what users are told to type is what is tested.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def commands(text: str, name: str) -> str:
    pattern = rf"^<!-- ci: {re.escape(name)} -->\s*\n```\w*\n(.*?)^```$"
    blocks: list[str] = re.findall(pattern, text, flags=re.MULTILINE | re.DOTALL)
    if len(blocks) != 1:
        sys.exit(f"README.md: {len(blocks)} fenced blocks follow '<!-- ci: {name} -->', one is needed")
    return "\n".join(line.removeprefix("$ ") for line in blocks[0].splitlines())


if __name__ == "__main__":
    print(commands(README.read_text(encoding="utf-8"), sys.argv[1]))
