"""`python -m tests.simulation.session`: see `campaign`."""

import sys

from tests.simulation.session.campaign import main

if __name__ == "__main__":
    sys.exit(main())
