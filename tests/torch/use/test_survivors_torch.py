"""Training with FSDP2 goes on without a rank that was killed, from the last checkpoint."""

import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("pccl.torch")

from tests.torch.use import ranks  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
VICTIM = 2
HEARD_S = 5  # within which survivors are told of a process that was killed, on a busy machine


@pytest.mark.slow
def test_survivors_of_killed_rank_train_on(tmp_path: Path) -> None:
    with tempfile.TemporaryFile("w+") as log:
        program = "tests.torch.use.survivors:killed"
        group = [ranks.start(program, "pccl", rank, 3, tmp_path, log.fileno()) for rank in range(3)]
        ends_s = time.monotonic() + ranks.TIMEOUT_S
        while any(rank.poll() is None for rank in group) and time.monotonic() < ends_s:
            time.sleep(ranks.POLL_S)
        codes = [rank.poll() for rank in group]
        for rank in group:
            rank.kill()
            rank.wait()
        log.seek(0)
        assert codes == [0, 0, -signal.SIGKILL], log.read()
    said = [torch.load(tmp_path / f"pccl-{rank}.pt", weights_only=False) for rank in (0, 1)]
    for one in said:
        assert tuple(one["lost"]) == (VICTIM,), one["error"]
        assert f"rank {VICTIM}" in one["error"]
        assert one["seconds"] < HEARD_S
    ranks.run("tests.torch.use.survivors:first_part", "gloo", 3, tmp_path)
    expected = ranks.run("tests.torch.use.survivors:second_part", "gloo", 2, tmp_path)[0]
    for name, value in said[0]["weights"].items():
        assert torch.equal(value, said[1]["weights"][name]), name
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_survivors_example() -> None:
    options = "--ranks 2 --kill 1 --at 4 --every 2 --steps 6"
    command = [sys.executable, "fsdp_survivors.py", *options.split()]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=ranks.TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "RANK_CONNECTION_LOST (rank 1 lost)" in done.stdout
    assert "step   6  1 ranks" in done.stdout
