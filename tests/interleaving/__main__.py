"""`python -m tests.interleaving`: see `campaign`."""

import sys

from tests.interleaving.campaign import main

if __name__ == "__main__":
    sys.exit(main())
