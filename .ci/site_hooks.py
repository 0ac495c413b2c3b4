"""Hooks of the documentation site: `docs/changes.md` shows CHANGELOG.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri != "changes.md":
        return markdown
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
