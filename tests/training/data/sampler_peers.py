"""Peers that train on the samples of an `ElasticSampler`, and log them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pccl.tools import audit
from pccl.training import ElasticSampler, OuterStep
from tests.training.peers import Kind, Peer, train

SIZE = 83


class SamplerPeer(Peer):
    """Makes as many inner steps as its number tells, and one more, each on a batch of two."""

    def __init__(
        self,
        address: str,
        number: int,
        kind: Kind,
        logs: Path,
        *,
        is_fixed: bool = False,
        size: int = SIZE,
        **options: Any,
    ) -> None:
        self.batches = number % 4 + 1
        quota = 2 * self.batches if is_fixed else None
        log = logs / f"{number}.jsonl"
        self.sampler = ElasticSampler(size, seed=7, batch_size=2, samples_per_step=quota, log=log)
        super().__init__(address, number, kind, shared={"sampler": self.sampler}, check_every=1, **options)

    def train(self) -> None:
        draws = self.sampler.batches()
        for _ in range(self.batches):
            next(draws)
        train(self.model, self.number)

    def step(self) -> OuterStep:
        self.train()
        step = self.diloco.outer_step()
        self.steps.append(step)
        self.digests[step.revision] = self.diloco.digest()
        return step

    def close(self) -> None:
        super().close()
        self.sampler.close_log()


def audited(logs: Path) -> audit.Audit:
    found = audit.audit(sorted(logs.glob("*.jsonl")))
    assert found.problems == []
    return found
