"""The settings of one peer's process, as its starter hands them over on the command line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from tests.wan.nemesis.values import Load


@dataclass(frozen=True)
class Settings:
    masters: str
    peer: str
    """The process, such as 3.2: the second one on host 3."""
    history: str
    """The file for its events."""
    seed: int
    load: Load
    workload: str = "steps"
    master_timeout_s: float = 20.0
    folder: str = ""
    """The folder for checkpoints; empty: there are none."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Settings:
        values = json.loads(text)
        return cls(**{**values, "load": Load(**values["load"])})
