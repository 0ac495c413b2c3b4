"""Only what pyproject.toml cannot say: the C engine is an extension that cffi generates."""

from setuptools import setup

setup(cffi_modules=["bindings/build_native.py:ffibuilder"])
