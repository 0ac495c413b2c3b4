"""The demo's text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pccl.tools.demo import model as corpus
from pccl.tools.report import ToolError


def test_standard_library() -> None:
    shards, validation = corpus.split(4)
    files = sorted(file for part in (*shards, validation) for file in part)
    assert len(set(files)) == len(files)
    assert {"abc.py", "decoder.py"} <= {file.name for file in files}
    assert not [file for file in files if {"site-packages", "test", "__pycache__"} & set(file.parts)]
    sizes = [corpus.read(shard).size for shard in shards]
    assert min(sizes) > 500_000
    text = corpus.read(validation)
    assert text.size > 100_000
    assert 4 < corpus.unigram_entropy_bits(text) < 6
    assert corpus.split(9)[1] == validation


def test_files_are_sorted_and_filtered(tmp_path: Path) -> None:
    wanted = ["a.py", "a/z.py", "b/c/d.py"]
    unwanted = ["site-packages/x.py", "b/__pycache__/y.py", "test/t.py", "b/readme.txt"]
    for name in [*unwanted, *wanted]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (training,), validation = corpus.split(1, tmp_path)
    assert [*validation, *training] == sorted(tmp_path / name for name in wanted)
    assert corpus.read(validation).tobytes().decode() in wanted


def test_no_sources(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=str(tmp_path)):
        corpus.split(2, tmp_path)


def test_too_many_shards() -> None:
    with pytest.raises(ToolError, match="too few for 100000 shards"):
        corpus.split(100_000)


def test_unigram_entropy() -> None:
    assert corpus.unigram_entropy_bits(np.zeros(9, np.uint8)) == 0
    assert corpus.unigram_entropy_bits(np.arange(256, dtype=np.uint8)) == pytest.approx(8)
    assert corpus.unigram_entropy_bits(np.frombuffer(b"aaab", np.uint8)) == pytest.approx(0.8112781)


def test_samples() -> None:
    text = np.arange(100, dtype=np.uint8)
    random = np.random.default_rng(0)
    samples = corpus.sample(text, random, 2000, 10)
    assert (np.diff(samples.astype(int), axis=1) == 1).all()
    assert (samples[:, 0].min(), samples[:, -1].max()) == (0, 99)
    even = corpus.spread(text, 4, 10)
    assert even[:, 0].tolist() == [0, 30, 60, 90]
