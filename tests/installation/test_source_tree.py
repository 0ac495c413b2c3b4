"""The extension of a source tree: its own, or the one that is installed, or a sentence that says what to run."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pccl.runtime import extension

ROOT = Path(__file__).resolve().parents[2]
IMPORT = """
import sys
sys.meta_path = [each for each in sys.meta_path if "editable" not in repr(each)]
sys.path = [each for each in sys.path if each in ARGUMENTS or not __import__("os").path.isdir(each + "/pccl")]
import pccl.runtime.extension
assert pccl._native is sys.modules["pccl._native"]
print(pccl.__file__)
print(sys.modules["pccl._native"].__file__)
"""


def _tree(folder: Path) -> Path:
    """Make a source tree with as much of the package as loads the extension."""
    runtime = folder / "pccl" / "runtime"
    runtime.mkdir(parents=True)
    for package in (runtime.parent, runtime):
        (package / "__init__.py").touch()
    shutil.copy(str(extension.__file__), runtime)
    (folder / "bindings").mkdir()
    (folder / "bindings" / "build_native.py").touch()
    return folder


def _installed(folder: Path, *, interface: int = extension.ABI) -> Path:
    """Make a folder with an installed package whose extension is a stand-in."""
    (folder / "pccl").mkdir(parents=True)
    (folder / "pccl" / "__init__.py").touch()
    (folder / "pccl" / "_native.py").write_text(
        f"ffi = None\nclass lib:\n    PCCL_NATIVE_ABI = {interface}\n    pccl_native_abi = lambda: {interface}\n"
    )
    return folder


def _import(*path: Path) -> subprocess.CompletedProcess[str]:
    """Import the package that is first on this path, in a process of its own."""
    entries = [str(each) for each in path]
    code = f"import sys\nARGUMENTS = {entries!r}\nsys.path = ARGUMENTS + sys.path\n{IMPORT}"
    return subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, cwd=path[0])


def test_a_source_tree_takes_the_extension_that_is_installed(tmp_path: Path) -> None:
    tree, site = _tree(tmp_path / "clone"), _installed(tmp_path / "site")
    done = _import(tree, site)
    assert done.stdout.splitlines() == [str(tree / "pccl" / "__init__.py"), str(site / "pccl" / "_native.py")], done


def test_a_source_tree_with_an_extension_of_its_own_takes_that(tmp_path: Path) -> None:
    tree, site = _tree(tmp_path / "clone"), _installed(tmp_path / "site")
    own = shutil.copy(site / "pccl" / "_native.py", tree / "pccl")
    assert _import(tree, site).stdout.splitlines()[1] == str(own)


def test_without_an_extension_the_error_says_what_to_run(tmp_path: Path) -> None:
    tree = _tree(tmp_path / "clone")
    done = _import(tree)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: no C engine for pccl: {tree / 'pccl'} is a source tree, and pccl is not installed here. "
        f"Run: {sys.executable} -m pip install -e {tree}"
    )


@pytest.mark.parametrize("interface", [extension.ABI - 1, extension.ABI + 1])
def test_an_extension_of_another_interface_is_named(tmp_path: Path, interface: int) -> None:
    tree, site = _tree(tmp_path / "clone"), _installed(tmp_path / "site", interface=interface)
    last = _import(tree, site).stderr.splitlines()[-1]
    assert last == (
        f"ImportError: {site / 'pccl' / '_native.py'} was built for interface {interface}, but the pccl in "
        f"{tree / 'pccl'} needs {extension.ABI}. Run: {sys.executable} -m pip install -e {tree}"
    )


def test_what_is_missing_is_told_before_any_other_package_is_looked_for(tmp_path: Path) -> None:
    """`python3 -c 'import pccl'` in a fresh clone, with a Python without installed packages."""
    tree = _tree(tmp_path / "clone")
    shutil.copy(ROOT / "pccl" / "__init__.py", tree / "pccl")
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tree)!r}); import pccl"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.splitlines()[-1].endswith(f"Run: {sys.executable} -m pip install -e {tree}")
