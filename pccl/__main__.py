"""`python -m pccl` is the `pccl` command."""

import sys

from pccl.cli import main

sys.exit(main())
