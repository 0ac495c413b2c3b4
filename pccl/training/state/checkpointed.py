"""`save` and `load` of the training classes, and how the ranks of a site agree on what they load.

*Pieces of one step.* Every rank of a site looks at the checkpoints that it has and tells the others their revisions and
saves. All load the newest that all have. Where there is none, or a piece is damaged or of another model, all fail with
the same account of which rank has what, and nothing has been changed.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pccl import Communicator, PCCLError, Result
from pccl.training.group.membership import Membership
from pccl.training.group.site import Site
from pccl.training.state.checkpoint import Checkpoints, Loaded, Piece, Snapshot, is_one_file, load, piece_at, pieces
from pccl.training.state.tensor_file import CheckpointError
from pccl.training.state.tensor_tree import Shard

logger = logging.getLogger(__name__)


class Checkpointed(ABC):
    """The base of the training classes: saves what `_snapshot` gives, and hands it to `_restore`."""

    _communicator: Communicator
    _membership: Membership
    _site: Site | None = None
    _checkpoints: Checkpoints | None = None

    LOADS: tuple[str, ...] = ()
    """The further classes whose checkpoints this one takes."""

    @abstractmethod
    def _snapshot(self) -> Snapshot:
        """Return what decides the next step, as it is at the time. No copies are made."""

    @abstractmethod
    def _restore(self, state: dict[str, Any], revision: int) -> None:
        """Takes up what `_snapshot` gave, of the same layout and options. CheckpointError, before anything is changed,
        where it does not fit all the same."""

    def _former(self, loaded: Loaded) -> Snapshot:
        """Return the state in a file of a former version. CheckpointError: this class takes none."""
        raise CheckpointError(
            f"{loaded.path} is of a former version, in which {type(self).__name__} had no checkpoints"
        )

    def _shard(self, tensor: Any, shard: Shard) -> Any:
        raise CheckpointError(f"it has a piece of a tensor in shards, {shard.place}; this model has none")

    def save(self, path: str | os.PathLike[str], *, keep: int | None = None, background: bool = False) -> None:
        """Saves this peer's state, durably and at once or not at all, between two steps.

        `path` is a folder of this peer's own, where `step-000000123.safetensors` appears, for revision 123; only the
        newest `keep` are kept then (None: all). Or it ends in `.safetensors` or `.npz` and is the file itself, which is
        replaced. With `background` the state is copied into memory that is kept for it, and written while training goes
        on; a further save waits for the end of the last one, and raises what has failed in it, as `wait_for_save` does.
        With a site all of its ranks call it, each for its own piece, into one folder or folders of their own.

        OSError; ValueError for a state that cannot be saved, naming the place.
        """
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(type(self).__name__, self._site)
        self._checkpoints.save(Path(path).absolute(), self._snapshot, keep=keep, background=background)

    def close(self) -> None:
        """Ends this object's part: another one may join on its communicator. Not a joint call, but all peers make it at
        the same place, and compare what the last step has left; not while an exception is handled. DivergenceError;
        OSError of a save in the background."""
        try:
            if self._membership.is_under_way and sys.exc_info()[0] is None:
                self._membership.part()
        finally:
            self._membership.retire()
            self.wait_for_save()

    def wait_for_save(self) -> None:
        """Returns when the last save is on the disk. OSError, if one in the background has failed."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def load(self, path: str | os.PathLike[str], *, missing_ok: bool = False) -> bool:
        """Takes up what `save` wrote to `path`, of a folder the newest. Call it before `join`: peers may load different
        steps, or none, and join with the newest state among them.

        With `missing_ok`, False if nothing is there. With a site it is a joint call of its ranks, which all load the
        newest step that all of them have. OSError; CheckpointError: it is damaged, or of another model, class or newer
        version, or the ranks have no step in common; PCCLError INVALID_USAGE: this peer has joined, and the others
        would not have what it loads. Nothing has been changed then.
        """
        self._require_not_joined()
        found, error = [], ""
        try:
            found = self._found(Path(path))
        except (OSError, CheckpointError) as caught:
            if self._site is None and not (missing_ok and isinstance(caught, FileNotFoundError)):
                raise
            if not isinstance(caught, FileNotFoundError):
                error = str(caught)
        if self._site is None:
            if not found:
                return False
            piece = found[-1]
        else:
            accounts = self._accounts(found, error)
            if missing_ok and not any(accounts):
                return False
            piece = found[accounts[self._site.rank].index(_newest_common(accounts, path))]
        try:
            loaded = self._loaded(piece)
        except FileNotFoundError as error:
            if self._site is not None or piece.path == Path(path) or not self._found(Path(path)):
                raise
            return self.load(path, missing_ok=missing_ok)  # a save has removed it, once there was a newer one
        self._restore(loaded.state, loaded.revision)
        logger.info("loaded %s, revision %d", piece.path, loaded.revision)
        return True

    def _require_not_joined(self) -> None:
        if not self._membership.is_under_way:
            return
        try:
            self._communicator.world_size  # noqa: B018
        except PCCLError:
            return  # it has left; `reconnect` joins with what is loaded
        what = "this peer trains with others, who would not have what it loads: call load before join"
        raise PCCLError(Result.INVALID_USAGE, f"{type(self).__name__}.load", what)

    def _found(self, path: Path) -> list[Piece]:
        """Return the pieces that can be loaded, oldest first."""
        if is_one_file(path):
            path.stat()
            return [piece_at(path) if self._site is not None else Piece(path, 0, "")]
        found = pieces(path, self._site)
        if not found:
            others = sorted(entry.name for entry in path.iterdir() if entry.name.startswith("step-"))
            what = f"; it holds {others[-1]}, of another rank or size of a site" if others else ""
            raise FileNotFoundError(f"{path} holds no checkpoint of this rank{what}")
        return found

    def _accounts(self, found: list[Piece], error: str) -> list[list[tuple[int, str]]]:
        """Revisions and saves that each rank has."""
        assert self._site is not None
        mine = {"error": error, "pieces": [(piece.revision, piece.save) for piece in found]}
        told = [json.loads(text) for text in self._site.gather(json.dumps(mine))]
        _raise_any(each["error"] for each in told)
        return [[(revision, save) for revision, save in each["pieces"]] for each in told]

    def _loaded(self, piece: Piece) -> Snapshot:
        error: OSError | CheckpointError | None = None
        snapshot = None
        try:
            snapshot = self._checked(load(piece.path, self._site, self._shard))
        except (OSError, CheckpointError) as caught:
            error = caught
        if self._site is not None:
            _raise_any(self._site.gather(str(error) if error is not None else ""))
        if error is not None:
            raise error
        assert snapshot is not None
        return snapshot

    def _checked(self, loaded: Loaded) -> Snapshot:
        path, snapshot = loaded.path, loaded.snapshot
        if not loaded.kind:
            snapshot = self._former(loaded)
        elif loaded.kind not in (type(self).__name__, *self.LOADS):
            raise CheckpointError(f"{path} was saved by {loaded.kind}; this is {type(self).__name__}")
        own = self._snapshot()
        classes = [each.state.get("optimizer class") for each in (snapshot, own)]
        if None not in classes and classes[0] != classes[1]:
            raise CheckpointError(f"{path} has the state of a {classes[0]}; the optimizer here is a {classes[1]}")
        for what, theirs, ours in (("model", snapshot.layout, own.layout), ("run", snapshot.options, own.options)):
            if theirs != ours:
                raise CheckpointError(f"{path} is of another {what}: {_first_difference(theirs, ours)}")
        shared = [each.state.get("shared", {}).keys() for each in (snapshot, own)]
        for name in sorted(shared[0] ^ shared[1]):
            here, there = ("is not shared here", "has it") if name in shared[0] else ("stays as it is", "lacks it")
            logger.warning("%r %s: %s %s", name, here, path, there)
        return snapshot


def _newest_common(accounts: list[list[tuple[int, str]]], path: str | os.PathLike[str]) -> tuple[int, str]:
    """CheckpointError, if there is none."""
    common = set(accounts[0]).intersection(*accounts[1:])
    account = "; ".join(
        f"rank {rank} has {', '.join(str(revision) for revision, _ in own) or 'none'}"
        for rank, own in enumerate(accounts)
    )
    if not common:
        same = set.intersection(*({revision for revision, _ in own} for own in accounts))
        why = f" (revision {max(same)} was saved by the ranks at different times)" if same else ""
        raise CheckpointError(
            f"the ranks of this site have no step in common to load from {os.fspath(path)}: {account}{why}; give each "
            "the piece of one save"
        )
    newest = max(common)
    if any(revision > newest[0] for own in accounts for revision, _ in own):
        logger.warning("revision %d is the newest that all ranks of this site have: %s", newest[0], account)
    return newest


def _raise_any(errors: Iterator[str] | list[str]) -> None:
    told = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]
    if told:
        raise CheckpointError(f"this site cannot load its checkpoint; {'; '.join(told)}")


def _first_difference(theirs: str, ours: str) -> str:
    for a, b in zip(theirs.splitlines(), ours.splitlines(), strict=False):
        if a != b:
            return f"it has {a!r} where this one has {b!r}"
    return f"it has {theirs.count(chr(10)) + 1} parameters, this one {ours.count(chr(10)) + 1}"
