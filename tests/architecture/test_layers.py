"""The architecture as a test: which parts may import which, what is exported, what `import pccl` costs."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import pccl

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "pccl"

# Names that scripts for the reference API import.
REFERENCE_NAMES = {
    *("Communicator", "MasterNode", "ReduceOp", "Attribute", "SharedStateSyncStrategy", "DataType"),
    *("DistributionHint", "QuantizationAlgorithm", "QuantizationOptions", "ReduceOperandDescriptor"),
    *("ReduceDescriptor", "ReduceOpDescriptor", "TensorInfo", "SharedState", "SharedStateSyncInfo"),
    *("ReduceInfo", "AsyncReduceHandle", "PCCLError", "Result"),
}
# The names that can be imported but are not in `__all__`.
REFERENCE_ONLY = {
    *("Attribute", "DistributionHint", "ReduceDescriptor", "ReduceOpDescriptor", "ReduceOperandDescriptor"),
    *("TensorInfo", "SharedStateSyncInfo"),
}
RARE_NAMES = {"ErrorFeedback", "InternalError", "Membership", "StateUnavailableError"}
OWN_NAMES = {
    *("AsyncCommunicator", "AsyncCollectiveHandle", "CollectiveInfo", "CommunicatorOptions", "ReduceAlgorithm"),
    *("MasterLostError", "MismatchError", "OpTimeoutError", "OutcomeUnknownError", "PeerLostError"),
    *("TooFewPeersError", "UsageError", "__version__"),
}
EXPORTED = REFERENCE_NAMES | OWN_NAMES | RARE_NAMES

# Top-level modules that users may import in addition to `pccl` itself; modules with an underscore are private. Scripts
# should import only from the folders in `PUBLIC_FOLDERS`.
PUBLIC_MODULES = {
    *(
        "async_communicator",
        "communicator",
        "errors",
        "flight_recorder",
        "handle",
        "logs",
        "master_node",
        "metrics",
        "otel",
    ),
    *("doctor", "security", "shared_state", "signs", "status", "types"),
}
PUBLIC_FOLDERS = {"training", "torch", "ray"}

# For each part of the package, the modules that it must not import, including anything below them.
FORBIDDEN = {
    "protocol": """trio socket time random threading select selectors asyncio ssl subprocess numpy cffi
        pccl._native pccl.runtime pccl.communicator pccl.cli pccl.training pccl.tools""",
    "runtime": "pccl.communicator pccl.devices pccl.cli pccl.training pccl.tools torch",
    "devices": "pccl.communicator pccl.async_communicator pccl._collectives pccl._arrays pccl.training trio torch",
    "web": """pccl.communicator pccl.master_node pccl.cli pccl.training pccl.tools
        pccl._native numpy torch""",
    "tools": "pccl.protocol pccl.runtime pccl._native pccl.cli trio",
    "torch": "pccl.training pccl.cli pccl.tools pccl._native trio",
}
# Parts built only on the public API: from pccl, they import public names, themselves and the modules listed here.
USERS_OF_THE_API = {
    "cli": [
        *("pccl.tools", "pccl.status", "pccl.logs", "pccl.trace"),
        *("pccl.flight_recorder", "pccl.doctor", "pccl.runtime.master.durable_state"),
    ],
    "trace": ["pccl.flight_recorder", "pccl.status"],
    "ray": ["pccl.status"],
    "tools": ["pccl.status", "pccl.training"],
    "training": ["pccl.signs", "pccl._floating_point", "pccl._integers", "pccl._waiting"],
}
# Folders of `pccl/runtime`, from the ground up: a folder imports from itself and from those before it.
RUNTIME_LAYERS = ["extension", "environment", "threads", "network", "data_plane", "state", "master", "session"]
# Folders that must not import each other, although one is listed before the other.
RUNTIME_UNRELATED = {"session": ["master"], "master": ["data_plane", "state"]}
# The same for `pccl/training`.
TRAINING_LAYERS = ["group", "state", "step", "data", "compression", "diloco", "ddp", "spsa", "comm_hooks"]
TRAINING_UNRELATED = {
    "data": ["state", "step"],
    "diloco": ["data"],
    "ddp": ["data", "diloco"],
    "spsa": ["data", "diloco", "ddp"],
    "comm_hooks": ["group", "state", "step", "data", "compression", "diloco", "spsa"],
}


def _modules(part: str) -> list[Path]:
    """Return the source files of `pccl/part/` or `pccl/part.py`."""
    return sorted((PACKAGE / part).rglob("*.py")) or sorted(PACKAGE.glob(f"{part}.py"))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def _imports(path: Path) -> list[tuple[int, str, str | None]]:
    """Return every import in a file, including those inside functions: line, module, and the imported name, if any."""
    found: list[tuple[int, str, str | None]] = []
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.append((node.lineno, alias.name, None))
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(filter(None, [base, node.module]))
            for alias in node.names:
                found.append((node.lineno, module, alias.name))
    return found


def _within(module: str, parents: list[str]) -> bool:
    return any(module == parent or module.startswith(f"{parent}.") for parent in parents)


@pytest.mark.parametrize("part", FORBIDDEN)
def test_imports_point_down(part: str) -> None:
    assert _modules(part)
    forbidden = FORBIDDEN[part].split()
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for path in _modules(part)
        for line, module, name in _imports(path)
        if _within(module, forbidden) or _within(f"{module}.{name}", forbidden)
    ]
    assert not wrong


def _of_pccl() -> dict[str, Path]:
    """Return every module of the package by its dotted name; a package stands for its `__init__`."""
    named = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


@pytest.mark.parametrize(
    ("part", "layers", "strangers"),
    [("runtime", RUNTIME_LAYERS, RUNTIME_UNRELATED), ("training", TRAINING_LAYERS, TRAINING_UNRELATED)],
    ids=["runtime", "training"],
)
def test_folders_import_downwards(part: str, layers: list[str], strangers: dict[str, list[str]]) -> None:
    wrong = []
    package = f"pccl.{part}"
    for name, path in _of_pccl().items():
        if not _within(name, [package]) or name == package:
            continue
        layer = name.split(".")[2]
        below = layers[: layers.index(layer) + 1]
        allowed = [f"{package}.{each}" for each in below if each not in strangers.get(layer, [])]
        wrong += [
            f"{path.relative_to(ROOT)}:{line} imports {taken or ''} from {module}"
            for line, module, taken in _imports(path)
            if _within(module, [package]) and not _within(f"{module}.{taken}" if taken else module, allowed)
        ]
    assert not wrong


def test_no_cycles() -> None:
    modules = _of_pccl()
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        taken = {f"{module}.{item}" if f"{module}.{item}" in modules else module for _, module, item in _imports(path)}
        graph[name] = (taken & set(modules)) - {name}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"an import cycle: {' -> '.join((*way[way.index(name) :], name))}"
        if name in done:
            return
        for each in sorted(graph[name]):
            visit(each, (*way, name))
        done.add(name)

    for name in sorted(graph):
        visit(name, ())


@pytest.mark.parametrize("part", USERS_OF_THE_API)
def test_users_of_the_api_use_nothing_else(part: str) -> None:
    allowed = [f"pccl.{part}", *USERS_OF_THE_API[part]]
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name or ''} from {module}"
        for path in _modules(part)
        for line, module, name in _imports(path)
        if _within(module, ["pccl"])
        and not (_within(module, allowed) or _within(f"{module}.{name}", allowed))
        and not (module == "pccl" and (name is None or name in EXPORTED))
    ]
    assert not wrong


def test_the_extension_is_loaded_where_it_is_checked() -> None:
    users = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        for _, module, name in _imports(path)
        if _within(module, ["pccl._native"]) or _within(f"{module}.{name}", ["pccl._native"])
    }
    assert users == {"runtime/extension.py"}


def test_examples_use_the_public_api() -> None:
    wrong = [
        f"{path.name}:{line} imports {name or ''} from {module}"
        for path in sorted((ROOT / "examples").glob("*.py"))
        for line, module, name in _imports(path)
        if _within(module, ["pccl"])
        and not _within(module, [f"pccl.{folder}" for folder in PUBLIC_FOLDERS])
        and not (module == "pccl" and (name is None or name in EXPORTED))
    ]
    assert not wrong


def test_exported_names() -> None:
    assert len(REFERENCE_NAMES) == 19
    assert sorted(pccl.__all__) == sorted((REFERENCE_NAMES - REFERENCE_ONLY) | OWN_NAMES)
    for name in EXPORTED:
        assert getattr(pccl, name) is not None


def test_public_modules_are_those_without_an_underscore() -> None:
    found = {path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("_")}
    assert found == PUBLIC_MODULES


def test_documentation_imports_public_modules_only() -> None:
    allowed = [f"pccl.{name}" for name in PUBLIC_MODULES | PUBLIC_FOLDERS]
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.py"))]
    wrong = [
        f"{path.relative_to(ROOT)} imports {module}"
        for path in documents
        for module in re.findall(r"^\s*(?:from|import) (pccl\.[\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if not _within(module, allowed)
    ]
    assert not wrong


def test_import_loads_no_optional_dependency() -> None:
    code = (
        "import sys, pccl\n"
        "for name in pccl.__all__:\n"
        "    getattr(pccl, name)\n"
        "optional = {'torch', 'jax', 'ray', 'matplotlib', 'rich', 'h11', 'prometheus_client', 'opentelemetry'}\n"
        "print(*sorted(optional & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT)) for path in sorted(PACKAGE.rglob("*.py")) if not ast.get_docstring(_tree(path))
    ]
    assert not silent
