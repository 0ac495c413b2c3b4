"""The demo's text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.tools.demo import model as corpus
from pccl.tools.demo.model import SourceFile
from pccl.tools.report import ToolError

FILES = st.builds(
    lambda prefix, sizes: {f"{prefix}{number}": size for number, size in enumerate(sizes)},
    st.text(max_size=20),
    st.lists(st.integers(0, 10**6), min_size=60, max_size=120),
)


def test_standard_library() -> None:
    files = corpus.standard_library_files()
    assert sum(file.size_bytes for file in files) > 3_000_000
    names = [file.name for file in files]
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if {"site-packages", "test", "__pycache__"} & set(name.split("/"))]
    text = corpus.read(corpus.split(files, 4).validation)
    assert text.size > 100_000
    assert 4 < corpus.unigram_entropy_bits(text) < 6


def test_files_are_sorted_and_filtered(tmp_path: Path) -> None:
    wanted = ["a/z.py", "a.py", "b/c/d.py"]
    unwanted = ["site-packages/x.py", "b/__pycache__/y.py", "test/t.py", "b/readme.txt"]
    for name in [*unwanted, *wanted]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    files = corpus.standard_library_files(tmp_path)
    assert [file.name for file in files] == sorted(wanted)
    assert [file.size_bytes for file in files] == [len(name) for name in sorted(wanted)]
    assert corpus.read(files).tobytes().decode() == "".join(sorted(wanted))


def test_no_sources(tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=str(tmp_path)):
        corpus.standard_library_files(tmp_path)


@given(FILES, st.integers(1, 6), st.randoms())
def test_split_is_a_partition(sizes: dict[str, int], shards: int, random: object) -> None:
    files = [SourceFile(name, size, Path(name)) for name, size in sizes.items()]
    try:
        split = corpus.split(files, shards)
    except ToolError:
        return
    parts = [*split.shards, split.validation]
    assert sorted(file for part in parts for file in part) == sorted(files)
    filled = [sum(file.size_bytes for file in shard) for shard in split.shards]
    assert max(filled) - min(filled) <= max(file.size_bytes for file in files)
    random.shuffle(files)  # type: ignore[attr-defined]
    assert corpus.split(files, shards) == split


def test_validation_is_independent_of_shards() -> None:
    files = corpus.standard_library_files()
    assert corpus.split(files, 2).validation == corpus.split(files, 9).validation


def test_too_many_shards() -> None:
    files = corpus.standard_library_files()
    with pytest.raises(ToolError, match="too few for 100000 shards"):
        corpus.split(files, 100_000)


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
