"""Restart of the process with a sanitizer."""

from __future__ import annotations

import os
import subprocess
import sys


def sanitized(names: str) -> None:
    """Restart the process, unless it has, with the real engine built so and the sanitizer's library loaded before
    all others. Its reports end the process."""
    if os.environ.get("PCCL_SIMULATION_SANITIZE") == names:
        return
    libraries = ["libasan.so"] if "address" in names else []
    found = [subprocess.check_output(["gcc", f"-print-file-name={each}"], text=True).strip() for each in libraries]
    environment = {
        "PCCL_SIMULATION_SANITIZE": names,
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0:" + os.environ.get("ASAN_OPTIONS", ""),
    }
    os.execve(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]], {**os.environ, **environment})
