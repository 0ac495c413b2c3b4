"""Processes whose log nobody reads, and loops that stand still."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.crew import WAIT_S, Crew, reduce_once


def test_a_master_whose_log_nobody_reads_goes_on_leading(full_pipe: tuple[int, int]) -> None:
    _, writing = full_pipe
    environment = {**os.environ, "PCCL_LOG_LEVEL": "DEBUG"}
    command = [sys.executable, "-P", "-m", "pccl", "master", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing, env=environment, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().rpartition(" ")[2].strip()
            crew = Crew(address, timeout=WAIT_S)
            for _ in range(5):
                crew.join(3)
                crew.each(reduce_once)
                while crew.peers:
                    crew.close(crew.peers[-1])
            process.terminate()
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
