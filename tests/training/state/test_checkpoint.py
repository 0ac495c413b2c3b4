"""Checkpoints: what is on the disk is whole, of one moment, and says what it is."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pccl
from pccl import Communicator, MasterNode
from pccl.training import SPSA, AsyncDiLoCo, CheckpointError, DiLoCo, ElasticSampler, SPSAOptions, latest_checkpoint
from pccl.training.state import checkpoint, tensor_file
from pccl.training.state.tensor_file import Contents, Entry
from tests.training.peers import Peer
from tests.training.state.saved import NOWHERE, at, names, new, steps, write_format_2

# One file.


def test_save_and_load(tmp_path: Path) -> None:
    diloco = at(7)
    diloco.save(tmp_path / "run")
    assert names(tmp_path / "run") == steps(7)
    again = new()
    assert again.load(tmp_path / "run")
    assert (again.revision, again.digest()) == (7, diloco.digest())
    one = tmp_path / "best.safetensors"
    at(8).save(one)
    at(9).save(one)
    assert again.load(one)
    assert again.digest() == at(9).digest()
    assert names(tmp_path) == ["best.safetensors", "run"]


def test_newest_checkpoint_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for revision in (3, 20, 11):
        at(revision).save(tmp_path)
    assert "newer than revision 11, and load would choose revision 20" in caplog.text
    caplog.set_level(logging.INFO, logger="pccl.training")
    again = new()
    again.load(tmp_path)
    assert again.revision == 20
    assert f"loaded {tmp_path / steps(20)[0]}, revision 20" in caplog.text
    assert latest_checkpoint(tmp_path) == tmp_path / steps(20)[0]
    assert again.load(tmp_path / steps(3)[0])
    assert again.digest() == at(3).digest()


def test_missing_checkpoint(tmp_path: Path) -> None:
    diloco = new()
    for path in (tmp_path, tmp_path / "none", tmp_path / "none.safetensors"):
        with pytest.raises(FileNotFoundError):
            diloco.load(path)
        assert diloco.load(path, missing_ok=True) is False
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "none") is None


def test_inner_state_round_trip(tmp_path: Path) -> None:
    state = {
        "a/b": [np.arange(3), (1, "x", None, b"y", 2.5)],
        "a": {"b": np.float16([[1], [2]]), 0: np.zeros((0, 3)), "0": np.array(True)},
        "complex": np.array([1 + 2j]),
        "time": np.array(["2026-01-01"], "M8[D]"),
        "transposed": np.arange(6).reshape(2, 3).T,
    }

    class Inner:
        loaded: Any = None

        def state_dict(self) -> Any:
            return state

        def load_state_dict(self, state: Any) -> None:
            self.loaded = state

    inner = Inner()
    for path in (tmp_path, tmp_path / "file.safetensors"):
        new(inner=inner).save(path)
        new(inner=inner).load(path)
        assert checkpoint.codec.encode(inner.loaded) == checkpoint.codec.encode(state)


def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    diloco = at(4)
    diloco.save(tmp_path)
    path = tmp_path / steps(4)[0]
    tensors = library.load_file(path)
    for name, array in diloco._model.items():
        np.testing.assert_array_equal(tensors[name], array)
    assert {name for name in tensors if not name.startswith("pccl/")} == diloco._model.keys()
    with library.safe_open(path, "np") as file:
        manifest = json.loads(file.metadata()["pccl"])
    assert (manifest["revision"], manifest["class"], manifest["version"]) == (4, "DiLoCo", pccl.__version__)


def test_files_with_flat_parameters_still_load(tmp_path: Path) -> None:
    """Format 2 named tensors after their paths, and DiLoCo saved its parameters as one vector."""
    diloco = at(4)
    state = {**diloco._snapshot().state, "parameters": diloco._parameters}
    path = tmp_path / steps(4)[0]
    write_format_2(path, "DiLoCo", 4, state, diloco._replica.layout)
    again = new()
    assert again.load(tmp_path)
    assert (again.revision, again.digest()) == (4, diloco.digest())


def test_damage_anywhere_is_found(tmp_path: Path) -> None:
    at(1).save(tmp_path)
    path = tmp_path / steps(1)[0]
    whole = path.read_bytes()
    diloco = new()
    before = diloco.digest()
    broken = [whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :] for at in range(0, len(whole), 7)]
    for content in [*broken, whole[:-1], whole + b"x", whole[:4], b"", b"no checkpoint at all"]:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{path.name} is damaged"):
            diloco.load(path)
        assert diloco.digest() == before
    path.write_bytes(broken[0])
    with pytest.raises(CheckpointError, match=f"{path.name} is damaged"):
        diloco.load(tmp_path)


def test_foreign_files_are_named(tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(CheckpointError, match=path.name) as caught:
            new().load(path)
        return str(caught.value)

    random = tmp_path / "random"
    random.write_bytes(np.random.default_rng(0).bytes(999))
    assert "it has no safetensors header" in refused(random)
    foreign = tmp_path / "foreign.safetensors"
    header = json.dumps({"weights": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    foreign.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    assert "is damaged or not a checkpoint of pccl.training" in refused(foreign)
    own = tmp_path / "own.safetensors"
    at(1).save(own)
    own.write_bytes(own.read_bytes()[:-10])
    assert "is damaged or truncated" in refused(own)
    own.write_bytes(own.read_bytes()[:100])
    assert "it ends within its header" in refused(own)
    folder = tmp_path / "folder.safetensors"
    folder.mkdir()
    assert "is a folder; give the file in it" in refused(folder)


@pytest.mark.parametrize("kind", [DiLoCo, AsyncDiLoCo, SPSA])
def test_load_is_all_or_nothing(tmp_path: Path, kind: Any) -> None:
    class Schedule:
        def __init__(self, step: int) -> None:
            self.step = step

        def state_dict(self) -> Any:
            return {"step": self.step}

        def load_state_dict(self, state: Any) -> None:
            self.step = state["step"]

    def shared(step: int, size: int) -> Any:
        options = {"options": SPSAOptions(1.0)} if kind is SPSA else {}
        schedule, sampler = Schedule(step), ElasticSampler(size)
        return new(kind, shared={"a schedule": schedule, "sampler": sampler}, **options), schedule

    other, _ = shared(17, 10)
    for array in other._model.values():
        array[...] = 7
    other._state.revision = 17
    other.save(tmp_path)
    training, schedule = shared(3, 11)
    before, values = training.digest(), {name: array.copy() for name, array in training._model.items()}
    with pytest.raises(CheckpointError, match=r"shared sampler rejects its saved state: .* dataset_size 10"):
        training.load(tmp_path)
    assert (training.revision, schedule.step, training.digest()) == (0, 3, before)
    for name, value in values.items():
        np.testing.assert_array_equal(training._model[name], value)


@pytest.mark.parametrize("kind", [DiLoCo, AsyncDiLoCo, SPSA])
def test_shared_objects_are_saved(tmp_path: Path, kind: Any) -> None:
    class Schedule:
        step = 0

        def state_dict(self) -> Any:
            return {"step": self.step}

        def load_state_dict(self, state: Any) -> None:
            self.step = state["step"]

    options = {"options": SPSAOptions(1.0)} if kind is SPSA else {}
    first, second = Schedule(), Schedule()
    first.step = 17
    trained = new(kind, shared={"schedule": first}, **options)
    trained.save(tmp_path)
    again = new(kind, shared={"schedule": second}, **options)
    again.load(tmp_path)
    assert second.step == 17
    assert again.digest() == trained.digest()


def test_another_model_class_run_or_version_is_refused(tmp_path: Path) -> None:
    at(1).save(tmp_path / "run")
    other = DiLoCo(Communicator(NOWHERE), {"weights": np.zeros((5, 7), np.float32)})
    with pytest.raises(CheckpointError, match=r"another model: it has 'weights \(7, 5\) float32', but this one has"):
        other.load(tmp_path / "run")
    with pytest.raises(CheckpointError, match="was saved by DiLoCo; this is SPSA"):
        new(SPSA, options=SPSAOptions(1.0)).load(tmp_path / "run")
    new(SPSA, options=SPSAOptions(1.0)).save(tmp_path / "spsa")
    with pytest.raises(CheckpointError, match=r"another run: it has 'SPSAOptions\(learning_rate=1.0,.* but this"):
        new(SPSA, options=SPSAOptions(2.0)).load(tmp_path / "spsa")
    path = tmp_path / "run" / steps(1)[0]
    contents = tensor_file.read(path)
    manifest = {**json.loads(contents.metadata["pccl"]), "format": 9, "version": "99.0"}
    tensor_file.write(path, Contents({"pccl": json.dumps(manifest)}, contents.entries))
    with pytest.raises(CheckpointError, match=rf"has format 9, from pccl 99.0; this is pccl {pccl.__version__}"):
        new().load(path)
    tensor_file.write(path, Contents({}, {"weights": Entry("U8", (3,), np.zeros(3, np.uint8))}))
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        new().load(path)


def test_asynchronous_diloco_goes_on_from_diloco(tmp_path: Path) -> None:
    at(3).save(tmp_path)
    later = new(AsyncDiLoCo, fragments=2)
    later.load(tmp_path)
    assert later.digest() == at(3).digest()


# Which are kept.


def test_keep_deletes_older_checkpoints_only(tmp_path: Path) -> None:
    own = tmp_path / "step-000000000.safetensors"
    tensor_file.write(own, Contents({}, {"weights": Entry("U8", (3,), np.zeros(3, np.uint8))}))
    others = ["step-000000001.txt", "step-1.safetensors", "step-000000001.rank-00000-of-00002.safetensors", "notes"]
    for name in others:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".notes.tmp").write_text("mine")
    for revision in (1, 2, 5, 7, 9):
        at(revision).save(tmp_path, keep=3)
    assert names(tmp_path) == sorted([*others, ".notes.tmp", own.name, *steps(5, 7, 9)])
    at(6).save(tmp_path, keep=1)  # gone back to an earlier one: what is newer stays
    assert names(tmp_path) == sorted([*others, ".notes.tmp", own.name, *steps(6, 7, 9)])


def test_other_histories_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def other(revision: int) -> Any:
        found = at(revision)
        found._replicated.history = 2
        return found

    for revision in (3, 4, 9):
        other(revision).save(tmp_path)
    for revision in (2, 4, 5, 10):
        at(revision).save(tmp_path, keep=1)
    moved = steps(4)[0].replace(".safetensors", ".other.safetensors")
    assert names(tmp_path) == sorted([*steps(3, 9, 10), moved])
    assert f"{tmp_path / steps(4)[0]} is from another run and was renamed to {moved}" in caplog.text
    again = new()
    assert again.load(tmp_path / moved)
    assert (again.digest(), again._replicated.history) == (other(4).digest(), 2)


def test_older_checkpoints_outlive_a_failed_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at(1).save(tmp_path, keep=1)

    def full(*_: object) -> None:
        raise OSError(28, "no space left")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="no space left"):
            at(2).save(tmp_path, keep=1)
    assert names(tmp_path) == steps(1)
    at(2).save(tmp_path, keep=1)
    assert names(tmp_path) == steps(2)


def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep 0 is not an integer of at least 1"):
        new().save(tmp_path, keep=0)
    with pytest.raises(ValueError, match=r"keep 2: .* must be a folder"):
        new().save(tmp_path / "one.safetensors", keep=2)

    class Odd:
        def state_dict(self) -> Any:
            return {"hooks": [len]}

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(ValueError, match=r"hooks/0"):
        new(inner=Odd()).save(tmp_path)
    assert names(tmp_path) == []


def test_load_after_join_is_refused(master: MasterNode, tmp_path: Path) -> None:
    peer = Peer(master.address, 0).enter()
    peer.diloco.save(tmp_path)
    with pytest.raises(pccl.PCCLError, match="call load before join") as caught:
        peer.diloco.load(tmp_path)
    assert caught.value.result is pccl.Result.INVALID_USAGE
    peer.close()
    peer.diloco.load(tmp_path)  # before `reconnect`
