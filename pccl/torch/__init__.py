"""pccl as a backend of torch.distributed: `torch.distributed.init_process_group("pccl")`.

Importing this package registers the backend; where pccl is installed, `import torch` does so by itself.
`docs/pytorch.md` says what it supports and how it differs from Gloo.
"""

from _pccl_torch import register
from pccl.torch.errors import ArgumentError, BackendError
from pccl.torch.process_group import ProcessGroupPCCL
from pccl.torch.work import PCCLWork

__all__ = ["ArgumentError", "BackendError", "PCCLWork", "ProcessGroupPCCL", "register"]

register()
