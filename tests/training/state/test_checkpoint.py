"""Checkpoints: what is on the disk is whole, of one moment, and says what it is."""

from __future__ import annotations

import fcntl
import gc
import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

import pccl
from pccl import Communicator, MasterNode
from pccl.training import (
    SPSA,
    AsyncDiLoCo,
    CheckpointError,
    DiLoCo,
    ElasticSampler,
    Site,
    SPSAOptions,
    latest_checkpoint,
)
from pccl.training.state import checkpoint, tensor_file, tensor_tree
from pccl.training.state.checkpoint import Checkpoints
from pccl.training.state.tensor_file import Contents, Entry
from tests.support.cluster import Background, together
from tests.training.group.test_site import Inner
from tests.training.peers import Peer, assert_parity, crew_of, each_runs, new_model

NOWHERE = "127.0.0.1:1"


def new(kind: Any = DiLoCo, **options: Any) -> Any:
    return kind(Communicator(NOWHERE), new_model(), **options)


def at(revision: int, **options: Any) -> Any:
    """A DiLoCo that is as after so many outer steps."""
    diloco = new(**options)
    for array in diloco._model.values():
        array += np.float32(revision)
    diloco._state.revision = revision
    return diloco


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps(*revisions: int) -> list[str]:
    return [f"step-{revision:09d}.safetensors" for revision in revisions]


# One file.


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    diloco = at(7)
    diloco.save(tmp_path / "run")
    assert names(tmp_path / "run") == steps(7)
    again = new()
    assert again.load(tmp_path / "run")
    assert (again.revision, again.digest()) == (7, diloco.digest())
    for name in ("best.safetensors", "former.npz"):
        at(8).save(tmp_path / name)
        at(9).save(tmp_path / name)
        assert again.load(tmp_path / name)
        assert again.digest() == at(9).digest()
    assert names(tmp_path) == ["best.safetensors", "former.npz", "run"]


def test_the_newest_of_a_folder_is_loaded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for revision in (3, 20, 11):
        at(revision).save(tmp_path)
    assert "newer than revision 11, of which 20 will be loaded" in caplog.text
    caplog.set_level(logging.INFO, logger="pccl.training")
    again = new()
    again.load(tmp_path)
    assert again.revision == 20
    assert f"loaded {tmp_path / steps(20)[0]}, revision 20" in caplog.text
    assert latest_checkpoint(tmp_path) == tmp_path / steps(20)[0]
    assert again.load(tmp_path / steps(3)[0])
    assert again.digest() == at(3).digest()


def test_where_nothing_is(tmp_path: Path) -> None:
    diloco = new()
    for path in (tmp_path, tmp_path / "none", tmp_path / "none.safetensors"):
        with pytest.raises(FileNotFoundError):
            diloco.load(path)
        assert diloco.load(path, missing_ok=True) is False
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "none") is None


def test_what_was_loaded_into_the_model_is_what_is_saved(tmp_path: Path) -> None:
    model = new_model()
    diloco = DiLoCo(Communicator(NOWHERE), model)
    for array in model.values():
        array[...] = 7
    assert (diloco.outer_state()["parameters"] == 7).all()
    diloco.save(tmp_path)
    loaded = new_model()
    DiLoCo(Communicator(NOWHERE), loaded).load(tmp_path)
    assert all((array == 7).all() for array in loaded.values())


def test_a_save_goes_where_it_was_told_when_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    real = Checkpoints._write

    def late(*arguments: Any) -> None:
        os.chdir(tmp_path / "there")
        real(*arguments)

    monkeypatch.setattr(Checkpoints, "_write", late)
    diloco = at(1)
    diloco.save("peer", background=True)
    diloco.wait_for_save()
    assert names(tmp_path / "here" / "peer") == steps(1)
    assert names(tmp_path / "there") == []


def test_any_state_beside_the_model_comes_back(tmp_path: Path) -> None:
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
    for path in (tmp_path, tmp_path / "file.npz"):
        new(inner=inner).save(path)
        new(inner=inner).load(path)
        assert checkpoint.codec.encode(inner.loaded) == checkpoint.codec.encode(state)


def test_the_safetensors_library_reads_it(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    diloco = at(4)
    diloco.save(tmp_path)
    path = tmp_path / steps(4)[0]
    np.testing.assert_array_equal(library.load_file(path)["parameters"], diloco.outer_parameters)
    with library.safe_open(path, "np") as file:
        manifest = json.loads(file.metadata()["pccl"])
    assert (manifest["revision"], manifest["class"], manifest["version"]) == (4, "DiLoCo", pccl.__version__)


@pytest.mark.parametrize("foreign", [{"format": [1, 2]}, {"format": 1.0}, {"format": 1, "revision": [1, 2]}])
def test_numbers_of_another_programs_npz_are_none_of_a_checkpoint(tmp_path: Path, foreign: dict[str, Any]) -> None:
    np.savez(tmp_path / "theirs.npz", **foreign)
    with pytest.raises(CheckpointError, match=r"is no checkpoint: pccl\.training has not written it"):
        new().load(tmp_path / "theirs.npz")


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


def test_files_of_others_are_told_as_what_they_are(tmp_path: Path) -> None:
    def refused(path: Path) -> str:
        with pytest.raises(CheckpointError, match=path.name) as caught:
            new().load(path)
        return str(caught.value)

    of_torch = tmp_path / "model.pt"
    with zipfile.ZipFile(of_torch, "w") as archive:
        archive.writestr("model/data.pkl", b"")
    assert "it is what torch.save writes; read it by torch.load" in refused(of_torch)
    of_torch.write_bytes(pickle.dumps({"weights": [1.0]}, protocol=2))
    assert "it is what torch.save writes" in refused(of_torch)
    random = tmp_path / "random"
    random.write_bytes(np.random.default_rng(0).bytes(999))
    assert "begins neither as a safetensors file nor as an npz" in refused(random)
    foreign = tmp_path / "foreign.safetensors"
    header = json.dumps({"weights": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    foreign.write_bytes(len(header).to_bytes(8, "little") + header + b"x")
    assert "it is a safetensors file of another program; read it by safetensors.torch.load_file" in refused(foreign)
    own = tmp_path / "own.safetensors"
    at(1).save(own)
    own.write_bytes(own.read_bytes()[:-10])
    assert "is damaged: it is cut off, 10 bytes before its end; take another checkpoint" in refused(own)
    own.write_bytes(own.read_bytes()[:100])
    assert "it ends within the header of a safetensors file, after 100 bytes" in refused(own)
    folder = tmp_path / "folder.safetensors"
    folder.mkdir()
    assert "is a folder, though its name ends as that of a file does" in refused(folder)


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_a_file_of_which_bytes_were_changed_is_refused_or_the_same(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    at(1).save(path)
    whole = path.read_bytes()
    diloco = at(1)
    before = diloco.digest()
    random = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        content = np.frombuffer(whole, np.uint8).copy()
        places = random.integers(0, len(whole), int(random.integers(1, 8)))
        content[places] = random.choice([0, 255, 48, random.integers(256)], len(places))
        path.write_bytes(content.tobytes()[: len(whole) if random.random() < 0.8 else random.integers(len(whole))])
        try:
            diloco.load(path)
        except CheckpointError:
            refused += 1
        assert diloco.digest() == before
    assert refused > 200
    path.write_bytes((1 << 16).to_bytes(8, "little") + b"[" * (1 << 16))
    with pytest.raises(CheckpointError, match="is damaged or no checkpoint"):
        diloco.load(path)


@pytest.mark.parametrize("kind", [DiLoCo, AsyncDiLoCo, SPSA])
def test_nothing_is_loaded_where_a_shared_object_refuses(tmp_path: Path, kind: Any) -> None:
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
    with pytest.raises(CheckpointError, match=r"shared sampler does not take what was saved of it: .* dataset_size 10"):
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
    with pytest.raises(CheckpointError, match=r"another model: it has 'weights \(7, 5\) float32' where this one has"):
        other.load(tmp_path / "run")
    with pytest.raises(CheckpointError, match="was saved by DiLoCo; this is SPSA"):
        new(SPSA, options=SPSAOptions(1.0)).load(tmp_path / "run")
    new(SPSA, options=SPSAOptions(1.0)).save(tmp_path / "spsa")
    with pytest.raises(CheckpointError, match=r"another run: it has 'SPSAOptions\(learning_rate=1.0,.* where this"):
        new(SPSA, options=SPSAOptions(2.0)).load(tmp_path / "spsa")
    path = tmp_path / "run" / steps(1)[0]
    contents = tensor_file.read(path)
    manifest = {**json.loads(contents.metadata["pccl"]), "format": 9, "version": "99.0"}
    tensor_file.write(path, Contents({"pccl": json.dumps(manifest)}, contents.entries))
    with pytest.raises(CheckpointError, match=rf"has format 9, of pccl 99.0; this is pccl {pccl.__version__}"):
        new().load(path)
    tensor_file.write(path, Contents({}, {"weights": Entry("U8", (3,), np.zeros(3, np.uint8))}))
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        new().load(path)


def test_asynchronous_diloco_goes_on_from_diloco(tmp_path: Path) -> None:
    at(3).save(tmp_path)
    later = new(AsyncDiLoCo, fragments=2)
    later.load(tmp_path)
    assert later.digest() == at(3).digest()


# Files of former versions.


def test_an_npz_of_a_former_version_is_loaded(tmp_path: Path) -> None:
    diloco = at(5)
    inner = {"moments": np.arange(3.0), "steps": np.array(17)}
    file = tmp_path / "inner"
    with file.open("wb") as out:
        np.savez(out, **inner)
    with (tmp_path / "checkpoint").open("wb") as out:
        np.savez(
            out,
            format=1,
            parameters=diloco.outer_parameters,
            momentum=diloco._momentum,
            revision=np.int64(5),
            layout=np.frombuffer(diloco._replica.layout.encode(), np.uint8),
            inner=np.frombuffer(file.read_bytes(), np.uint8),
        )

    class Inner:
        def state_dict(self) -> Any:
            return inner

        def load_state_dict(self, state: Any) -> None:
            assert (state["moments"].tolist(), int(state["steps"])) == ([0, 1, 2], 17)

    again = new(inner=Inner())
    again.load(tmp_path / "checkpoint")
    assert again.digest() == diloco.digest()
    again.save(tmp_path / "checkpoint")  # where a file is, it stays one
    assert (tmp_path / "checkpoint").is_file()
    again.load(tmp_path / "checkpoint")
    with pytest.raises(CheckpointError, match="of another model"):
        DiLoCo(Communicator(NOWHERE), {"weights": np.zeros(3)}).load(tmp_path / "checkpoint")


def test_an_npz_of_a_former_spsa_is_loaded(tmp_path: Path) -> None:
    spsa = new(SPSA, options=SPSAOptions(1.0))
    tensors = {f"tensor/{name}": tensor.numpy() + np.float32(1) for name, tensor in spsa._tensors.items()}
    run = np.frombuffer(spsa._former_run.encode(), np.uint8)
    with (tmp_path / "c").open("wb") as out:
        np.savez(out, format=1, run=run, revision=np.int64(5), exponents=spsa._grid.exponents, **tensors)
    again = new(SPSA, options=SPSAOptions(1.0))
    again.load(tmp_path / "c")
    assert again.revision == 5
    for name, tensor in again._tensors.items():
        np.testing.assert_array_equal(tensor.numpy(), tensors[f"tensor/{name}"])
    with pytest.raises(CheckpointError, match="of another run"):
        new(SPSA, options=SPSAOptions(2.0)).load(tmp_path / "c")


# Which are kept.


def test_the_newest_are_kept_and_nothing_else_is_touched(tmp_path: Path) -> None:
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


def test_older_ones_are_deleted_only_when_the_new_one_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(ValueError, match="keep 0: must be at least 1"):
        new().save(tmp_path, keep=0)
    with pytest.raises(ValueError, match="keep 2 needs a folder"):
        new().save(tmp_path / "one.npz", keep=2)

    class Odd:
        def state_dict(self) -> Any:
            return {"hooks": [len]}

        def load_state_dict(self, state: Any) -> None: ...

    with pytest.raises(ValueError, match=r"\['hooks'\]\[0\]"):
        new(inner=Odd()).save(tmp_path)
    assert names(tmp_path) == []


def test_two_processes_with_one_folder_are_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    for _ in range(2):
        at(1).save(tmp_path)
    os.close(other)
    assert caplog.text.count(f"another process saves into {tmp_path} too") == 1


def test_who_has_joined_does_not_load(master: MasterNode, tmp_path: Path) -> None:
    peer = Peer(master.address, 0).enter()
    peer.diloco.save(tmp_path)
    with pytest.raises(pccl.PCCLError, match="call load before join") as caught:
        peer.diloco.load(tmp_path)
    assert caught.value.result is pccl.Result.INVALID_USAGE
    peer.close()
    peer.diloco.load(tmp_path)  # before `reconnect`


# In the background.


class Gate:
    """A stand-in for `os.fsync`: its callers wait until it is opened."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self._fsync = os.fsync
        self.threads: list[threading.Thread] = []

    def __call__(self, descriptor: int) -> None:
        self.threads.append(threading.current_thread())
        self.reached.set()
        assert self.opened.wait(60)
        self._fsync(descriptor)


def test_steps_go_on_while_the_disk_is_busy(
    master: MasterNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    monkeypatch.setattr("os.fsync", gate)
    peer = Peer(master.address, 1).enter().run(2)
    saved = peer.diloco.digest()
    peer.diloco.save(tmp_path, keep=1, background=True)
    assert gate.reached.wait(60)
    peer.run(4)  # the model has gone on, and nothing is on the disk yet
    assert latest_checkpoint(tmp_path) is None
    second = Background(partial(peer.diloco.save, tmp_path, keep=1, background=True))
    gate.opened.set()
    second.result()
    again = new()
    again.load(tmp_path)
    assert again.digest() in (saved, peer.diloco.digest())
    peer.diloco.wait_for_save()
    again.load(tmp_path)
    assert again.digest() == peer.diloco.digest() != saved
    assert names(tmp_path) == steps(4)
    assert threading.current_thread() not in gate.threads
    assert not any(thread.daemon for thread in gate.threads)
    peer.close()


def test_what_is_written_is_the_state_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setattr("os.fsync", gate)
    diloco = at(1)
    before = diloco.digest()
    diloco.save(tmp_path, background=True)
    for array in diloco._model.values():
        array += 1
    gate.opened.set()
    diloco.wait_for_save()
    again = new()
    again.load(tmp_path)
    assert again.digest() == before


def test_the_copies_memory_is_used_again() -> None:
    memory = tensor_tree.HostMemory()
    tensors = {"a": np.arange(6.0).reshape(2, 3).T, "b": np.array(1), "big": np.arange(3, dtype=">i4")}
    first = memory.copies(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(first[name].array(), array)
    second = memory.copies(tensors)
    assert all(np.shares_memory(first[name].data, second[name].data) for name in tensors)
    third = memory.copies({"a": np.zeros(4)})
    assert third["a"].array().tolist() == [0, 0, 0, 0]


def test_what_fails_in_the_background_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "no space left")

    diloco = at(1)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        diloco.save(tmp_path, background=True)
        with pytest.raises(OSError, match="no space left"):
            diloco.wait_for_save()
        diloco.wait_for_save()  # once
        diloco.save(tmp_path, background=True)
        with pytest.raises(OSError, match="no space left"):
            diloco.save(tmp_path, background=True)
    assert "step-000000001.safetensors failed, which the next save will raise: OSError(28" in caplog.text
    assert names(tmp_path) == []
    diloco.save(tmp_path, background=True)
    diloco.wait_for_save()
    assert names(tmp_path) == steps(1)


def test_a_program_that_ends_has_saved(tmp_path: Path) -> None:
    code = """if True:
        import os, sys, time
        import numpy as np
        from pccl import Communicator
        from pccl.training import DiLoCo
        fsync = os.fsync
        os.fsync = lambda descriptor: (time.sleep(0.2), fsync(descriptor))
        diloco = DiLoCo(Communicator("127.0.0.1:1"), {"weights": np.arange(5.0)})
        diloco.save(sys.argv[1], background=True)
        raise KeyboardInterrupt
    """
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert "KeyboardInterrupt" in done.stderr
    assert names(tmp_path) == steps(0)
    again = DiLoCo(Communicator(NOWHERE), {"weights": np.zeros(5)})
    again.load(tmp_path)
    assert again.outer_parameters.tolist() == [0, 1, 2, 3, 4]


# Kills.


def test_who_is_killed_while_it_saves_leaves_whole_checkpoints(tmp_path: Path) -> None:
    """A process is killed before each call that it makes of C, of which writes, flushes and renames are some."""
    command = [sys.executable, "-m", "tests.training.state.checkpoint_kills", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    kills, older, newer = json.loads(done.stdout)
    assert kills > 50
    assert older > 0
    assert newer > 0
    assert names(tmp_path) == steps(kills + 1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that was just being opened
def test_an_interrupt_at_any_call_leaves_whole_checkpoints(tmp_path: Path) -> None:
    at(1).save(tmp_path, keep=1)
    call = older = newer = 0
    while True:
        calls = 0

        def interrupt(frame: FrameType, event: str, _: Any, call: int = call) -> None:
            nonlocal calls
            if event == "c_call" and frame.f_code.co_filename in (checkpoint.__file__, tensor_file.__file__):
                calls += 1
                if calls == call + 1:
                    raise KeyboardInterrupt

        diloco = at(call + 2)
        sys.setprofile(interrupt)
        try:
            diloco.save(tmp_path, keep=1)
        except KeyboardInterrupt:
            call += 1
        else:
            break
        finally:
            sys.setprofile(None)
        again = new()
        again.load(tmp_path)
        assert again.digest() == at(again.revision).digest()
        assert again.revision in (call, call + 1)
        older, newer = older + (again.revision == call), newer + (again.revision > call)
        del diloco
        at(call + 1).save(tmp_path, keep=1)
        assert names(tmp_path) == steps(call + 1)
    assert min(older, newer) > 0
    gc.collect()


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_goes_on(tmp_path: Path) -> None:
    """It saves after every step in the background, and each process that follows begins where it can."""
    code = """if True:
        import sys
        import numpy as np
        from pccl import Communicator, MasterNode
        from pccl.training import DiLoCo
        with MasterNode("127.0.0.1:0") as master, Communicator(master.address) as communicator:
            model = {"weights": np.zeros(300_000)}
            diloco = DiLoCo(communicator, model)
            diloco.load(sys.argv[1], missing_ok=True)
            assert (diloco.outer_parameters == diloco.outer_parameters[0]).all()
            diloco.join()
            while True:
                model["weights"] += 1
                diloco.outer_step()
                diloco.save(sys.argv[1], keep=2, background=True)
                print(diloco.revision, flush=True)
    """
    random = np.random.default_rng(0)
    saved = 0
    for _ in range(12):
        command = [sys.executable, "-c", code, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = last = int(process.stdout.readline())
            assert first >= max(saved, 1)  # the last but one was on the disk when the last one was begun
            for _ in range(int(random.integers(2, 30))):
                last = int(process.stdout.readline())
            time.sleep(random.uniform(0, 0.02))  # into the middle of saving
            process.kill()
        saved = last - 1
        assert len([name for name in names(tmp_path) if name.endswith(".safetensors")]) <= 3
    assert saved > 12


# Sites.


def site_of(*revisions: int, ranks: int | None = None, name: str = "site") -> list[Any]:
    """A DiLoCo for each rank, at these revisions."""
    inner = Inner(len(revisions))
    sites = [Site(name, rank, ranks or len(revisions), inner.agree) for rank in range(len(revisions))]
    return [at(revision, site=site) for revision, site in zip(revisions, sites, strict=True)]


def each(ranks: list[Any], method: str, *args: Any, **options: Any) -> list[Any]:
    return together([partial(getattr(rank, method), *args, **options) for rank in ranks])


def refusals(ranks: list[Any], call: Callable[[Any, int], Any]) -> list[str]:
    def refused(rank: Any, number: int) -> str:
        before = rank.digest()
        with pytest.raises(CheckpointError) as caught:
            call(rank, number)
        assert rank.digest() == before
        return str(caught.value)

    return together([partial(refused, rank, number) for number, rank in enumerate(ranks)])


def test_the_ranks_of_a_site_load_the_newest_step_that_all_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = site_of(0, 0)
    for revision in (1, 2, 3):
        for rank in ranks:
            rank._state.revision = revision
        each(ranks, "save", tmp_path, keep=2)
    assert names(tmp_path) == [f"step-{i:09d}.rank-{rank:05d}-of-00002.safetensors" for i in (2, 3) for rank in (0, 1)]
    (tmp_path / "step-000000003.rank-00001-of-00002.safetensors").unlink()  # killed before it saved
    again = site_of(0, 0, name="another start")
    assert each(again, "load", tmp_path) == [True, True]
    assert [rank.revision for rank in again] == [2, 2]
    assert "revision 2 is the newest that all ranks of this site have: rank 0 has 2, 3; rank 1 has 2" in caplog.text


def test_pieces_of_different_steps_are_refused_with_an_account(tmp_path: Path) -> None:
    for form in ("{}.npz", "{}.safetensors", "folder-{}"):
        paths = [tmp_path / form.format(rank) for rank in range(2)]
        for rank, path in zip(site_of(3, 5), paths, strict=True):
            rank.save(path)
        told = refusals(site_of(0, 0), lambda rank, number, paths=paths: rank.load(paths[number]))  # type: ignore[misc]
        for text in told:
            assert "the ranks of this site have no step in common" in text
            assert "rank 0 has 3; rank 1 has 5" in text


def test_pieces_of_one_revision_saved_at_different_times_are_refused(tmp_path: Path) -> None:
    for number, ranks in enumerate((site_of(4, 4, name="first"), site_of(4, 4, name="second"))):
        ranks[number].save(tmp_path)
    for text in refusals(site_of(0, 0), lambda rank, _: rank.load(tmp_path)):
        assert "rank 0 has 4; rank 1 has 4 (revision 4 was saved by the ranks at different times)" in text


def test_a_rank_without_a_piece_or_with_a_damaged_one_fails_on_all(tmp_path: Path) -> None:
    ranks = site_of(4, 4)
    assert each(ranks, "load", tmp_path, missing_ok=True) == [False, False]
    each(ranks, "save", tmp_path)
    path = tmp_path / "step-000000004.rank-00001-of-00002.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    for text in refusals(site_of(0, 0), lambda rank, _: rank.load(tmp_path)):
        assert f"{path.name} is damaged" in text
    path.unlink()
    for missing_ok in (False, True):
        for text in refusals(site_of(0, 0), lambda rank, _, ok=missing_ok: rank.load(tmp_path, missing_ok=ok)):  # type: ignore[misc]
            assert "rank 0 has 4; rank 1 has none" in text
    path.write_bytes(whole)
    other = path.with_name("step-000000004.rank-00000-of-00002.safetensors")
    for text in refusals(site_of(0, 0), lambda rank, _: rank.load(path if rank._site.rank == 0 else other)):
        assert "is the piece of rank 1 of 2; this is rank 0 of 2" in text
    with pytest.raises(
        FileNotFoundError, match=r"it holds step-000000004\.rank-00001-of-00002\.safetensors, of another"
    ):
        new().load(tmp_path)


def test_a_site_deletes_older_pieces_when_all_ranks_have_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = site_of(1, 1)
    each(ranks, "save", tmp_path, keep=1)
    write = tensor_file.write

    def fails_on_rank_1(path: Path, contents: Contents) -> None:
        if "rank-00001" in path.name:
            raise OSError(28, "no space left")
        write(path, contents)

    for rank in ranks:
        rank._state.revision = 2
    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "write", fails_on_rank_1)
        each(ranks, "save", tmp_path, keep=1, background=True)
        ends = [Background(rank.wait_for_save) for rank in ranks]
        with pytest.raises(CheckpointError, match="a rank of this site could not save the last checkpoint"):
            ends[0].result()
        with pytest.raises(OSError, match="no space left"):
            ends[1].result()
    again = site_of(0, 0)
    each(again, "load", tmp_path)
    assert [rank.revision for rank in again] == [1, 1]
    each(ranks, "save", tmp_path, keep=1, background=True)
    each(ranks, "wait_for_save")
    assert [name[:14] for name in names(tmp_path)] == ["step-000000002"] * 2


# Runs.


@pytest.mark.parametrize("kind", [DiLoCo, AsyncDiLoCo])
def test_peers_resume_from_checkpoints_of_different_steps(tmp_path: Path, kind: Any) -> None:
    with MasterNode("127.0.0.1:0") as master:
        first = crew_of(master, 2, kind)

        def save(peer: Peer) -> None:
            if peer.number == 0 or peer.diloco.revision < 3:  # the other one was killed then
                peer.diloco.save(tmp_path / str(peer.number), keep=2, background=True)

        together([partial(peer.run, 4, after=save) for peer in first])
        for peer in first:
            peer.diloco.wait_for_save()
        together([peer.close for peer in first])
    assert names(tmp_path / "0") == steps(3, 4)
    with MasterNode("127.0.0.1:0") as master:
        second = [Peer(master.address, number, kind) for number in range(2)]
        for peer in second:
            peer.diloco.load(tmp_path / str(peer.number))
        assert [peer.diloco.revision for peer in second] == [4, 2]
        together([partial(peer.enter, 2) for peer in second])
        each_runs(second, 6)
        assert_parity([*first, *second])
        together([peer.close for peer in second])


def test_a_failure_on_one_rank_alone_keeps_the_ranks_in_step(tmp_path: Path) -> None:
    """Ranks that keep count of votes differently would take each other's for something else."""
    ranks = site_of(1, 1)
    each(ranks, "save", tmp_path, keep=1, background=True)
    snapshot = ranks[0]._snapshot
    ranks[0]._snapshot = lambda: snapshot().nothing
    saves = [Background(partial(rank.save, tmp_path, keep=1, background=True)) for rank in ranks]
    with pytest.raises(AttributeError):
        saves[0].result()
    saves[1].result()
    ranks[0]._snapshot = snapshot
    for rank in refusals(ranks, lambda rank, _: rank.save(tmp_path, keep=1, background=True)):
        assert "a rank of this site could not save" in rank
    for rank in ranks:
        rank._state.revision = 2
    each(ranks, "save", tmp_path, keep=1, background=True)
    each(ranks, "wait_for_save")
    assert [name[:14] for name in names(tmp_path)] == ["step-000000002"] * 2
    again = site_of(0, 0)
    each(again, "load", tmp_path)
