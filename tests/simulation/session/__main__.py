"""`python -m tests.simulation.session`: see `campaign`."""

import sys

from tests.simulation.session.campaign import main
from tests.support.arguments import until_interrupted

if __name__ == "__main__":
    sys.exit(until_interrupted(main))
