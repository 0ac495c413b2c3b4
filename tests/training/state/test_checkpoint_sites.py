"""Checkpoints of sites, whose ranks save a piece each, and of runs whose peers resume from different steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pccl import MasterNode
from pccl.training import AsyncDiLoCo, CheckpointError, DiLoCo, Site
from pccl.training.state import tensor_file
from pccl.training.state.tensor_file import Contents
from tests.support.cluster import Background, together
from tests.training.group.test_site import Inner
from tests.training.peers import Peer, assert_parity, cluster_of, each_runs
from tests.training.state.saved import at, names, new, steps


def site_of(*revisions: int, ranks: int | None = None, name: str = "site") -> list[Any]:
    """A DiLoCo for each rank, at these revisions."""
    inner = Inner(len(revisions))
    sites = [Site(name, rank, ranks or len(revisions), inner.of_rank(rank)) for rank in range(len(revisions))]
    return [at(revision, site=site) for revision, site in zip(revisions, sites, strict=True)]


def each(ranks: list[Any], method: str, *args: Any, **options: Any) -> list[Any]:
    return together([partial(getattr(rank, method), *args, **options) for rank in ranks])


def refusals(ranks: list[Any], call: Callable[[Any, int], Any]) -> list[str]:
    def refused(rank: Any, number: int) -> str:
        before = rank.digest()
        with pytest.raises(CheckpointError) as caught:
            call(rank, number)
        assert rank.digest() == before
        return str(caught.value)

    return together([partial(refused, rank, number) for number, rank in enumerate(ranks)])


def test_site_loads_newest_common_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ranks = site_of(0, 0)
    for revision in (1, 2, 3):
        for rank in ranks:
            rank._state.revision = revision
        each(ranks, "save", tmp_path, keep=2)
    assert names(tmp_path) == [f"step-{i:09d}.rank-{rank:05d}-of-00002.safetensors" for i in (2, 3) for rank in (0, 1)]
    (tmp_path / "step-000000003.rank-00001-of-00002.safetensors").unlink()  # killed before it saved
    again = site_of(0, 0, name="another start")
    assert each(again, "load", tmp_path) == [True, True]
    assert [rank.revision for rank in again] == [2, 2]
    assert "revision 2 is the newest that all ranks of this site have: rank 0 has 2, 3; rank 1 has 2" in caplog.text


def test_site_pieces_of_different_steps_are_refused(tmp_path: Path) -> None:
    for form in ("{}.safetensors", "folder-{}"):
        paths = [tmp_path / form.format(rank) for rank in range(2)]
        for rank, path in zip(site_of(3, 5), paths, strict=True):
            rank.save(path)
        told = refusals(site_of(0, 0), lambda rank, number, paths=paths: rank.load(paths[number]))  # type: ignore[misc]
        for text in told:
            assert "the ranks of this site have no save in common" in text
            assert "rank 0 has 3; rank 1 has 5" in text


def test_site_pieces_of_different_saves_are_refused(tmp_path: Path) -> None:
    for number, ranks in enumerate((site_of(4, 4, name="first"), site_of(4, 4, name="second"))):
        ranks[number].save(tmp_path)
    for text in refusals(site_of(0, 0), lambda rank, _: rank.load(tmp_path)):
        assert "rank 0 has 4; rank 1 has 4" in text


def test_missing_or_damaged_piece_fails_on_all_ranks(tmp_path: Path) -> None:
    ranks = site_of(4, 4)
    assert each(ranks, "load", tmp_path, missing_ok=True) == [False, False]
    each(ranks, "save", tmp_path)
    path = tmp_path / "step-000000004.rank-00001-of-00002.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    for text in refusals(site_of(0, 0), lambda rank, _: rank.load(tmp_path)):
        assert f"{path.name} is damaged" in text
    path.unlink()
    for missing_ok in (False, True):
        for text in refusals(site_of(0, 0), lambda rank, _, ok=missing_ok: rank.load(tmp_path, missing_ok=ok)):  # type: ignore[misc]
            assert "rank 0 has 4; rank 1 has none" in text
    path.write_bytes(whole)
    other = path.with_name("step-000000004.rank-00000-of-00002.safetensors")
    for text in refusals(site_of(0, 0), lambda rank, _: rank.load(path if rank._site.rank == 0 else other)):
        assert "belongs to rank 1 of 2; this is rank 0 of 2" in text
    with pytest.raises(
        FileNotFoundError, match=r"it holds step-000000004\.rank-00001-of-00002\.safetensors, from another"
    ):
        new().load(tmp_path)


def test_site_prunes_after_all_ranks_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = site_of(1, 1)
    each(ranks, "save", tmp_path, keep=1)
    write = tensor_file.write

    def fails_on_rank_1(path: Path, contents: Contents) -> None:
        if "rank-00001" in path.name:
            raise OSError(28, "no space left")
        write(path, contents)

    for rank in ranks:
        rank._state.revision = 2
    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "write", fails_on_rank_1)
        each(ranks, "save", tmp_path, keep=1, background=True)
        ends = [Background(rank.wait_for_save) for rank in ranks]
        with pytest.raises(CheckpointError, match="a rank of this site could not save the last checkpoint"):
            ends[0].result()
        with pytest.raises(OSError, match="no space left"):
            ends[1].result()
    again = site_of(0, 0)
    each(again, "load", tmp_path)
    assert [rank.revision for rank in again] == [1, 1]
    each(ranks, "save", tmp_path, keep=1, background=True)
    each(ranks, "wait_for_save")
    assert [name[:14] for name in names(tmp_path)] == ["step-000000002"] * 2


# Runs.


@pytest.mark.parametrize("kind", [DiLoCo, AsyncDiLoCo])
def test_peers_resume_from_checkpoints_of_different_steps(tmp_path: Path, kind: Any) -> None:
    with MasterNode("127.0.0.1:0") as master:
        first = cluster_of(master, 2, kind)

        def save(peer: Peer) -> None:
            if peer.number == 0 or peer.diloco.revision < 3:  # the other one was killed then
                peer.diloco.save(tmp_path / str(peer.number), keep=2, background=True)

        together([partial(peer.run, 4, after=save) for peer in first])
        for peer in first:
            peer.diloco.wait_for_save()
        together([peer.close for peer in first])
    assert names(tmp_path / "0") == steps(3, 4)
    with MasterNode("127.0.0.1:0") as master:
        second = [Peer(master.address, number, kind) for number in range(2)]
        for peer in second:
            peer.diloco.load(tmp_path / str(peer.number))
        assert [peer.diloco.revision for peer in second] == [4, 2]
        together([partial(peer.enter, 2) for peer in second])
        each_runs(second, 6)
        assert_parity([*first, *second])
        together([peer.close for peer in second])
