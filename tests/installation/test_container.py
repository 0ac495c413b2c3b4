"""The images are made by the commands of the README, of all that a wheel needs, and no other files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
IGNORED = {
    "Dockerfile": ROOT / ".dockerignore",
    "examples/deploy/kubernetes/Dockerfile": ROOT / "examples/deploy/kubernetes/Dockerfile.dockerignore",
}
images = pytest.mark.parametrize("image", IGNORED)


def _needed() -> set[str]:
    """What setuptools makes a wheel of, by its place in the root of the repository."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    modules = [f"{name}.py" for name in project["tool"]["setuptools"].get("py-modules", [])]
    packages = [name for name in project["tool"]["setuptools"]["packages"]["find"]["include"] if "." not in name]
    files = [project["project"]["readme"], *project["project"]["license-files"]]
    return {"pyproject.toml", "setup.py", "MANIFEST.in", "bindings", "native", *modules, *packages, *files}


@images
def test_all_that_a_wheel_is_made_of_comes_in_and_no_secret(image: str) -> None:
    lines = IGNORED[image].read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    let_in = {line[1:] for line in lines if line.startswith("!")}
    assert let_in == _needed() | {"examples"}
    assert all((ROOT / each).exists() for each in let_in)
    assert "**/*.so" in lines
    assert "**/token" in lines or "examples/deploy" in lines


def test_the_image_is_made_by_the_commands_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- ci: demo -->\n```sh\n(.+) && \.venv/bin/(pccl demo)\n", readme)
    assert found, "the README's first command"
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert f"RUN {found[1]}\n" in text
    assert f"CMD {found[2].split()!r}\n".replace("'", '"') in text


@images
def test_images_run_as_somebody_without_rights(image: str) -> None:
    assert "\nUSER 10001:10001\n" in (ROOT / image).read_text(encoding="utf-8")
