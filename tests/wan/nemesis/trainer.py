"""A peer that trains with one of the training classes: `python -m tests.wan.nemesis.trainer SETTINGS`.

The model and the data are small, drawn from the seed. A peer that comes back from an eviction calls what it has by
another
*label*, which is one of the objects that peers share, so that newcomers take it up with the rest: what it has may from
then on differ from what others made of the same revision.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from pccl import Communicator, PCCLError, Result
from pccl.training import SPSA, AsyncDiLoCo, DiLoCo, SPSAOptions
from tests.wan.nemesis.script import OwnEndError, Script, Settings, main

SIZE = 20_000
INNER_STEPS = 3
INNER_S = 0.02
SAVE_EVERY = 5
FRAGMENTS = 2
CHURN: Any = {"rejoin": False, "on_older_run": "adopt"}
"""A peer comes back as the script wants, with what it has, also to a run that has gone back."""


class Label:
    """Whose state it is that all go on from."""

    def __init__(self, name: str) -> None:
        self.name = name

    def state_dict(self) -> dict[str, str]:
        return {"label": self.name}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.name = state["label"]


class Trainer(Script):
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._random = np.random.default_rng(settings.seed)
        self._truth = self._random.standard_normal(SIZE).astype(np.float32)
        self._own = np.random.default_rng([settings.seed, *map(int, settings.peer.split("."))])
        self._labels = 0
        self._label = Label("")
        self._begin_label(None)
        self._loop: Any = None
        self._step: Callable[[], Any]
        if settings.workload == "ddp":
            import torch  # before it connects: the others wait for a peer that is let in

            torch.set_num_threads(1)

    def _begin_label(self, base: str | None) -> None:
        self._labels += 1
        self._label.name = f"{self.settings.peer}/{self._labels}"
        self.reporter.say("lineage", label=self._label.name, base=base, revision=0)

    def left(self, verdict: str, text: str) -> None:
        super().left(verdict, text)
        self._begin_label(self._label.name)

    def take_part(self, communicator: Communicator) -> None:
        if self._loop is not None and self.settings.workload == "ddp":
            self._loop.close()  # it has no way to go on with another communicator
            self._loop = None
        if self._loop is None:
            self._loop = self._made(communicator)
            if self.settings.folder and self._loop.load(self.settings.folder, missing_ok=True):
                self._begin_label(self._label.name)
            self._loop.join()
        else:
            self._loop.reconnect(communicator)
        while not self.is_leaving:
            try:
                step = self._step()
            except PCCLError as error:
                if error.result is Result.OUTCOME_UNKNOWN:
                    raise OwnEndError(str(error)) from None
                raise
            self.reporter.say(
                "trained",
                label=self._label.name,
                revision=self._loop.revision,
                digest=self._loop.digest(),
                world=step.world_size,
            )
            self.report_usage()
            if self.settings.folder and self._loop.revision % SAVE_EVERY == 0:
                self._save()

    def _save(self) -> None:
        try:
            self._loop.save(self.settings.folder, keep=2)
        except OSError as error:
            self.reporter.say("unsaved", text=str(error))
        else:
            self.reporter.say("saved")

    def _made(self, communicator: Communicator) -> Any:
        shared = {"label": self._label}
        if self.settings.workload == "ddp":
            return self._made_ddp(communicator, shared)
        weights = {"weights": np.zeros(SIZE, np.float32), "bias": np.zeros(7, np.float32)}
        if self.settings.workload == "spsa":
            spsa = SPSA(communicator, weights, SPSAOptions(learning_rate=1e-5), shared=shared, admit_every=5, **CHURN)

            def step() -> Any:
                time.sleep(INNER_S)
                return spsa.step(lambda direction: float(np.mean((weights["weights"] - self._truth) ** 2)) + direction)

            self._step = step
            return spsa
        if self.settings.workload == "async":
            loop: Any = AsyncDiLoCo(communicator, weights, shared=shared, fragments=FRAGMENTS, **CHURN)
        else:
            loop = DiLoCo(communicator, weights, shared=shared, **CHURN)

        def outer_step() -> Any:
            for _ in range(INNER_STEPS):
                time.sleep(INNER_S)
                noise = self._own.standard_normal(SIZE).astype(np.float32)
                weights["weights"] -= np.float32(0.05) * (weights["weights"] - self._truth + noise)
                weights["bias"] += np.float32(0.01)
            return loop.outer_step()

        self._step = outer_step
        return loop

    def _made_ddp(self, communicator: Communicator, shared: dict[str, Any]) -> Any:
        import torch

        from pccl.training import DDP

        torch.manual_seed(self.settings.seed)
        module = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 1))
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
        ddp = DDP(communicator, module, optimizer, shared=shared, bucket_bytes=1 << 14, **CHURN)

        def step() -> Any:
            time.sleep(INNER_S)
            inputs = torch.from_numpy(self._own.standard_normal((16, 64)).astype(np.float32))
            ddp.zero_grad()
            ddp(inputs).square().mean().backward()
            return ddp.step()

        self._step = step
        return ddp


if __name__ == "__main__":
    main(Trainer)
