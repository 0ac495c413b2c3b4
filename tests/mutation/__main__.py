"""`python -m tests.mutation`: see `command`."""

import sys

from tests.mutation.command import main

if __name__ == "__main__":
    sys.exit(main())
