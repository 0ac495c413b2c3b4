"""Works outlive what pccl does with them until they are asked, where torch itself does not hold them."""

from __future__ import annotations

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import _pccl_torch  # noqa: E402
from pccl.torch import held_works  # noqa: E402
from tests.support.cluster import until  # noqa: E402
from tests.torch.ranks import run_ranks, worlds  # noqa: E402


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> held_works.HeldWorks:
    """The works that are held here, as in torch 2.6."""
    works = held_works.HeldWorks()
    monkeypatch.setattr(held_works, "IS_NEEDED", True)
    monkeypatch.setattr(held_works, "HELD", works)
    return works


@pytest.mark.parametrize("ask", ["wait", "get_future"])
def test_a_work_lives_until_it_is_asked(held: held_works.HeldWorks, ask: str) -> None:
    def script(rank: int) -> bool:
        tensor = torch.ones(4)
        work = weakref.ref(dist.all_reduce(tensor, async_op=True))
        until(lambda: (found := work()) is not None and found.is_completed(), "the call is over")
        gc.collect()
        assert work() is not None
        getattr(work(), ask)()
        return bool((tensor == 2).all())

    with worlds():
        assert run_ranks(2, script) == [True, True]
    assert len(held) == 0


def test_works_that_nobody_asks_do_not_add_up(held: held_works.HeldWorks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_works, "LIMIT", 3)
    for work in range(10):
        held.hold([work])
    assert len(held) == 3


@pytest.mark.parametrize(
    ("version", "expected"), [("2.6.0+cu124", (2, 6)), ("2.13.0a0+git12", (2, 13)), ("main", held_works.FIXED_IN)]
)
def test_the_release_of_a_version(version: str, expected: tuple[int, int]) -> None:
    assert held_works.release(version) == expected


def test_groups_of_torchs_own_backends_are_ended_by_torch() -> None:
    """torch 2.6 calls these two for each group, and ends those of NCCL only."""

    class OfPCCL:
        is_of_pccl = True

        def shutdown(self) -> str:
            return "shut down"

        def abort(self) -> str:
            return "aborted"

    assert _pccl_torch._shutdown_backend(repr, OfPCCL()) == "shut down"
    assert _pccl_torch._abort_backend(repr, OfPCCL()) == "aborted"
    assert _pccl_torch._shutdown_backend(str, 5) == "5"
    assert _pccl_torch._abort_backend(str, 5) == "5"
