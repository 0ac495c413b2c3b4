"""Aligns the recordings of all peers and draws them for Perfetto, for `pccl trace`.

clocks     alignment of the peers' clocks
timeline   the drawing: Chrome's trace events
"""
