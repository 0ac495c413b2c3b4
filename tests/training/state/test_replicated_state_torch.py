"""The contract with torch: what peers have in common is the same after every step, or an error tells."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from pccl import MasterNode
from pccl.training import DivergenceError
from tests.support.cluster import Background, refusal, together
from tests.training.peers import assert_parity
from tests.training.state.replicated_peers import KINDS, ReplicatedPeer

torch = pytest.importorskip("torch")


def cluster_of(master: MasterNode, kind: str, count: int, **options: Any) -> list[ReplicatedPeer]:
    peers = [ReplicatedPeer(torch, master.address, number, kind, **options) for number in range(count)]
    together([partial(peer.enter, count) for peer in peers])
    return peers


def close(peers: list[ReplicatedPeer]) -> None:
    together([peer.close for peer in peers])


def three_have_met(times: int) -> Any:
    return lambda peer: peer.worlds.count(3) >= times


@pytest.mark.parametrize("kind", KINDS)
def test_newcomer_gets_scheduler_and_buffers(master: MasterNode, kind: str) -> None:
    peers = cluster_of(master, kind, 2)
    together([partial(peer.run, 5) for peer in peers])
    newcomer = ReplicatedPeer(torch, master.address, 2, kind)
    threads = [Background(partial(peer.run, three_have_met(5))) for peer in peers]
    newcomer.enter().run(three_have_met(5))
    for thread in threads:
        thread.result()
    peers.append(newcomer)
    assert_parity(peers)
    assert len(newcomer.digests) >= 5
    assert len({peer.optimizer.param_groups[0]["lr"] for peer in peers}) == 1
    assert len({peer.scheduler.last_epoch for peer in peers}) == 1
    assert peers[0].optimizer.param_groups[0]["lr"] < 0.1 * 0.9**7
    if kind not in ("async", "fragments"):  # where an exchange is on its way, each has its own
        assert len({peer.running_mean.numpy().tobytes() for peer in peers}) == 1
    assert float(peers[0].running_mean.abs().sum()) > 0
    close(peers)


@pytest.mark.parametrize("rule", ["average", "first", "local"])
def test_buffer_rules(master: MasterNode, rule: str) -> None:
    peers = cluster_of(master, "ddp", 2, buffers=rule)
    alone = [ReplicatedPeer(torch, master.address, number, "ddp") for number in range(2)]
    for peer in alone:
        peer.training.close()
        with torch.no_grad():
            peer.loss()
    together([partial(peer.run, 1) for peer in peers])
    own = [peer.running_mean for peer in alone]
    first = next(peer.number for peer in peers if peer.communicator.membership.rank == 0)
    expected = {"average": [(own[0] + own[1]) / 2] * 2, "first": [own[first]] * 2, "local": own}[rule]
    for peer, mean in zip(peers, expected, strict=True):
        torch.testing.assert_close(peer.running_mean, mean)
    assert [int(peer.module[1].num_batches_tracked) for peer in peers] == [1, 1]
    assert peers[0].training.digest() == peers[1].training.digest()
    assert torch.equal(peers[0].running_mean, peers[1].running_mean) == (rule != "local")
    together([partial(peer.run, 4) for peer in peers])
    assert_parity(peers)
    close(peers)


def diverge(peer: ReplicatedPeer) -> str:
    """Changes something of the state behind the library's back; how it is called."""
    if peer.kind == "ddp":
        peer.module[0].weight.data[0] += 1
        return "parameter 0.weight"
    if peer.kind == "spsa":
        peer.training._tensors["0.weight"].array[3] += 1
        return "parameter 0.weight"
    peer.training._parameters[0] += 1
    return "outer parameter 0.weight"


@pytest.mark.parametrize("kind", KINDS)
def test_divergence_is_raised_on_all_peers(master: MasterNode, kind: str) -> None:
    peers = cluster_of(master, kind, 3)
    together([partial(peer.run, 2) for peer in peers])
    names = diverge(peers[1])
    number = peers[1].communicator.membership.peers[peers[1].communicator.membership.rank]

    def fails(peer: ReplicatedPeer) -> DivergenceError:
        with pytest.raises(DivergenceError) as caught:
            peer.run(9)
        with pytest.raises(DivergenceError):
            peer.step()
        return caught.value

    errors = together([partial(fails, peer) for peer in peers])
    assert len({error.revision for error in errors}) == 1
    for error in errors:
        assert error.peers == (number,)
        assert names in error.names
        assert f"{names}" in str(error)
    assert f"peer {number} (this one) differs from peers" in str(errors[1])
    close(peers)


def test_newcomer_with_other_shared_objects_is_refused(master: MasterNode) -> None:
    peers = cluster_of(master, "ddp", 2)
    threads = [
        Background(partial(peer.run, lambda peer: len(peer.worlds) > 20 and peer.worlds[-1] == 2)) for peer in peers
    ]
    newcomer = ReplicatedPeer(torch, master.address, 2, "ddp", shared=None)
    newcomer.communicator.connect()
    text = str(refusal(newcomer.training.join))
    assert "this peer has shared=[]" in text
    assert "shared=['scheduler']" in text
    for thread in threads:
        thread.result()
    assert_parity(peers)
    close(peers)


def test_unshareable_object_is_refused(master: MasterNode) -> None:
    def make(**options: Any) -> Any:
        return ReplicatedPeer(torch, master.address, 0, "ddp", **options)

    class Odd:
        def state_dict(self) -> Any:
            return {"function": print}

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(ValueError, match=r"state_dict of shared odd cannot be shared: function is a builtins"):
        make(shared={"odd": Odd()})
    with pytest.raises(TypeError, match=r"shared\['it'\] must have state_dict and load_state_dict, but int does not"):
        make(shared={"it": 3})
    with pytest.raises(ValueError, match="buffers 'mean': must be one of 'average', 'first', 'local'"):
        make(buffers="mean")
    with pytest.raises(ValueError, match="check_every 0 is not an integer of at least 1"):
        make(check_every=0)
