"""The cffi binding of `native/include/pccl_native.h`, built by `bindings/build_native.py`."""

from typing import Any

ffi: Any
lib: Any
