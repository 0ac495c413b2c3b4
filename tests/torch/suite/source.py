"""`distributed_test` as torch ships it, or with a backend's name added where a test is for Gloo or MPI only.

Of the tests' decorators, `BACKEND != "gloo"` becomes `BACKEND not in ("gloo", "pccl")`, likewise with "mpi" (torch
tests all-to-all of CPU tensors on it only), and `require_backend_is_available({"gloo"})` gets the name into its set.
torch's tables of backends' features get it as well.
"""

import ast
import importlib.machinery
import importlib.util
import sys
import threading
from types import CodeType, ModuleType

MODULE = "torch.testing._internal.distributed.distributed_test"
FEATURES = ("gpu", "cuda", "ddp", "subgroup", "plugin")
CPU_BACKENDS = ("gloo", "mpi")


class _AddName(ast.NodeTransformer):
    """Adds a backend's name to each place that names a CPU backend; counts them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.places = 0

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        match node:
            case ast.Compare(
                left=ast.Name(id="BACKEND"),
                ops=[(ast.NotEq() | ast.Eq()) as op],
                comparators=[ast.Constant(value=str(other)) as named],
            ) if other in CPU_BACKENDS and (isinstance(op, ast.NotEq) or other == "gloo"):
                self.places += 1
                node.ops = [ast.NotIn() if isinstance(op, ast.NotEq) else ast.In()]
                node.comparators = [ast.Tuple([named, ast.Constant(self.name)], ast.Load())]
                ast.fix_missing_locations(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(func=ast.Name(id="require_backend_is_available"), args=[ast.Set(elts=backends)]) if any(
                isinstance(each, ast.Constant) and each.value == "gloo" for each in backends
            ):
                self.places += 1
                backends.append(ast.Constant(self.name))
                ast.fix_missing_locations(node)
        return self.generic_visit(node)


def with_name_added(source: str | bytes, name: str) -> tuple[ast.Module, int]:
    """The source's syntax tree with `name` added, and the number of places that it was added in."""
    adder = _AddName(name)
    tree = adder.visit(ast.parse(source))
    return tree, adder.places


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module's source with a name added; neither reads nor writes cached bytecode."""

    backend: str

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree, places = with_name_added(self.get_data(path), self.backend)
        assert places, f"{path} names no CPU backend to add {self.backend!r} to"
        return compile(tree, path, "exec", dont_inherit=True)


def load(backend: str) -> ModuleType:
    """Import `distributed_test` for `backend`; where it is not one of torch's own, with its name added.

    BACKEND and WORLD_SIZE are in the environment already: the module reads them as it is imported.
    """
    import torch.distributed as dist
    from torch.testing._internal.common_distributed import DistTestCases

    if backend in ("gloo", "nccl", "mpi", "ucc"):
        return importlib.import_module(MODULE)
    for feature in FEATURES:
        DistTestCases.backend_feature[feature].add(backend)
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    loader = _Loader(MODULE, spec.origin)
    loader.backend = backend
    spec.loader = loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    loader.exec_module(module)
    if _are_events_kept():
        for table in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
            getattr(module, table).append(dist.Backend(backend))
    return module


def _are_events_kept() -> bool:
    """Whether the profiler has what began in one thread and ended in another: in torch 2.7 it is lost."""
    import torch

    with torch.autograd.profiler.profile() as profile:
        handle = torch.autograd._record_function_with_args_enter("event")
        thread = threading.Thread(target=torch.autograd._record_function_with_args_exit, args=(handle,))
        thread.start()
        thread.join()
    return any(event.name == "event" for event in profile.function_events)
