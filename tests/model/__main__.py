"""Checks the models of the protocol with Spin: `python -m tests.model` (minutes on two cores, 4 GB).

    python -m tests.model                     what CI runs: configurations that must hold, and mutants
    python -m tests.model --long              those that take minutes and gigabytes, too
    python -m tests.model --only completion   configurations whose names contain this
    python -m tests.model --require           fail where spin or gcc is missing, instead of skipping

Ends with 1 if a configuration is not as expected, a search is truncated, or a statement of a model is reached by none
of its configurations. A counterexample is printed step by step.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.model.checker import MEMORY_MB, Finding, check, missing_tools, unreached_lines
from tests.model.configurations import HOLD, LONG, MUTANTS

FOLDER = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.model", description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one search (default: 300)")
    parser.add_argument("--memory", type=int, help="MB of one search (default: what 4 GB allow all jobs)")
    parser.add_argument("--long", action="store_true", help="also what takes minutes and gigabytes")
    parser.add_argument("--only", default="", help="configurations whose names contain this")
    parser.add_argument("--require", action="store_true", help="fail where spin or gcc is missing")
    options = parser.parse_args()
    missing = missing_tools()
    if missing:
        print(f"no {' and no '.join(missing)} to be had here: the models are not checked (apt-get install spin gcc)")
        return 1 if options.require else 0
    configurations = [*HOLD, *(LONG if options.long else []), *MUTANTS]
    chosen = [each for each in configurations if options.only in str(each)]
    memory_mb = options.memory or MEMORY_MB // options.jobs
    findings: list[Finding] = []
    print(f"{'configuration':<58}{'states':>10}{'depth':>8}{'s':>7}{'MB':>7}  verdict")
    with ThreadPoolExecutor(options.jobs) as pool:
        for finding in pool.map(lambda each: check(FOLDER, each, options.limit, memory_mb), chosen):
            findings.append(finding)
            line = f"{finding.configuration!s:<58}{finding.states:>10}{finding.depth:>8}{finding.seconds:>7.1f}"
            print(f"{line}{finding.memory_mb:>7.0f}  {finding.verdict}", flush=True)
            if finding.trail and not finding.is_as_expected:
                print(finding.trail)
    failures = sum(not finding.is_as_expected for finding in findings)
    failures += _report_unreached(findings) if not options.only else 0
    print(f"{len(findings)} configurations, {failures} failures")
    return 1 if failures or not findings else 0


def _report_unreached(findings: list[Finding]) -> int:
    """Print the statements that no search has reached, and return how many models have such."""
    found = 0
    for model in sorted({finding.configuration.model for finding in findings}):
        path = FOLDER / f"{model}.pml"
        text = path.read_text()
        ours = [each for each in findings if each.configuration.model == model and not each.configuration.mutation]
        lines = unreached_lines(ours, text)
        found += bool(lines)
        for line in lines:
            print(f"{path.name}:{line}: reached by no configuration: {text.splitlines()[line - 1].strip()}")
    return found


if __name__ == "__main__":
    sys.exit(main())
