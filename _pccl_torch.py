"""Registers "pccl" with torch.distributed at the end of every `import torch` (entry-point group `torch.backends`).

This module is outside the package because importing it must be cheap and must not fail. pccl itself is imported when
the first process group is created.

Some functions of torch.distributed are wrapped, without effect on groups of other backends. torch's `monitored_barrier`
and `split_group` accept only certain backends, or require a GPU. Its `send` and `recv` do not inform the group that
their callers wait, which doubles the latency of small messages. torch.compile still traces torch's own functions.

torch.compile cannot trace pccl's code, so `outside_graphs` makes graphs break at its methods. It is in this module
because pccl does not import torch and may be imported before or after it.
"""

from __future__ import annotations

import functools
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

NAME = "pccl"
DEVICES = ["cpu", "cuda"]
TORCH_MIN = (2, 7)

Kind = TypeVar("Kind", bound=Callable[..., Any])


def register() -> None:
    """Register the backend unless it is already registered. A failure only causes a warning."""
    try:
        _skip_all()
        from torch import distributed

        if not distributed.is_available() or NAME.upper() in distributed.Backend._plugins:
            return
        distributed.Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))
        # torch 2.15 would attach its own flight recorder, which groups written in Python do not support.
        recording: set[str] = getattr(distributed.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recording.add(NAME)
        _extend(distributed, "monitored_barrier", _monitored_barrier)
        _extend(distributed, "split_group", _split_group)
        _extend(distributed, "send", _send)
        _extend(distributed, "recv", _recv)
        _extend(distributed, "_new_process_group_helper", _new_group)
    except Exception as error:
        warnings.warn(f"cannot register pccl as a torch.distributed backend: {error!r}", RuntimeWarning, stacklevel=2)


def require_torch(version: str) -> None:
    """Raise ImportError if this version of torch is too old for the backend."""
    numbers = tuple(int(each) for each in version.split(".")[:2] if each.isdigit())
    if len(numbers) == 2 and numbers < TORCH_MIN:
        least = ".".join(map(str, TORCH_MIN))
        raise ImportError(f"pccl as a torch.distributed backend needs torch {least} or later, but this is {version}")


def _create(options: Any, _: Any) -> Any:
    """Return a new process group for c10d."""
    from pccl.torch.process_group import ProcessGroupPCCL

    if _unskipped:
        text = f"torch.compile may fail at calls to pccl in this release of torch ({_unskipped[0]})"
        warnings.warn(f"{text}; wrap them with torch.compiler.disable", RuntimeWarning, stacklevel=2)
    ranks = list(options.global_ranks_in_group)
    return ProcessGroupPCCL(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        global_ranks=ranks,
        name=options.group_id,
        is_default=not ranks,
        enable_reconfigure=getattr(options, "enable_reconfigure", False),  # from torch 2.15 on
    )


# Functions of torch.distributed.


def _extend(distributed: Any, name: str, ours: Callable[..., Any]) -> None:
    """Replace a function of torch.distributed with `ours`, which gets the original as its first argument."""
    from torch.compiler import is_dynamo_compiling

    theirs = getattr(distributed.distributed_c10d, name, None)
    if theirs is None:
        return

    @functools.wraps(theirs)
    def either(*args: Any, **keywords: Any) -> Any:
        return theirs(*args, **keywords) if is_dynamo_compiling() else ours(theirs, *args, **keywords)

    outside_graphs(ours)
    for module in (distributed, distributed.distributed_c10d):
        setattr(module, name, either)


def _of_pccl(group: Any) -> Any:
    """Return the group (None: the default group) if it is a pccl group, otherwise None."""
    if group is None:
        group = _c10d().GroupMember.WORLD
    return group if hasattr(group, "monitored_barrier") and getattr(group, "is_of_pccl", False) else None


def _monitored_barrier(theirs: Any, group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
    ours = _of_pccl(group)
    if ours is None:
        return theirs(group, timeout, wait_all_ranks)
    return ours.monitored_barrier(timeout, wait_all_ranks)


def _send(theirs: Any, tensor: Any, dst: Any = None, group: Any = None, tag: int = 0, group_dst: Any = None) -> Any:
    ours = _of_pccl(group)
    if ours is None or not _is_plain(tensor):
        return theirs(tensor, dst, group, tag, group_dst)
    c10d = _c10d()
    rank = _rank_in(c10d, ours, dst, group_dst)
    c10d._check_not_self_rank(ours, rank, "destination")
    ours.send([tensor], rank, tag, waits=True).wait()
    return None


def _recv(theirs: Any, tensor: Any, src: Any = None, group: Any = None, tag: int = 0, group_src: Any = None) -> Any:
    ours = _of_pccl(group)
    if ours is None or not _is_plain(tensor) or (src is None and group_src is None):
        return theirs(tensor, src, group, tag, group_src)
    c10d = _c10d()
    rank = _rank_in(c10d, ours, src, group_src)
    ours.recv([tensor], rank, tag, waits=True).wait()
    return c10d.get_global_rank(ours, rank) if src is None else src


def _rank_in(c10d: Any, group: Any, global_rank: Any, group_rank: Any) -> Any:
    """Return the rank within a group, computed as in torch."""
    if group_rank is None:
        known = c10d._world.pg_group_ranks.get(group, {}).get(global_rank)
        if known is not None:
            return known
    return c10d._canonicalize_group_rank(group, global_rank, group_rank)


@functools.cache
def _c10d() -> Any:
    from torch.distributed import distributed_c10d

    return distributed_c10d


@functools.cache
def _seen_by_others() -> Any:
    from torch.overrides import has_torch_function_unary

    return has_torch_function_unary


def _is_plain(tensor: Any) -> bool:
    """Return whether the tensor has no `__torch_function__` override."""
    return hasattr(tensor, "data_ptr") and not _seen_by_others()(tensor)


def _new_group(
    theirs: Any, size: int, rank: int, ranks: Any, backend: Any, store: Any, name: str, *args: Any, **keywords: Any
) -> Any:
    """Create a group. If a device map names pccl and other backends, pccl's group gets a hidden group of the others,
    because torch cannot put a backend written in Python into a group with others."""
    c10d, kinds = _c10d(), {}
    if f":{NAME}" in str(backend).lower():
        config = c10d.BackendConfig(backend)
        kinds = config.get_device_backend_map()
    own = [device for device, kind in kinds.items() if kind == NAME]
    others = ",".join(f"{device}:{kind}" for device, kind in kinds.items() if kind != NAME)
    if len(kinds) < 2 or not own:
        return theirs(size, rank, ranks, backend, store, name, *args, **keywords)
    group, its_store = theirs(size, rank, ranks, f"{own[0]}:{NAME}", store, name, *args, **keywords)
    world = c10d._world
    if _of_pccl(group) is None or world.pg_map[group][0] == backend:  # not a member, or an existing group with this tag
        return group, its_store
    world.pg_map[group], world.pg_backend_config[group] = (backend, its_store), str(config)
    if others:
        keywords["pg_tag"] = None
        other, _ = theirs(size, rank, ranks, others, store, f"{name}:others", *args, **keywords)
        for table in (world.pg_map, world.pg_names, world.pg_backend_config, world.pg_to_tag):
            table.pop(other, None)
        for groups in world.tags_to_pg.values():
            if other in groups:
                groups.remove(other)
        c10d._unregister_process_group(other.group_name)
        group.mix(own, other)
    return group, its_store


def _split_group(theirs: Any, parent_pg: Any = None, split_ranks: Any = None, *args: Any, **keywords: Any) -> Any:
    ours = _of_pccl(parent_pg)
    if ours is None or ours.bound_device_id is not None:
        return theirs(parent_pg, split_ranks, *args, **keywords)
    from pccl.torch.process_group import split_group

    return split_group(ours, split_ranks, *args, **keywords)


# torch.compile.

_codes: set[types.CodeType] = set()
"""Code passed to `outside_graphs` that torch does not skip yet."""
_unskipped: list[str] = []
"""The errors that kept torch from skipping code."""


def outside_graphs(kind: Kind) -> Kind:
    """Decorator that makes torch.compile's graphs break at a function, or at a class's methods except `__call__`.

    `torch.compiler.disable` does the same, but imports the compiler, which takes a second, and slows down each call.
    """
    functions: list[Any] = _methods(kind) if isinstance(kind, type) else [kind]
    for function in functions:
        function._torchdynamo_disable = True
        _codes.update(_codes_of(function))
    if hasattr(sys.modules.get("torch"), "compiler"):  # otherwise torch is imported later or is being imported now
        _skip_all()
    return kind


def _methods(kind: type) -> list[Any]:
    """Return the functions of a class and of its bases in pccl, including property getters."""
    found = []
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "pccl":
            for name, each in vars(base).items():
                function = each.fget if isinstance(each, property) else getattr(each, "__func__", each)
                if isinstance(function, types.FunctionType) and name != "__call__":
                    found.append(function)
    return found


def _codes_of(function: Any) -> set[types.CodeType]:
    """Return the code of a pccl function, of functions it wraps, and of all functions nested in these."""
    found: set[types.CodeType] = set()
    open_codes = []
    while function is not None:
        if function.__globals__.get("__name__", "").partition(".")[0] in ("pccl", __name__):
            open_codes.append(function.__code__)
        function = getattr(function, "__wrapped__", None)
    while open_codes:
        code = open_codes.pop()
        found.add(code)
        open_codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return found


def _skip_all() -> None:
    """Make torch skip all frames of the code in `_codes`, and the frames that they call."""
    try:
        evaluation = sys.modules["torch"]._C._dynamo.eval_frame
        skip = evaluation._FrameAction.SKIP
        strategy = evaluation._FrameExecStrategy(skip, skip)
        while _codes:
            evaluation.set_code_exec_strategy(_codes.pop(), strategy)
        _unskipped.clear()
    except Exception as error:  # an unknown release of torch
        _unskipped.append(f"{type(error).__name__}: {error}")
