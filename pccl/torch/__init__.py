"""pccl as a backend of torch.distributed: `torch.distributed.init_process_group("pccl")`.

Importing this package registers the backend, as does `import torch` if pccl is installed. The backend needs torch 2.7
or later. `docs/distributed.md` lists the supported features and the differences from Gloo.
"""

import torch

from _pccl_torch import register, require_torch

require_torch(torch.__version__)

from pccl.torch.errors import ArgumentError, BackendError  # noqa: E402
from pccl.torch.process_group import ProcessGroupPCCL  # noqa: E402
from pccl.torch.work import PCCLWork  # noqa: E402

__all__ = ["ArgumentError", "BackendError", "PCCLWork", "ProcessGroupPCCL", "register"]

register()
