"""Reading an npz while other threads of the process run."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pccl.training.state.tensor_file import Contents, Entry, read, write

RAISED = "AST constructor recursion depth mismatch (before=48, after=46)"


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Python refuses to parse the next texts, as CPython 3.11 does when another thread parses: so many as the list has
    entries."""
    parse, left = ast.literal_eval, [RAISED] * 2

    def refuse(text: str) -> Any:
        if left:
            raise SystemError(left.pop())
        return parse(text)

    monkeypatch.setattr(ast, "literal_eval", refuse)
    return left


def test_a_checkpoint_is_read_while_other_threads_parse(tmp_path: Path, refused: list[str]) -> None:
    path = tmp_path / "0.npz"
    write(path, Contents({"revision": "3"}, {"w": Entry("F32", (2,), np.arange(2, dtype=np.float32).view(np.uint8))}))
    assert np.array_equal(read(path).entries["w"].array(), [0, 1])
    assert not refused
