"""The architecture of the C engine as a test: includes point down, and visible names are declared."""

from __future__ import annotations

import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

NATIVE = Path(__file__).resolve().parents[2] / "native"
SOURCES = NATIVE / "src"
HEADER = NATIVE / "include" / "pccl_native.h"

# From the bottom up: a layer may include itself and the layers below. A name stands for NAME.c and NAME.h, and with a
# star also for NAME_*.c and NAME_*.h, which are parts of the same component.
LAYERS = (
    "pccl_native base",
    "list os siphash simd fpenv fd_registry poller event_queue recorder pool dtype half dither folding crc32c",
    "table kernels reduce signs crypto heartbeat pacer growth driver bbr",
    "quant* frame udp_stream",
    "records tiling plans wire*",
    "op*",
    "fast_path host",
    "link",
    "conn* completion",
    "unexpected link_watch link_send",
    "egress open_ops",
    "links",
    "matching",
    "receiver",
    "core",
    "engine",
    "engines",
)


def _layer_names() -> dict[str, int]:
    return {name: number for number, layer in enumerate(LAYERS) for name in layer.split()}


def _module(stem: str) -> str:
    """Return the name in `LAYERS` that a file belongs to."""
    names = _layer_names()
    if stem in names:
        return stem
    starred = [name for name in names if name.endswith("*") and (stem == name[:-1] or stem.startswith(f"{name[:-1]}_"))]
    assert len(starred) == 1, f"{stem} is not in LAYERS"
    return starred[0]


def _code(path: Path) -> str:
    return re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def _files() -> list[Path]:
    return [HEADER, *sorted(SOURCES.glob("*.[ch]"))]


def _includes(path: Path) -> list[str]:
    """Return the project headers that a file includes, by their stems."""
    return re.findall(r'^#include "(\w+)\.h"', path.read_text(encoding="utf-8"), flags=re.MULTILINE)


def test_includes_point_down() -> None:
    layer = _layer_names()
    wrong = [
        f"{path.name} includes {included}.h"
        for path in _files()
        for included in _includes(path)
        if layer[_module(included)] > layer[_module(path.stem)]
    ]
    assert not wrong


def test_no_cycles() -> None:
    graph: dict[str, set[str]] = {}
    for path in _files():
        module = _module(path.stem)
        graph.setdefault(module, set()).update({_module(included) for included in _includes(path)} - {module})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(f"modules include each other: {error.args[1]}") from error
    headers = {path.stem: set(_includes(path)) for path in _files() if path.suffix == ".h"}
    TopologicalSorter(headers).prepare()


def test_every_layer_has_its_files() -> None:
    stems = {path.stem for path in _files()}
    assert {_module(stem) for stem in stems} == set(_layer_names())


def test_headers_open_with_their_names_and_what_they_are_for() -> None:
    headers = [HEADER, *SOURCES.glob("*.h"), *(NATIVE / "tests").glob("*.h")]
    assert [h.name for h in headers if not h.read_text(encoding="utf-8").startswith(f"/* {h.name}: ")] == []


def _declared(path: Path) -> set[str]:
    """Return the functions that a header declares but does not define."""
    text = re.sub(r"^#.*(?:\\\n.*)*", "", _code(path), flags=re.MULTILINE)
    text = re.sub(r"^(?:static|PCCL_INLINE)\b[^\n;{]*\{[^\n]*\}$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^(?:static|PCCL_INLINE)\b[^;{]*\{.*?^\}", "", text, flags=re.MULTILINE | re.DOTALL)
    declaration = r"^(?!typedef)[A-Za-z_][\w\s*]*?\b(\w+)\s*\([^;{]*\)(?:\s*PCCL_PRINTF\(\d, \d\))?;"
    return set(re.findall(declaration, text, flags=re.MULTILINE))


def _defined(path: Path) -> Iterator[str]:
    """Return the functions in a source file that other files can see."""
    for match in re.finditer(r"^([A-Za-z_][\w\s*]*?)\b(\w+)\([^;{}]*\)\s*\{", _code(path), re.MULTILINE):
        if not re.search(r"\bstatic\b|\bPCCL_INLINE\b", match.group(1)):
            yield match.group(2)


def test_what_is_visible_is_declared_and_has_the_prefix() -> None:
    defined = {name for path in SOURCES.glob("*.c") for name in _defined(path)}
    declared = {name for path in _files() if path.suffix == ".h" for name in _declared(path)}
    assert len(_declared(HEADER)) > 50
    assert {name for name in defined if not name.startswith("pccl_")} == set()
    assert defined - declared == set(), "visible, but not declared in a header"
    assert declared - defined == set(), "declared but not defined"
