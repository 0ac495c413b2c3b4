"""`python -m tests.simulation`: see `campaign`."""

import sys

from tests.simulation.campaign import main
from tests.support.arguments import until_interrupted

if __name__ == "__main__":
    sys.exit(until_interrupted(main))
