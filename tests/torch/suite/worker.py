"""A process that runs tests of torch's suite: their names come on standard input, a JSON object each goes out.

All else that the tests and their ranks print goes to the log that is named on the command line.

    echo test_all_reduce_sum | python -m tests.torch.suite.worker LOG
    python -m tests.torch.suite.worker LOG --list
"""

import json
import os
import sys
import time
import unittest


def outcome_of(case: unittest.TestCase) -> dict[str, object]:
    """Run one test; how it went, why, and the seconds it took."""
    result = unittest.TestResult()
    began = time.monotonic()
    case.run(result)
    seconds = time.monotonic() - began
    wrong = result.errors + result.failures
    if wrong:
        return {"outcome": "failed", "reason": wrong[0][1], "seconds": seconds}
    if result.skipped:
        return {"outcome": "skipped", "reason": result.skipped[0][1], "seconds": seconds}
    return {"outcome": "passed", "reason": "", "seconds": seconds}


def main() -> None:
    log, *flags = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.set_inheritable(answers.fileno(), False)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    from tests.torch.suite.case import SuiteCase

    if "--list" in flags:
        import torch

        names = unittest.TestLoader().getTestCaseNames(SuiteCase)
        print(json.dumps({"torch": torch.__version__, "tests": names}), file=answers)
        return
    for line in sys.stdin:
        name = line.strip()
        print(f"\n===== {name}", flush=True)
        print(json.dumps({"test": name, **outcome_of(SuiteCase(name))}), file=answers, flush=True)


if __name__ == "__main__":
    main()
