"""The examples, run by the commands that their docstrings give."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from pccl.tools import audit
from tests.support.cluster import until
from tests.support.streams import TIMEOUT_S, Lines

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _launch(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "pccl", "launch", *arguments]


def _run(*arguments: str) -> list[str]:
    done = subprocess.run(
        _launch("--fail-fast", *arguments), capture_output=True, text=True, timeout=TIMEOUT_S, cwd=EXAMPLES.parent
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_shuffle() -> None:
    lines = sorted(line.partition(" ")[2] for line in _run("-n", "2", "examples/shuffle.py"))
    assert [line[: len("rank 0 has")] for line in lines] == ["rank 0 has", "rank 1 has"]


def test_hello() -> None:
    assert sorted(_run("-n", "4", "examples/hello.py")) == [
        f"[{index}] [ 6. 10. 14. 18.] is the sum over 4 peers" for index in range(4)
    ]


@pytest.mark.slow
def test_reference_loop() -> None:
    lines = _run("-n", "2", "examples/reference_loop.py")
    last = [line for line in lines if "done at revision" in line]
    assert len(last) == 2
    assert len({line.split(maxsplit=1)[1] for line in last}) == 1


@pytest.mark.slow
def test_elastic_data_and_its_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _run("-n", "2", "examples/elastic_data.py", "2", str(tmp_path / "logs"))
    assert len(_digests(lines)) == 2
    assert len({line.split("digest ")[1] for line in lines if "digest " in line}) == 1
    assert audit.main(list(map(str, (tmp_path / "logs").iterdir()))) == 0
    assert "2 epochs of 4000 samples are complete" in capsys.readouterr().out


SHORT = ["--steps", "3", "--inner", "2", "--pretrain", "2"]


def _table(lines: list[str]) -> list[list[str]]:
    """The rows of peer 0's table of losses."""
    rows = [line.removeprefix("[0]").split() for line in lines if line.startswith("[0] ")]
    header = next(i for i, row in enumerate(rows) if row[:2] == ["step", "peers"])
    return [row for row in rows[header + 1 :] if row[0].isdigit()]


def _digests(lines: list[str]) -> list[str]:
    return [line.split()[-1] for line in lines if "] digest " in line]


@pytest.mark.slow
def test_diloco_gpt_with_torch_trains_and_resumes(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = ["-n", "2", "examples/diloco_gpt.py", *SHORT, "--quantize", "8", "--checkpoint", str(tmp_path)]
    command += ["--steps-by-speed", "--weighted"]
    lines = _run(*command)
    assert [row[:2] for row in _table(lines)] == [["2", "2"], ["4", "2"], ["6", "2"]]
    assert len(set(_digests(lines))) == 1
    lines = _run("-n", "1", *command[2:], "--steps", "4")
    assert [row[:2] for row in _table(lines)] == [["8", "1"]]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--fragments", "1", "--overlap", "1", "--mixing", "0.5"]], ids=["", "overlap"])
def test_async_diloco_gpt_with_torch(tmp_path: Path, more: list[str]) -> None:
    pytest.importorskip("torch")
    more = ["--model=large", f"--start={tmp_path}/start.pt", *more]
    lines = _run("-n", "2", "examples/async_diloco_gpt.py", *SHORT, *more)
    last = "0" if "--overlap" in more else "2"  # the average that `finish` applies
    assert [row[:2] for row in _table(lines)] == [["2", "2"], ["4", "2"], ["6", "2"], ["6", last]]
    assert len(set(_digests(lines))) == 1


@pytest.mark.slow
def test_diloco_gpt_with_torch_and_late_updates() -> None:
    pytest.importorskip("torch")
    lines = _run("-n", "2", "examples/diloco_gpt.py", *SHORT, "--slow", "2", "--late")
    assert [row[:2] for row in _table(lines)] == [["2", "2"], ["4", "2"], ["6", "2"]]
    assert len(set(_digests(lines))) == 1


@pytest.mark.slow
def test_diloco_gpt_with_torch_compresses_what_muon_moves(tmp_path: Path) -> None:
    pytest.importorskip("torch", "2.9")
    command = ["-n", "2", "examples/diloco_gpt.py", *SHORT, "--optimizer", "muon", "--compression", "topk=0.0625"]
    command += ["--outer-learning-rate", "1", "--outer-momentum", "0", "--outer-end", "0.5", "0"]
    command += ["--checkpoint", str(tmp_path)]
    lines = _run(*command)
    assert [row[:2] for row in _table(lines)] == [["2", "2"], ["4", "2"], ["6", "2"]]
    assert len(set(_digests(lines))) == 1
    lines = _run(*command, "--steps", "4")
    assert [row[:2] for row in _table(lines)] == [["8", "2"]]
    assert len(set(_digests(lines))) == 1


@pytest.mark.slow
def test_compare_bytes_with_torch_resumes_and_plots(tmp_path: Path) -> None:
    pytest.importorskip("torch", "2.9")
    pytest.importorskip("matplotlib")
    command = [sys.executable, "examples/compare_bytes.py", "--folder", str(tmp_path), "--only", "ddp", "topk 1/16"]
    command += ["--peers", "2", "--steps", "100", "--pretrain", "2", "--plot", str(tmp_path / "bytes.svg")]
    earlier = {"validation_loss": 3.0, "test_loss": 3.0, "sent_bytes": 8e8, "received_bytes": 8e8, "seconds": 100.0}
    earlier |= {"kills": 0, "joins": 0, "compared": 2}
    (tmp_path / "results.json").write_text(json.dumps({"ddp": {"0": earlier}}))

    def run() -> list[str]:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=EXAMPLES.parent)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()

    lines = run()
    assert [line for line in lines if line.startswith("run ")] == ["run 2 of 2: topk 1/16, seed 0"]
    ddp, topk = (line.split(" | ") for line in lines[-2:])
    assert [ddp[0], topk[0]] == ["| ddp", "| topk 1/16"]
    assert float(topk[4]) > 0.008  # two steps with 17 chunks of 260 bytes
    assert topk[7] == "2 equal"
    assert (tmp_path / "bytes.svg").stat().st_size > 0
    assert not any(line.startswith("run ") for line in run())


@pytest.mark.slow
def test_fsdp_diloco_with_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = ["examples/fsdp_diloco.py", "--inner", "2", "--quantize", "8", "--checkpoint", str(tmp_path)]
    lines = _run("-n", "2", *command, "--steps", "2")
    assert [row[:2] for row in _table(lines)] == [["2", "2"], ["4", "2"]]
    digests = _digests(lines)
    assert len(digests) == 2
    assert len(set(digests)) == 1


@pytest.mark.slow
def test_fsdp_diloco_with_torch_survives_losses() -> None:
    pytest.importorskip("torch")
    arguments = ["examples/fsdp_diloco.py", "--steps", "5000", "--inner", "2"]
    with ExitStack() as resources:
        process = resources.enter_context(_popen(_launch("-n", "2", *arguments)))
        assert process.stdout is not None
        stdout = Lines(process.stdout)
        site = stdout.expect(r"\[1\] pid (\d+); PCCL_MASTER=(\S+) .*")
        stdout.expect(r"\[0\] +\d+ +2 .*")
        os.kill(int(site[1]), signal.SIGKILL)
        stdout.expect(r"\[0\] +\d+ +1 .*")
        stdout.seen.clear()
        again = resources.enter_context(
            _popen(
                [sys.executable, *arguments, "--peers", "2", "--index", "1"],
                env={**os.environ, "PCCL_MASTER": site[2], "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        )
        until(lambda: len(_ranks(again.pid)) == 2, "its ranks are there")
        stdout.expect(r"\[0\] +\d+ +2 .*")
        stdout.seen.clear()
        os.kill(_ranks(again.pid)[-1], signal.SIGKILL)
        stdout.expect(r"\[0\] +\d+ +1 .*")
        assert again.wait(TIMEOUT_S) == 1


def _ranks(pid: int) -> list[int]:
    """The processes that a site has spawned, without those that multiprocessing needs for itself."""
    ranks = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                ranks.append(int(child))
    return ranks


@pytest.mark.slow
def test_ddp_gpt_with_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = ["-n", "2", "examples/ddp_gpt.py", *SHORT, "--checkpoint", str(tmp_path)]
    lines = _run(*command)
    assert [row[:2] for row in _table(lines)] == [["2", "2"], ["4", "2"], ["6", "2"]]
    assert len(set(_digests(lines))) == 1


def _last_line(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
        cwd=EXAMPLES.parent,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_compare_diloco_with_torch() -> None:
    pytest.importorskip("torch")
    options = ["--steps", "3", "--inner", "2", "--pretrain", "1", "--peers", "2", "--only", "async"]
    assert _last_line("examples/compare_diloco.py", *options).endswith("| 0, 0 | 4 of 4 |")
    options = ["--steps", "2", "--inner", "2", "--pretrain", "1", "--peers", "2", "--seeds", "2"]
    line = _last_line("examples/compare_diloco.py", *options, "--sweep", "--sweep-peers", "2", "--sweep-inner", "2")
    assert line.startswith("| M = 2 |")
    assert line.count("±") == 2


@pytest.mark.slow
def test_compare_unequal_with_torch() -> None:
    pytest.importorskip("torch")
    options = ["--steps", "2", "--inner", "5", "--pretrain", "1", "--peers", "2", "--step-ms", "5"]
    assert _last_line("examples/compare_unequal.py", *options).startswith("| by speed, weighted |")


@pytest.mark.slow
def test_spsa_with_torch_and_its_log(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    arguments = ["examples/spsa.py", "--pretrain", "1"]
    lines = _run("-n", "2", *arguments, "--steps", "4", "--show-every", "2", "--log", str(tmp_path))
    assert [row[:2] for row in _table(lines)] == [["2", "2"], ["4", "2"]]
    digests = _digests(lines)
    assert len(digests) == 2
    assert len(set(digests)) == 1
    assert sum("sent 4 bytes of payload in 4 steps" in line for line in lines) == 2
    replayed = _run("-n", "1", *arguments, "--replay", str(tmp_path / "peer-1.log"))
    assert "[0] 4 steps replayed" in replayed
    assert _digests(replayed) == digests[:1]


@pytest.mark.slow
def test_compare_spsa_with_torch() -> None:
    pytest.importorskip("torch")
    options = ["--steps", "10", "--pretrain", "1", "--peers", "2", "--only", "one", "peers"]
    assert _last_line("examples/compare_spsa.py", *options).endswith("| 10 | 0, 0 | the same bits |")


@pytest.mark.slow
def test_saddle_point_is_found_with_fewer_bytes() -> None:
    fields = [re.split("[ ,]+", line) for line in _run("-n", "4", "examples/saddle_point.py")]
    found = {name: (float(left), float(megabytes)) for _, name, _, _, _, left, megabytes, _ in fields}
    assert max(left for left, _ in found.values()) < 0.02
    assert found["MASHA2"] < found["extragradient"]  # nearer
    assert found["MASHA2"][1] < 0.6 * found["extragradient"][1]


def test_ddp_digits_with_torch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    lines = _run("-n", "2", "examples/ddp_digits.py", "--steps", "80", "--plot", str(tmp_path / "loss.png"))
    assert [row[:2] for row in _table(lines)] == [["40", "2"], ["80", "2"]]
    assert len(set(_digests(lines))) == 1
    assert (tmp_path / "loss.png").stat().st_size > 0


@pytest.mark.slow
def test_churn_with_kill_and_join() -> None:
    with ExitStack() as resources:
        # Enough steps for a newcomer to start on a busy machine before they are over.
        process = resources.enter_context(_popen(_launch("-n", "3", "examples/churn.py", "240")))
        assert process.stdout is not None
        assert process.stderr is not None
        stdout, stderr = Lines(process.stdout), Lines(process.stderr)
        pid = int(stdout.expect(r"\[1\] pid (\d+); .*")[1])
        joining = stdout.expect(r"\[0\] pid .*; PCCL_MASTER=(\S+) python (\S+) 240 adds a peer")
        stdout.expect(r"\[2\] step \d+: 3 peers, .*")
        stdout.seen.clear()
        os.kill(pid, signal.SIGKILL)
        stdout.expect(r"\[2\] step \d+: 2 peers, .*")
        newcomer = resources.enter_context(
            _popen([sys.executable, joining[2], "240"], env={**os.environ, "PCCL_MASTER": joining[1]})
        )
        output, _ = newcomer.communicate(timeout=TIMEOUT_S)
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGKILL
        digests = [line for line in stdout.rest() if "digest" in line]
        assert len(digests) == 2, stderr.rest()
        assert {line.split(maxsplit=1)[1] for line in digests} == {output.splitlines()[-1]}
        assert "step 240: 3 peers" in output


def _popen(command: list[str], env: dict[str, str] | None = None) -> AbstractContextManager[subprocess.Popen[str]]:
    """Runs it in the project's root, and kills it if it outlives the test."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=EXAMPLES.parent, env=env
    )

    @contextmanager
    def until_the_end() -> Iterator[subprocess.Popen[str]]:
        with process:
            try:
                yield process
            finally:
                process.kill()

    return until_the_end()
