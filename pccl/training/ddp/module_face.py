"""The interface by which programs use torch's DistributedDataParallel as if it were the module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

Face = TypeVar("Face", bound="ModuleFace")


class ModuleFace:
    """Passes on to `module` what concerns it alone. Names are the module's own, without torch's "module." in front, so
    that a checkpoint of the weights fits the bare module too."""

    def __init__(self, module: Any) -> None:
        self.module = module
        """The module that is trained: its attributes are found here."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward pass, with its hooks; also under `torch.autocast`."""
        return self.module(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield from self.module.parameters(recurse)

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Any]]:
        yield from self.module.named_parameters(prefix, recurse)

    def buffers(self, recurse: bool = True) -> Iterator[Any]:
        yield from self.module.buffers(recurse)

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Any]]:
        yield from self.module.named_buffers(prefix, recurse)

    def modules(self) -> Iterator[Any]:
        yield from self.module.modules()

    @property
    def training(self) -> bool:
        return bool(self.module.training)

    def train(self: Face, mode: bool = True) -> Face:
        self.module.train(mode)
        return self

    def eval(self: Face) -> Face:
        self.module.eval()
        return self

    def state_dict(self, **options: Any) -> dict[str, Any]:
        """The module's."""
        found: dict[str, Any] = self.module.state_dict(**options)
        return found

    def load_state_dict(self, state_dict: Any, strict: bool = True) -> Any:
        """Puts values into the module's tensors, which stay the same ones. On all peers alike, or before `join`, which
        gives a newcomer those of the others."""
        return self.module.load_state_dict(state_dict, strict=strict)
