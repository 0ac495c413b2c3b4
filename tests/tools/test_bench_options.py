"""Options of `pccl bench`: spellings, refusals, and how a plan becomes cases and a table."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from pccl import DataType, QuantizationAlgorithm, QuantizationOptions
from pccl.cli import main
from pccl.tools.bench.cases import Memory
from pccl.tools.bench.plan import GLOO, RAW_RING, Plan, cases, parse_quantization
from pccl.tools.bench.report import Row, Timing, print_table, rows_table
from pccl.tools.report import ToolError

MIN_MAX, ZERO_POINT_SCALE = QuantizationAlgorithm.MIN_MAX, QuantizationAlgorithm.ZERO_POINT_SCALE
CAST = QuantizationAlgorithm.CAST
PLAN = Plan(
    peers=[2],
    connections=[0],
    sizes_bytes=[4096],
    tensors=[1],
    quantizations=["none"],
    algorithms=["auto"],
    dtype="float32",
    in_place=True,
    rulers=[RAW_RING],
    memory=False,
    iterations=20,
    warmup=3,
)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("none", None),
        ("min-max", QuantizationOptions()),
        ("min-max:int8", QuantizationOptions(DataType.INT8)),
        ("min-max:uint16:block=64", QuantizationOptions(DataType.UINT16, block_size=64)),
        ("zero-point-scale", QuantizationOptions(algorithm=ZERO_POINT_SCALE)),
        ("zero-point-scale:int4:block=128", QuantizationOptions(DataType.INT8, ZERO_POINT_SCALE, 128, bits=4)),
        ("lloyd-max", QuantizationOptions(algorithm=QuantizationAlgorithm.LLOYD_MAX)),
        ("sign:block=128", QuantizationOptions(algorithm=QuantizationAlgorithm.SIGN, block_size=128)),
        ("min-max:uint4:seed=7:stochastic", QuantizationOptions(bits=4, stochastic=True, seed=7)),
        ("cast:bfloat16", QuantizationOptions(DataType.BFLOAT16, CAST)),
        ("cast:float16:stochastic", QuantizationOptions(DataType.FLOAT16, CAST, stochastic=True)),
    ],
)
def test_quantizations(text: str, options: QuantizationOptions | None) -> None:
    assert parse_quantization(text) == options


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("median", "does not begin with one of none, min-max"),
        ("", "does not begin with one of"),
        ("none:uint8", "'none' takes no options"),
        ("min-max:float32", "'float32' is neither"),
        ("min-max:block=", "'block=' is neither"),
        ("min-max:block=-8", "'block=-8' is neither"),
        ("min-max:stochastic=1", "'stochastic=1' is neither"),
        ("min-max:uint8:int8", "type is given twice"),
        ("min-max:block=8:block=8", "block is given twice"),
        ("min-max:block=7", "block_size must be .*, not 7"),
        ("min-max:bfloat16", "must be one of UINT8"),
        ("cast", "the type is missing"),
        ("cast:uint8", "must be one of FLOAT16"),
        ("cast:float16:block=64", "CAST has no blocks"),
    ],
)
def test_invalid_quantizations(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        parse_quantization(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"sizes_bytes": [4], "tensors": [2]}, "4 bytes cannot be cut into 2 tensors of float32"),
        ({"dtype": "int32", "quantizations": ["none", "min-max"]}, "--quantize min-max: only float tensors"),
        ({"dtype": "float16", "quantizations": ["cast:bfloat16"]}, "--quantize cast:bfloat16: a CAST of FLOAT16"),
        ({"collectives": ["all_gather"], "tensors": [1, 2]}, "--tensors and --quantize apply only to all_reduce"),
        ({"collectives": ["all_gather"], "peers": [3], "sizes_bytes": [8]}, "2 elements cannot be divided among 3"),
    ],
)
def test_impossible_plans(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ToolError, match=complaint):
        cases(msgspec.structs.replace(PLAN, **change))


def test_combinations() -> None:
    plan = msgspec.structs.replace(
        PLAN, peers=[2, 3], tensors=[1, 2], quantizations=["none", "min-max"], algorithms=["ring", "direct"]
    )
    found = [(case.tensors, case.quantization, case.algorithm) for case in cases(plan)]
    assert found == list(itertools.product([1, 2], ["none", "min-max"], ["ring", "direct"]))
    assert plan.rows == len(plan.peers) * len(found)


def test_pause_of_all_cases() -> None:
    plan = msgspec.structs.replace(PLAN, sizes_bytes=[4096, 8192], pause_s=2.5)
    assert [case.pause_s for case in cases(plan)] == [2.5, 2.5]


def test_gloo_without_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["bench", "--against", "gloo"]) == 1
    why = "--against gloo needs torch: pip install '.[torch]' in a clone of pccl"
    assert capsys.readouterr().err == f"pccl bench: {why}\n"


@pytest.mark.parametrize("module", ["matplotlib", "matplotlib.backends.backend_agg"])
def test_plot_without_matplotlib(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for loaded in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    assert main(["demo", "--plot", str(tmp_path / "bench.png")]) == 1
    assert "pip install '.[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "complaint"), [("bench.spreadsheet", "not a known kind of image"), ("nowhere/bench.png", "does not exist")]
)
def test_invalid_plot_files(name: str, complaint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert main(["demo", "--plot", str(tmp_path / name)]) == 1
    assert complaint in capsys.readouterr().err


TIMING = Timing(median_s=0.12345, p95_s=0.98765, algorithm_bytes_per_s=12.3e9, bus_bytes_per_s=23.4e9)


def _row(**changes: Any) -> Row:
    row = Row(
        peers=2,
        connections=0,
        bytes=64 << 20,
        tensors=1,
        quantization="none",
        algorithm="auto",
        pccl=TIMING,
        raw_ring=TIMING,
        gloo=TIMING,
        per_cent_of_raw_ring=100.0,
        times_as_fast_as_gloo=1.0,
        memory=Memory(100 << 20, 100 << 20),
    )
    return msgspec.structs.replace(row, **changes)


def _printed(plan: Plan, *rows: Row) -> list[str]:
    console = Console(width=80)
    with console.capture() as capture:
        print_table(rows_table(plan, rows), console)
    lines = capture.get().splitlines()
    assert not any("…" in line for line in lines)
    return lines


def test_table_columns() -> None:
    rows = [_row(), _row(connections=8, tensors=16, quantization="min-max:int4:block=64", algorithm="direct")]
    lines = _printed(msgspec.structs.replace(PLAN, in_place=False), *rows)
    assert lines[0].strip() == "all-reduce of float32, 2 peers, out of place, 20 iterations"
    header = " ".join(lines[1:3]).split()
    assert {"conns", "tensors", "quantized", "algo"} <= set(header)
    assert "peers" not in header


def test_table_fits_80_characters() -> None:
    plan = msgspec.structs.replace(PLAN, rulers=[RAW_RING, GLOO], memory=True)
    lines = _printed(plan, _row(bytes=256 << 20), _row(bytes=256 << 20, peers=4))
    assert max(map(len, lines)) <= 80
    assert lines[-1].split() == [
        *("4", "256", "MiB", "123.5", "ms", "987.6", "ms", "12300", "23400"),
        *("123.5", "ms", "100", "123.5", "ms", "1.00", "100", "MiB"),
    ]
