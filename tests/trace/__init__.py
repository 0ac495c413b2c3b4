"""Tests of `pccl/trace`."""
