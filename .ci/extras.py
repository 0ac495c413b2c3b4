"""Prints the requirements of this project's extras, one per line: `python3 .ci/extras.py NAME ...`.

`pip install -e '.[NAME]'` would build the extension again.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(extra: str) -> list[str]:
    """Return the requirements of an extra, including those of the extras that it includes."""
    found: list[str] = []
    for each in PROJECT["optional-dependencies"][extra]:
        included = re.fullmatch(rf"{re.escape(PROJECT['name'])}\[(.+)\]", each)
        if included is None:
            found.append(each)
        else:
            found += [line for name in included[1].split(",") for line in requirements(name.strip())]
    return found


print("\n".join(dict.fromkeys(line for name in sys.argv[1:] for line in requirements(name))))
