"""`python -m tests.simulation`: see `campaign`, and `steering` for `--steer`."""

import sys

from tests.simulation import coverage_map

STEER = "--steer"

if STEER in sys.argv:
    # Before the machines are imported, here and in the processes that this one starts, which import this module, too.
    coverage_map.install()

from tests.simulation.campaign import main  # noqa: E402
from tests.support.arguments import until_interrupted  # noqa: E402

if __name__ == "__main__":
    sys.exit(until_interrupted(main))
