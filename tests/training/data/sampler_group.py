"""Samplers of a group in one thread, with kills at any moment of a step, and a naive model of what is used."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pccl.training import ElasticSampler
from pccl.training.data.elastic_sampler import indices_at
from pccl.training.state import codec


class Loader:
    """Draws ahead, as a DataLoader with workers does."""

    def __init__(self, sampler: ElasticSampler, ahead: int, batch_size: int | None = None) -> None:
        self.batch_sampler = self.sampler = sampler
        self.batch_size = batch_size
        self.ahead = ahead

    def __iter__(self) -> Iterator[list[int]]:
        drawing = iter(self.sampler)
        ready: deque[list[int]] = deque()
        while True:
            while len(ready) <= self.ahead:
                ready.append(
                    next(drawing) if self.batch_size is None else [next(drawing) for _ in range(self.batch_size)]
                )
            yield ready.popleft()


class Member:
    def __init__(self, number: int, sampler: ElasticSampler, ahead: int | None) -> None:
        self.number = number
        self.sampler = sampler
        self.loader = Loader(sampler, ahead) if ahead is not None else None
        self.claimed: deque[list[int]] = deque()
        """Positions, of each claim that is not committed."""
        self.samples: list[int] = []
        """Trained on since the last claim."""

    def train(self, batches: int) -> None:
        """Train on `batches`, or fewer where the epoch ends."""
        source = self.sampler.track(self.loader) if self.loader is not None else iter(self.sampler)
        for _, batch in zip(range(batches), source, strict=False):
            self.samples += batch

    def claim(self) -> None:
        positions = [position for ranges in self.sampler._trained for position in range(*ranges)]
        facts = self.sampler.state_dict()
        indices = indices_at(np.array(positions, np.int64), facts["dataset_size"], facts["seed"], facts["shuffle"])
        assert indices.tolist() == self.samples
        self.claimed.append(positions)
        self.samples = []


class Group:
    def __init__(self, size: int, choice: random.Random, *, lag: int = 0, logs: Path | None = None, **options: Any):
        """`lag`: averages that are on their way while all train on. `quota` in batches: fixed steps."""
        self.size = size
        self.choice = choice
        self.lag = lag
        self.logs = logs
        self.quota: int | None = options.pop("quota", None)
        self.options = options
        self.members: list[Member] = []
        self.born = 0
        self.used: Counter[int] = Counter()
        """The use count of each position, in committed steps."""
        self.flights = 0
        self.steps = 0

    def admit(self, count: int) -> None:
        """Admit members while no average is in flight. Newcomers load the encoded state."""
        assert self.flights == 0
        data = codec.encode(self.members[0].sampler.state_dict()) if self.members else None
        for _ in range(count):
            self.born += 1
            batch = self.choice.randint(1, 7)
            quota = None if self.quota is None else self.quota * batch
            log = self.logs / f"{self.born}.jsonl" if self.logs is not None else None
            sampler = ElasticSampler(self.size, 3, batch_size=batch, samples_per_step=quota, log=log, **self.options)
            if data is not None:
                sampler.load_state_dict(codec.decode(data))
            self.members.append(Member(self.born, sampler, self.choice.choice([None, 0, 3])))
        self._form()

    def _form(self) -> None:
        rows = {member.number: member.sampler._announcement() for member in self.members}
        for member in self.members:
            member.sampler._form(member.number, rows)

    @property
    def epoch(self) -> int:
        (epoch,) = {member.sampler.epoch for member in self.members}
        return epoch

    def _kill(self, chance: float) -> None:
        """All but one, at most."""
        for member in list(self.members):
            if len(self.members) > 1 and self.choice.random() < chance:
                self.members.remove(member)

    def step(self, deaths: float) -> None:
        for member in self.members:
            member.train(self.quota if self.quota is not None else self.choice.randint(0, 9))
            member.claim()
        self._kill(deaths)
        # Fixed amounts are not gathered; a peer that has sent its amount is in the claim, even if it is lost next.
        amounts = {member.number: member.sampler.drawn for member in self.members}
        if self.quota is not None:
            amounts = {member.number: member.block for member in self.members[0].sampler._ledger.members}
        for member in self.members:
            member.sampler._claim(amounts, self.flights)
        self.flights += 1
        if self.flights > self.lag:
            self._land(deaths)

    def _land(self, deaths: float) -> None:
        self._kill(deaths)
        contributors = list(self.members)
        for member in contributors:
            self.used.update(member.claimed.popleft())
        self._kill(deaths)  # after the average, and before it knows
        for member in self.members:
            member.sampler.commit([each.number for each in contributors])
        self.flights -= 1
        self.steps += 1
        states = {codec.encode(member.sampler.state_dict()) for member in self.members}
        assert len(states) == 1
        self._check()

    def drain(self) -> None:
        while self.flights:
            self._land(0.0)

    def _check(self) -> None:
        """Check that what is used is what the members think."""
        assert max(self.used.values(), default=0) <= 1
        state = self.members[0].sampler.state_dict()
        free = {position for begin, end in state["free"] for position in range(begin, end)}
        assert set(self.used) == set(range(state["begun"])) - free
        assert self.epoch == min([state["begun"], *(begin for begin, _ in state["free"])]) // self.size
