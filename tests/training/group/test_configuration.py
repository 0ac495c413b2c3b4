"""Peers with different options fail with each peer's values."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pccl import Communicator, MasterNode, QuantizationOptions, Result
from pccl.training import SPSA, AsyncDiLoCo, DiLoCo, OuterNesterov, SPSAOptions
from pccl.training.group.membership import Row, described, head_bytes, row_of, shown, text_bytes, text_of, unlike
from tests.support.cluster import outcomes, refusal, results
from tests.training.peers import Peer, cluster_of, new_model, refused_while_others_train


class Shared:
    """Something with a state."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


def new_spsa(communicator: Communicator, **options: Any) -> SPSA:
    return SPSA(communicator, new_model(), SPSAOptions(learning_rate=0.1), **options)


def new_diloco(communicator: Communicator, **options: Any) -> DiLoCo:
    return DiLoCo(communicator, new_model(), **options)


DIFFERENT: list[tuple[Callable[..., Any], dict[str, Any], str, str]] = [
    (new_diloco, {"tag": 4}, "tag=4", "tag=0"),
    (new_spsa, {"tag": 4}, "tag=4", "tag=0"),
    (new_diloco, {"buffers": "local"}, "buffers=local", "buffers=average"),
    (new_diloco, {"check_every": 3}, "check_every=3", "check_every=None"),
    (new_diloco, {"shared": {"clock": Shared()}}, "shared=['clock']", "shared=[]"),
    (new_diloco, {"steps": "by speed", "inner_steps": 7}, "steps=by speed", "steps=fixed"),
    (new_diloco, {"quantization": QuantizationOptions(bits=8)}, "quantization=Quantization", "quantization=None"),
    (new_diloco, {"outer": OuterNesterov(0.5)}, "outer=OuterNesterov(learning_rate=0.5", "outer=OuterNesterov("),
    (new_spsa, {"admit_every": 3}, "admit_every=3", "admit_every=10"),
    (lambda comm: AsyncDiLoCo(comm, new_model(), fragments=2), {}, "class=AsyncDiLoCo", "class=DiLoCo"),
    (new_spsa, {}, "class=SPSA", "class=DiLoCo"),
]


@pytest.mark.parametrize(("make", "options", "has", "where"), DIFFERENT)
def test_different_options_fail_on_all_peers(
    master: MasterNode, make: Callable[..., Any], options: dict[str, Any], has: str, where: str
) -> None:
    communicators = [Communicator(master.address) for _ in range(2)]
    like = new_spsa if make is new_spsa and options else new_diloco
    kinds = [partial(like), partial(make, **options)]

    def enter(number: int) -> None:
        training = kinds[number](communicators[number])
        communicators[number].connect()
        training.join(2)

    found = outcomes([partial(enter, number) for number in range(2)])
    assert results(found) == [Result.INVALID_ARGUMENT] * 2
    for error in found:
        # In a tie the first accepted peer is right.
        assert has in str(error), error
        assert where in str(error), error
        assert "give the same on all peers" in str(error)
        assert "this peer" in str(error)


def test_newcomer_with_other_tag_leaves(master: MasterNode) -> None:
    peers = cluster_of(master, 2)
    error = refused_while_others_train(master, peers, lambda comm: DiLoCo(comm, new_model(), tag=9))
    assert error.result is Result.INVALID_ARGUMENT
    assert "this peer has tag=9, but peer 1 has tag=0" in str(error)


def test_second_object_on_communicator_is_refused(master: MasterNode) -> None:
    peer = Peer(master.address, 0).enter()
    second = new_spsa(peer.communicator, tag=100)
    error = refusal(second.join)
    assert error.result is Result.INVALID_USAGE
    assert "a DiLoCo (tag=0" in str(error)
    assert "put everything that is trained into one module" in str(error)
    peer.step()  # the first one goes on
    peer.diloco.close()
    second.join()
    second.close()
    third = new_diloco(peer.communicator, tag=200)
    third.join()
    del third
    gc.collect()
    new_diloco(peer.communicator).join()
    peer.close()


def test_rows_round_trip() -> None:
    options = described(
        {"class": "DDP", "tag": 2**62, "shared": ["ä" * 500], "alike": "a\nb", **dict.fromkeys("xyz" * 9)}
    )
    row = Row(7, True, 3, options)
    assert row_of(head_bytes(row), text_of(text_bytes(row))) == row
    assert shown(options).startswith("DDP (tag=4611686018427387904, shared=['ä")
    many = Row(1, False, 1, described({f"option {i}": "x" * 60 for i in range(100)}))
    assert row_of(head_bytes(many), text_of(text_bytes(many))) == many
    assert many.options != described({f"option {i}": "x" * 60 for i in range(99)})


def test_newcomers_are_compared_with_peers_under_way() -> None:
    rows = [Row(1, False, 1, "class=A\ntag=1"), Row(2, True, 1, "class=A\ntag=2"), Row(3, False, 1, "class=A\ntag=1")]
    text = "has tag=1, but this peer has tag=2: give the same on all peers, or, to different programs, different"
    assert unlike(rows, rows[1]) == {peer: f"peer {peer} {text} run names (PCCL_RUN)" for peer in (1, 3)}
    assert not unlike(rows[:1], rows[0])
