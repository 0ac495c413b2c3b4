"""The demo's text: the same split everywhere, shards that share nothing, entropy as in the textbook."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.demo import corpus
from pccl.demo.corpus import CorpusError, SourceFile

FILES = st.builds(
    lambda prefix, sizes: {f"{prefix}{number}": size for number, size in enumerate(sizes)},
    st.text(max_size=20),
    st.lists(st.integers(0, 10**6), min_size=60, max_size=120),
)


def test_the_standard_library_is_there_and_large() -> None:
    files = corpus.standard_library_files()
    assert sum(file.size_bytes for file in files) > 3_000_000
    names = [file.name for file in files]
    assert names == sorted(names)
    assert {"abc.py", "json/decoder.py"} <= set(names)
    assert not [name for name in names if {"site-packages", "test", "__pycache__"} & set(name.split("/"))]
    text = corpus.read(corpus.split(files, 4).validation)
    assert text.size > 100_000
    assert 4 < corpus.unigram_entropy_bits(text) < 6


def test_files_are_found_in_one_order_without_foreign_folders(tmp_path: Path) -> None:
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


def test_no_sources_is_an_error_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=str(tmp_path)):
        corpus.standard_library_files(tmp_path)


@given(FILES, st.integers(1, 6), st.randoms())
def test_split_is_a_partition_of_equal_shards_in_any_order(sizes: dict[str, int], shards: int, random: object) -> None:
    files = [SourceFile(name, size, Path(name)) for name, size in sizes.items()]
    try:
        split = corpus.split(files, shards)
    except CorpusError:  # no name happens to be held out
        return
    parts = [*split.shards, split.validation]
    assert sorted(file for part in parts for file in part) == sorted(files)
    filled = [sum(file.size_bytes for file in shard) for shard in split.shards]
    assert max(filled) - min(filled) <= max(file.size_bytes for file in files)
    random.shuffle(files)  # type: ignore[attr-defined]
    assert corpus.split(files, shards) == split


def test_held_out_files_do_not_depend_on_the_number_of_shards() -> None:
    files = corpus.standard_library_files()
    assert corpus.split(files, 2).validation == corpus.split(files, 9).validation


def test_too_many_shards_are_refused() -> None:
    files = corpus.standard_library_files()
    with pytest.raises(CorpusError, match="too few for 100000 shards"):
        corpus.split(files, 100_000)


def test_unigram_entropy() -> None:
    assert corpus.unigram_entropy_bits(np.zeros(9, np.uint8)) == 0
    assert corpus.unigram_entropy_bits(np.arange(256, dtype=np.uint8)) == pytest.approx(8)
    assert corpus.unigram_entropy_bits(np.frombuffer(b"aaab", np.uint8)) == pytest.approx(0.8112781)


def test_stretches_are_cut_from_the_whole_text() -> None:
    text = np.arange(100, dtype=np.uint8)
    random = np.random.default_rng(0)
    stretches = corpus.sample(text, random, 2000, 10)
    assert (np.diff(stretches.astype(int), axis=1) == 1).all()
    assert (stretches[:, 0].min(), stretches[:, -1].max()) == (0, 99)
    even = corpus.spread(text, 4, 10)
    assert even[:, 0].tolist() == [0, 30, 60, 90]
