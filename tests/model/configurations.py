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
    Configuration("recovery", "a master's death and a loss", {"DEATHS": 1, "CUTS": 0, "LOSSES": 1}),
    Configuration("recovery", "a cut and a loss", {"DEATHS": 0, "CUTS": 1, "LOSSES": 1}),
    Configuration("recovery", "two losses", {"DEATHS": 0, "CUTS": 0, "LOSSES": 2}),
    Configuration("recovery", "kept rings, two cuts", {"KEEP": 1, "DEATHS": 0, "CUTS": 2, "LOSSES": 0}),
    Configuration("founding", "four starts", {"STARTS": 4}),
]
LONG = [
    Configuration("completion", "a give-up and a hopeless wait", {"LOSSES": 0, "GIVE_UPS": 1, "STALLS": 1}),
    Configuration("completion", "a loss and two give-ups", {"LOSSES": 1, "GIVE_UPS": 2}),
    Configuration("completion", "two losses and a give-up", {"LOSSES": 2, "GIVE_UPS": 1}),
    Configuration("completion", "a broken link and a give-up", {"LOSSES": 0, "CUTS": 1, "GIVE_UPS": 1}),
    Configuration("completion", "a loss and a hopeless wait", {"LOSSES": 1, "GIVE_UPS": 0, "STALLS": 1}),
    Configuration("recovery", "two cuts", {"DEATHS": 0, "CUTS": 2, "LOSSES": 0}),
]
"""Minutes each, and up to 20 GB."""


def _mutants(model: str, switches: dict[str, int], *rules: str) -> list[Configuration]:
    return [Configuration(model, f"without {rule}", switches, rule) for rule in rules]


MUTANTS = [
    *_mutants("completion", {"LOSSES": 0, "GIVE_UPS": 1}, "PROMISE", "VOTE", "STOP", "COMMITTED_VOTE"),
    *_mutants("completion", {"LOSSES": 1, "GIVE_UPS": 0}, "FREEZE", "FLUSH_COMMITS", "ALL_SURVIVORS"),
    *_mutants("completion", {"LOSSES": 0, "GIVE_UPS": 0, "STALLS": 1}, "EARLY_PROMISE"),
    *_mutants("recovery", {"DEATHS": 0, "CUTS": 1, "LOSSES": 1}, "MAJORITY", "REPORTED_COMMITS"),
    *_mutants("recovery", {"DEATHS": 1, "CUTS": 0, "LOSSES": 1}, "ANSWERS"),
    *_mutants(
        "recovery",
        {"KEEP": 1, "DEATHS": 0, "CUTS": 2, "LOSSES": 0},
        "KNOWN_TO_ENOUGH",
        "PREPARED_VIEWS",
        "DEPOSITION",
    ),
    *_mutants("recovery", {"N": 4, "KEEP": 1, "TERMS": 2, "DEATHS": 0, "CUTS": 3, "LOSSES": 0}, "KEPT_RINGS"),
    *_mutants("founding", {"STARTS": 4}, "LOCK", "FENCE"),
]
