"""What became of mutants: remembered between runs, and shown as scores."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.mutation.mutants import Mutant

KILLERS = Path(__file__).parent / "killers.json"


@dataclass(frozen=True)
class Outcome:
    """What became of one mutant in one stage, or in all of them."""

    stage: str = ""
    """The stage in which it was killed; empty: it survived."""
    killer: str = ""
    """The schedule (`seed 17`, `child 3 of seed 17`) or the test that has killed it."""
    what: str = ""
    """What failed there."""
    is_hang: bool = False
    seconds: float = 0.0
    """Time until then, in all stages."""
    schedules: int = 0
    """Number of schedules by seed that were played, up to the one that failed."""
    children: int = 0
    """Number of children of these that were played, likewise."""
    survived: str = ""
    """The stages that it has survived."""

    def after(self, earlier: Outcome) -> Outcome:
        """Return what became of a mutant that had survived another stage before."""
        survived = ", ".join(filter(None, [earlier.survived, self.survived]))
        return replace(
            self,
            seconds=earlier.seconds + self.seconds,
            schedules=earlier.schedules + self.schedules,
            children=earlier.children + self.children,
            survived=survived,
        )

    def __str__(self) -> str:
        if not self.stage:
            return f"SURVIVED {self.survived} ({self.seconds:.0f} s)"
        how = "hangs in" if self.is_hang else "killed by"
        after = f"{self.seconds:.0f} s"
        return f"{how} {self.killer} after {after}: {self.what}"


class Cache:
    """Outcomes by mutant, stage and all sources that they depend on, outside the repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def find(self, mutant: Mutant, stage: str, sources: str) -> Outcome | None:
        try:
            return Outcome(**json.loads(self._path(mutant, stage, sources).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def keep(self, mutant: Mutant, stage: str, sources: str, outcome: Outcome) -> None:
        path = self._path(mutant, stage, sources)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(outcome)))

    def _path(self, mutant: Mutant, stage: str, sources: str) -> Path:
        told = json.dumps([mutant.path, mutant.within, mutant.line, mutant.becomes, stage, sources])
        return self.folder / "outcomes" / f"{mutant.name}-{hashlib.sha256(told.encode()).hexdigest()[:16]}.json"


class Killers:
    """The schedule and the test that killed each mutant last, as the repository has them."""

    def __init__(self, path: Path = KILLERS) -> None:
        self._path = path
        self._found = _read(path)

    def of(self, mutant: Mutant, stage: str) -> str:
        return self._found.get(mutant.name, {}).get(stage, "")

    def record(self, outcomes: Iterable[tuple[Mutant, Outcome]], known: Iterable[Mutant]) -> None:
        """Keep the killers of these mutants, and forget those of mutants that are known no more."""
        self._found = _read(self._path)  # another run may have recorded some
        for mutant, outcome in outcomes:
            if outcome.stage:
                self._found.setdefault(mutant.name, {})[outcome.stage] = outcome.killer
        names = {mutant.name for mutant in known}
        kept = {name: killers for name, killers in sorted(self._found.items()) if name in names}
        self._path.write_text(json.dumps(kept, indent=1) + "\n")


def _read(path: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {}
    return found


def scores(outcomes: Sequence[tuple[Mutant, Outcome]]) -> str:
    """Return a table of how many mutants of each area were killed, and by what."""
    areas = sorted({mutant.area for mutant, _ in outcomes})
    rows = [("area", "mutants", "by schedules", "by tests", "survive", "equivalent")]
    for area in [*areas, "all"]:
        ours = [each for each in outcomes if area in (each[0].area, "all")]
        real = [outcome for mutant, outcome in ours if not mutant.equivalent]
        by_schedules = sum(outcome.stage == "simulation" for outcome in real)
        by_tests = sum(outcome.stage not in ("", "simulation") for outcome in real)
        survivors = len(real) - by_schedules - by_tests
        rows.append(
            (
                area,
                str(len(real)),
                _share(by_schedules, len(real)),
                _share(by_tests, len(real)),
                str(survivors),
                str(len(ours) - len(real)),
            )
        )
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for area, *cells in rows:
        right = (cell.rjust(width) for cell, width in zip(cells, others, strict=True))
        lines.append("  ".join([area.ljust(first), *right]))
    return "\n".join(lines)


def _share(count: int, total: int) -> str:
    return f"{count} ({100 * count / total:.0f} %)" if total else "0"


def account(mutant: Mutant, outcome: Outcome) -> str:
    """Return a row of a report in Markdown."""
    if mutant.equivalent:
        return f"| `{mutant.name}` | {mutant.path} | equivalent: {mutant.equivalent} |"
    return f"| `{mutant.name}` | {mutant.path} | {outcome} |"
