"""`on_nonfinite`: all peers notice one peer's NaN or infinity, act alike and name the peer."""

from __future__ import annotations

import logging
import math
from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl import Communicator, DataType, MasterNode, PCCLError, QuantizationAlgorithm, QuantizationOptions, Result
from pccl.training import DDP, AsyncDiLoCo, DiLoCo
from tests.support.cluster import outcomes, refusal, results, together
from tests.training.peers import Kind, Peer, assert_parity, cluster_of, train

torch = pytest.importorskip("torch")

LLOYD_MAX = QuantizationAlgorithm.LLOYD_MAX
BAD = 1
"""The number of the peer that contributes what is not finite."""
KINDS = [(DiLoCo, {}), (AsyncDiLoCo, {}), (AsyncDiLoCo, {"fragments": 2}), (DiLoCo, {"steps": "by speed"})]


def steps(peer: Peer, count: int, bad_at: int, value: float) -> None:
    """Outer steps; before one of them, the bad peer's model breaks."""
    for number in range(count):
        train(peer.model, peer.number)
        if peer.number == BAD and number == bad_at:
            peer.model["weights"][0, 0] = value
            peer.model["bias"][0] = value
        peer.steps.append(peer.diloco.outer_step())
        peer.digests[peer.diloco.revision] = peer.diloco.digest()


def named(caplog: pytest.LogCaptureFixture, peers: list[Any]) -> list[str]:
    """Return the warnings, each of which names the bad peer."""
    number = peers[BAD].communicator.membership.peers[peers[BAD].communicator.rank]
    found = [record.getMessage() for record in caplog.records if "NaN or infinity" in record.getMessage()]
    assert all(f"of peer {number} (" in text for text in found)
    return found


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_update_is_skipped_by_all(
    master: MasterNode, caplog: pytest.LogCaptureFixture, kind: Kind, options: Any, value: float
) -> None:
    peers = cluster_of(master, 3, kind, on_nonfinite="skip", **options)
    together([partial(steps, peer, 4, 1, value) for peer in peers])
    assert_parity(peers)
    assert all(np.isfinite(array).all() for peer in peers for array in peer.model.values())
    assert {tuple(step.is_skipped for step in peer.steps) for peer in peers} in (
        {(False, True, False, False)},
        {(False, False, True, False)},  # applied one step late
    )
    texts = named(caplog, peers)
    assert len(texts) == 3
    assert all("no peer takes this step" in text for text in texts)
    together([peer.close for peer in peers])


@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("quantization", [None, QuantizationOptions()])
def test_peer_is_left_out_by_all(
    master: MasterNode, caplog: pytest.LogCaptureFixture, kind: Kind, options: Any, quantization: Any
) -> None:
    peers = cluster_of(master, 3, kind, on_nonfinite="leave out", quantization=quantization, **options)
    together([partial(steps, peer, 4, 1, math.nan) for peer in peers])
    assert_parity(peers)
    assert all(np.isfinite(array).all() for peer in peers for array in peer.model.values())
    assert not any(step.is_skipped for peer in peers for step in peer.steps)
    for peer in peers:  # AsyncDiLoCo begins without an average, and applies each one step late
        assert sorted(step.world_size for step in peer.steps if step.world_size) in ([2, 3, 3, 3], [2, 3, 3])
    assert all("the average is over the other peers" in text for text in named(caplog, peers))
    assert len(named(caplog, peers)) == 3
    together([peer.close for peer in peers])


@pytest.mark.parametrize(
    "quantization",
    [QuantizationOptions(DataType.FLOAT16, QuantizationAlgorithm.CAST), QuantizationOptions(algorithm=LLOYD_MAX)],
)
def test_movement_beyond_the_encoding_is_left_out(
    master: MasterNode, caplog: pytest.LogCaptureFixture, quantization: QuantizationOptions
) -> None:
    peers = cluster_of(master, 3, on_nonfinite="leave out", quantization=quantization)
    together([partial(steps, peer, 3, 1, 1e6) for peer in peers])
    assert_parity(peers)
    assert [step.world_size for step in peers[0].steps] == [3, 2, 3]
    assert len(named(caplog, peers)) == 3
    together([peer.close for peer in peers])


def test_left_out_peer_has_no_share_in_the_mean(master: MasterNode) -> None:
    peers = cluster_of(master, 3, on_nonfinite="leave out")
    together([partial(steps, peer, 1, 0, math.nan) for peer in peers])
    other = [Peer("127.0.0.1:1", number) for number in (0, 2)]
    moved = []
    for peer in other:
        before = {name: array.copy() for name, array in peer.model.items()}
        train(peer.model, peer.number)
        moved.append({name: before[name] - peer.model[name] for name in before})
    outer = Peer("127.0.0.1:1", 0)
    mean = np.concatenate([((moved[0][name] + moved[1][name]) / 2).reshape(-1) for name in outer.model])
    outer.diloco._update(mean)
    outer.diloco.show_outer()
    for name, array in outer.model.items():
        np.testing.assert_allclose(peers[0].model[name], array, rtol=1e-5, atol=1e-5)
    together([peer.close for peer in peers])


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_error_names_the_peer_on_all(master: MasterNode, kind: Kind, options: Any) -> None:
    peers = cluster_of(master, 3, kind, on_nonfinite="raise", **options)
    together([partial(steps, peer, 1, 5, 0) for peer in peers])
    if kind is AsyncDiLoCo:  # applied one step late
        together([partial(steps, peer, 1, 0, math.nan) for peer in peers])
    found = outcomes([partial(steps, peer, 1, 0 if kind is DiLoCo else 5, math.nan) for peer in peers])
    assert results(found) == [Result.INVALID_USAGE] * 3
    assert len({error.message for error in found}) == 1
    number = peers[BAD].communicator.membership.peers[peers[BAD].communicator.rank]
    assert f"the movement of peer {number} (" in str(found[0])
    together([partial(steps, peer, 2, 5, 0) for peer in peers])  # a program that catches it can go on
    assert_parity(peers)
    assert all(np.isfinite(array).all() for peer in peers for array in peer.model.values())
    together([peer.close for peer in peers])


def test_all_peers_skip_if_none_is_finite(master: MasterNode) -> None:
    peers = cluster_of(master, 2, on_nonfinite="leave out")
    before = peers[0].diloco.outer_parameters.copy()
    for peer in peers:
        peer.model["bias"][0] = math.inf
    found = together([peer.diloco.outer_step for peer in peers])
    assert all(step.is_skipped and (step.world_size, step.revision) == (0, 1) for step in found)
    assert np.array_equal(peers[1].diloco.outer_parameters, before)
    together([peer.close for peer in peers])


def test_weights_on_some_peers_are_refused(master: MasterNode) -> None:
    peers = cluster_of(master, 2, on_nonfinite="skip")
    found = outcomes([partial(peers[0].diloco.outer_step, weight=2.0), peers[1].diloco.outer_step])
    assert results(found) == [Result.INVALID_ARGUMENT] * 2
    together([peer.close for peer in peers])


def test_different_options_are_refused(master: MasterNode) -> None:
    peers = [Peer(master.address, number, on_nonfinite=value) for number, value in enumerate(("skip", None))]
    found = outcomes([partial(peer.enter, 2) for peer in peers])
    assert results(found) == [Result.INVALID_ARGUMENT] * 2
    with pytest.raises(ValueError, match="on_nonfinite 'drop': must be one of 'raise', 'skip', 'leave out', None"):
        DiLoCo(Communicator(master.address), {"x": np.ones(3, np.float32)}, on_nonfinite="drop")  # type: ignore[arg-type]


def test_inner_optimizer_and_buffers_become_finite_again(master: MasterNode) -> None:
    def script(number: int) -> str:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(module.parameters())
        with Communicator(master.address) as communicator:
            diloco = DiLoCo(communicator, module, optimizer, on_nonfinite="leave out")
            diloco.join(2)
            for step in range(3):
                inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(number + 10 * step))
                if number == BAD and step == 1:
                    inputs[0, 0] = math.nan
                optimizer.zero_grad()
                module(inputs).pow(2).sum().backward()
                optimizer.step()
                diloco.outer_step()
            values = [*module.state_dict().values(), *(each["exp_avg"] for each in optimizer.state.values())]
            assert all(value.isfinite().all() for value in values)
            return diloco.digest()

    assert len(set(together([partial(script, number) for number in range(2)]))) == 1


# DDP


class GradientPeer:
    def __init__(self, address: str, number: int, on_nonfinite: Any, **options: Any) -> None:
        torch.manual_seed(0)
        self.number = number
        self.module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)
        self.communicator = Communicator(address)
        self.ddp = DDP(
            self.communicator, self.module, self.optimizer, on_nonfinite=on_nonfinite, bucket_bytes=20, **options
        )

    def enter(self) -> None:
        self.communicator.connect()
        self.ddp.join(3)

    def backward(self, step: int, is_bad: bool) -> None:
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(self.number + 10 * step))
        if is_bad and self.number == BAD:
            inputs[0, 0] = math.nan
        self.ddp(inputs).pow(2).sum().backward()

    def step(self, number: int, is_bad: bool) -> Any:
        self.backward(number, is_bad)
        return self.ddp.step()


def gradient_peers(master: MasterNode, on_nonfinite: Any, **options: Any) -> list[GradientPeer]:
    peers = [GradientPeer(master.address, number, on_nonfinite, **options) for number in range(3)]
    together([peer.enter for peer in peers])
    return peers


def end(peers: list[GradientPeer]) -> None:
    assert len({peer.ddp.digest() for peer in peers}) == 1
    assert all(value.isfinite().all() for peer in peers for value in peer.module.state_dict().values())
    together([peer.communicator.close for peer in peers])


@pytest.mark.parametrize("weight", [None, 2.0])
def test_ddp_skips_the_step_on_all(master: MasterNode, caplog: pytest.LogCaptureFixture, weight: float | None) -> None:
    peers = gradient_peers(master, "skip")

    def script(peer: GradientPeer) -> list[tuple[int, bool]]:
        found = []
        for number in range(3):
            peer.backward(number, is_bad=number == 1)
            before = [p.detach().clone() for p in peer.module.parameters()]
            peer.ddp.synchronize(weight=weight)
            torch.nn.utils.clip_grad_norm_(peer.module.parameters(), 1.0)
            step = peer.ddp.step()
            is_same = all(torch.equal(a, b) for a, b in zip(before, peer.module.parameters(), strict=True))
            assert is_same == step.is_skipped
            found.append((step.revision, step.is_skipped))
        return found

    assert together([partial(script, peer) for peer in peers]) == [[(1, False), (2, True), (3, False)]] * 3
    texts = named(caplog, peers)
    assert len(texts) == 3
    assert "a gradient or buffer of peer" in texts[0]
    end(peers)


def test_ddp_raises_on_all(master: MasterNode) -> None:
    peers = gradient_peers(master, "raise")
    assert not any(step.is_skipped for step in together([partial(peer.step, 0, False) for peer in peers]))
    found = outcomes([partial(peer.step, 1, True) for peer in peers])
    assert results(found) == [Result.INVALID_USAGE] * 3
    assert len({error.message for error in found}) == 1
    assert {step.revision for step in together([partial(peer.step, 2, False) for peer in peers])} == {2}
    end(peers)


def test_ddp_leaves_the_peer_out(master: MasterNode, caplog: pytest.LogCaptureFixture) -> None:
    peers = gradient_peers(master, "leave out", buffers="local")

    def script(peer: GradientPeer) -> list[Any]:
        peer.backward(0, is_bad=True)
        own = [p.grad.clone() for p in peer.module.parameters()]
        peer.ddp.synchronize()
        return [own, [p.grad.clone() for p in peer.module.parameters()]]

    found = together([partial(script, peer) for peer in peers])
    wanted = [(a + b) / 2 for a, b in zip(found[0][0], found[2][0], strict=True)]
    for _, mean in found:
        torch.testing.assert_close(mean, wanted)
    assert len(named(caplog, peers)) == 3
    assert not any(step.is_skipped for step in together([peer.ddp.step for peer in peers]))
    together([partial(peer.step, 1, False) for peer in peers])
    assert len({peer.ddp.digest() for peer in peers}) == 1
    together([peer.communicator.close for peer in peers])


@pytest.mark.parametrize(("on_nonfinite", "counts"), [("leave out", [3, 2, 3]), ("skip", [3, 0, 3])])
def test_ddp_counts_peers_whose_gradients_are_in_the_update(
    master: MasterNode, on_nonfinite: str, counts: list[int]
) -> None:
    peers = gradient_peers(master, on_nonfinite)

    def script(peer: GradientPeer) -> list[int]:
        return [peer.step(number, number == 1).world_size for number in range(3)]

    assert together([partial(script, peer) for peer in peers]) == [counts] * 3
    end(peers)


@pytest.mark.parametrize("on_nonfinite", ["leave out", "skip", "raise"])
@pytest.mark.parametrize(
    "quantization",
    [
        QuantizationOptions(DataType.FLOAT16, QuantizationAlgorithm.CAST),
        QuantizationOptions(algorithm=LLOYD_MAX),
        QuantizationOptions(algorithm=QuantizationAlgorithm.SIGN),
    ],
)
@pytest.mark.parametrize("bad_at", [0, 1])
def test_ddp_gradient_beyond_the_encoding_counts_as_nonfinite(
    master: MasterNode,
    caplog: pytest.LogCaptureFixture,
    quantization: QuantizationOptions,
    on_nonfinite: str,
    bad_at: int,
) -> None:
    peers = gradient_peers(master, on_nonfinite, quantization=quantization, buffers="local")

    def script(peer: GradientPeer) -> list[int]:
        counts = []
        for number in range(3):
            inputs = torch.ones(2, 3)
            scale = 1e6 if number == bad_at and peer.number == BAD else 1.0
            (peer.ddp(inputs) + peer.module[0].bias).mul(scale).sum().backward()
            if number == bad_at and on_nonfinite == "raise":
                assert "NaN or infinity" in str(refusal(peer.ddp.step))
                counts.append(-1)
            else:
                counts.append(peer.ddp.step().world_size)
        return counts

    wanted = [3, 3, 3]
    wanted[bad_at] = {"leave out": 2, "skip": 0, "raise": -1}[on_nonfinite]
    assert together([partial(script, peer) for peer in peers]) == [wanted] * 3
    assert len(named(caplog, peers)) == (0 if on_nonfinite == "raise" else 3)
    assert len({peer.ddp.digest() for peer in peers}) == 1
    together([peer.communicator.close for peer in peers])


def test_ddp_refuses_what_cannot_be_combined(master: MasterNode) -> None:
    peer = GradientPeer(master.address, 0, "skip")
    with pytest.raises(ValueError, match="leave out on_nonfinite="):
        peer.ddp.step(torch.amp.GradScaler("cpu"))
    peer = GradientPeer(master.address, 0, "leave out")
    error: PCCLError = refusal(partial(peer.ddp.register_comm_hook, None, lambda state, bucket: bucket.buffer()))
    assert "needs weights" in str(error)


def test_none_does_not_check(master: MasterNode, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    peers = cluster_of(master, 2)
    together([partial(steps, peer, 1, 0, math.nan) for peer in peers])
    assert all(np.isnan(peer.model["bias"][0]) for peer in peers)
    assert not named(caplog, peers)
    together([peer.close for peer in peers])
