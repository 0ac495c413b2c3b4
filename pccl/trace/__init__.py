"""Aligns the recordings of all peers and draws them for Perfetto, for `pccl trace`."""
