"""pccl as a backend for Ray's collective library: `ray.util.collective.init_collective_group(..., backend="pccl")`.

Importing this package registers the backend in this process. Ray needs this in the driver and in each actor:

    ray.init(runtime_env={"worker_process_setup_hook": "pccl.ray.register"})

See `docs/frameworks.md` and `examples/ray_collective.py`.
"""

from ray.util import collective

from pccl.ray.group import PCCLGroup, admit

__all__ = ["PCCLGroup", "admit", "register"]

BACKEND = "PCCL"


def register() -> None:
    """Register the backend with Ray's collective library in this process, unless it is registered already."""
    if not collective.is_backend_available(BACKEND):
        collective.register_collective_backend(BACKEND, PCCLGroup)


register()
