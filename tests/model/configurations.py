"""What is searched: configurations that must hold, those that take long, and mutants that must be refuted.

A mutant is a model without one rule of the code's safety arguments. That Spin finds a counterexample shows that the
rule is needed, and that the model would notice its loss.
"""

from __future__ import annotations

from tests.model.checker import Configuration

HOLD = [
    Configuration("completion", "a loss and a give-up", {"LOSSES": 1, "GIVE_UPS": 1}),
    Configuration("completion", "two losses", {"LOSSES": 2, "GIVE_UPS": 0}),
    Configuration("completion", "a hopeless wait", {"LOSSES": 0, "GIVE_UPS": 0, "STALLS": 1}),
    Configuration("completion", "a broken link", {"LOSSES": 0, "CUTS": 1, "GIVE_UPS": 0}),
    Configuration("completion", "no mesh", {"LOSSES": 2, "GIVE_UPS": 1, "MESH": 0}),
]
LONG = [
    Configuration("completion", "a give-up and a hopeless wait", {"LOSSES": 0, "GIVE_UPS": 1, "STALLS": 1}),
    Configuration("completion", "a loss and two give-ups", {"LOSSES": 1, "GIVE_UPS": 2}),
    Configuration("completion", "two losses and a give-up", {"LOSSES": 2, "GIVE_UPS": 1}),
    Configuration("completion", "a broken link and a give-up", {"LOSSES": 0, "CUTS": 1, "GIVE_UPS": 1}),
    Configuration("completion", "a loss and a hopeless wait", {"LOSSES": 1, "GIVE_UPS": 0, "STALLS": 1}),
]
"""Minutes each, and up to 20 GB."""


def _mutants(model: str, switches: dict[str, int], *rules: str) -> list[Configuration]:
    return [Configuration(model, f"without {rule}", switches, rule) for rule in rules]


MUTANTS = [
    *_mutants("completion", {"LOSSES": 0, "GIVE_UPS": 1}, "PROMISE", "VOTE", "STOP", "COMMITTED_VOTE"),
    *_mutants("completion", {"LOSSES": 1, "GIVE_UPS": 0}, "FREEZE", "FLUSH_COMMITS", "ALL_SURVIVORS"),
    *_mutants("completion", {"LOSSES": 0, "GIVE_UPS": 0, "STALLS": 1}, "EARLY_PROMISE"),
]
