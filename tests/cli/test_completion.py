"""What shells complete, asked of the shells themselves where they are there."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from pccl.cli import parser
from pccl.cli.completion import SHELLS, commands
from tests.conftest import Command

(SUBPARSERS,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
COMMANDS = [command.name for command in commands(SUBPARSERS)]


@pytest.fixture(params=tuple(SHELLS))
def script(request: pytest.FixtureRequest, command: Command, tmp_path: Path) -> Path:
    """A file with the completions of a shell, which is the suffix of its name."""
    done = command("completion", request.param)
    assert done.returncode == 0
    path = tmp_path / f"pccl.{request.param}"
    path.write_text(done.stdout)
    return path


def test_every_command_and_option_is_in_it(script: Path) -> None:
    text = script.read_text()
    for each in commands(SUBPARSERS):
        assert each.name in text
        for option in each.options:
            for name in option.names:
                assert name.lstrip("-") in text


def completed(shell: str, script: Path, line: str) -> list[str]:
    """What the shell offers for the last word of a line."""
    words = line.split(" ")
    if shell == "bash":
        array = " ".join(f"'{word}'" for word in words)
        code = f"source {script}; COMP_WORDS=({array}); COMP_CWORD={len(words) - 1}; _pccl; "
        code += "printf '%s\\n' ${COMPREPLY[@]}"
    else:
        code = f"source {script}; complete -C '{line}'"
    done = subprocess.run([shell, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not done.stderr
    return [word.split("\t")[0] for word in done.stdout.split("\n") if word]


@pytest.mark.parametrize("script", ["bash", "fish"], indirect=True)
def test_commands_options_and_values_are_completed(script: Path) -> None:
    shell = script.suffix[1:]
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    assert set(COMMANDS) <= set(completed(shell, script, "pccl "))
    assert completed(shell, script, "pccl la") == ["launch"]
    assert "--node-rank" in completed(shell, script, "pccl launch --no")
    assert completed(shell, script, "pccl launch --tol") == ["--tolerate-losses"]
    assert set(completed(shell, script, "pccl demo --quantize ")) >= {"none", "min-max", "zero-point"}
    assert set(completed(shell, script, "pccl completion ")) >= {"bash", "zsh", "fish"}


@pytest.mark.parametrize("script", ["bash", "zsh", "fish"], indirect=True)
def test_shells_take_it_without_a_word(script: Path) -> None:
    shell = script.suffix[1:]
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    load = f"autoload -Uz compinit && compinit -u -d {script.parent}/dump; source" if shell == "zsh" else "source"
    clean = {"zsh": ["-f"], "bash": ["--norc"], "fish": ["--no-config"]}[shell]
    done = subprocess.run([shell, *clean, "-c", f"{load} {script}"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
