"""`pccl completion`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Command


def completed(script: Path, line: str) -> list[str]:
    """Return what bash offers for the last word of a line."""
    words = line.split(" ")
    array = " ".join(f"'{word}'" for word in words)
    code = f"source {script}; COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _shtab_pccl; "
    code += "printf '%s\\n' ${COMPREPLY[@]}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return [word for word in done.stdout.split("\n") if word]


def test_bash_completes_commands_options_and_values(command: Command, tmp_path: Path) -> None:
    script = tmp_path / "pccl.bash"
    script.write_text(command("completion", "bash").stdout)
    assert {"master", "status", "launch", "completion"} <= set(completed(script, "pccl "))
    assert "--tolerate-losses" in completed(script, "pccl launch --tol")
    assert set(completed(script, "pccl completion ")) >= {"bash", "zsh", "fish"}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_accept_their_script(shell: str, command: Command, tmp_path: Path) -> None:
    done = command("completion", shell)
    assert done.returncode == 0
    script = tmp_path / f"pccl.{shell}"
    script.write_text(done.stdout)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    load = f"autoload -Uz compinit && compinit -u -d {tmp_path}/dump; source" if shell == "zsh" else "source"
    clean = {"zsh": ["-f"], "bash": ["--norc"], "fish": ["--no-config"]}[shell]
    done = subprocess.run([shell, *clean, "-c", f"{load} {script}"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
