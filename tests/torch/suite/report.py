"""The table of a run of torch's tests, and whether it is as it should be."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    """How a test went: "passed", "skipped" or "failed", with torch's reason, or the exception's text."""

    test: str
    outcome: str
    reason: str
    seconds: float
    world_size: int


def judged(outcome: Outcome, listed: Mapping[str, str] | None) -> Outcome:
    """The outcome; a failure if it differs from the list of skips, unless that is None."""
    if listed is None or outcome.outcome == "failed":
        return outcome
    if outcome.outcome == "skipped" and outcome.test not in listed:
        return Outcome(**{**vars(outcome), "outcome": "failed", "reason": f"skipped and not listed: {outcome.reason}"})
    if outcome.outcome == "passed" and outcome.test in listed:
        return Outcome(**{**vars(outcome), "outcome": "failed", "reason": "listed as skipped, and it runs"})
    return outcome


def verdict(outcomes: Sequence[Outcome], listed: Mapping[str, str] | None) -> tuple[str, bool]:
    """The table as text, and whether no test has failed."""
    outcomes = [judged(outcome, listed) for outcome in outcomes]
    counts = Counter(outcome.outcome for outcome in outcomes)
    reasons = Counter(
        (listed or {}).get(outcome.test, outcome.reason) for outcome in outcomes if outcome.outcome == "skipped"
    )
    lines = [f"{number:5} skipped: {reason}" for reason, number in reasons.most_common()]
    for outcome in outcomes:
        if outcome.outcome == "failed":
            lines += [f"FAILED {outcome.test} with {outcome.world_size} ranks, {outcome.seconds:.1f} s"]
            lines += ["    " + line for line in outcome.reason.strip().splitlines()[-12:]]
    lines.append(f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped")
    return "\n".join(lines), not counts["failed"]
