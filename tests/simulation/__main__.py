"""`python -m tests.simulation`: see `campaign`."""

import sys

from tests.simulation.campaign import main

if __name__ == "__main__":
    sys.exit(main())
