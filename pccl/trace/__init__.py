"""Brings the recordings of all peers onto one timeline, and draws it for Perfetto: what `pccl trace` does.

clocks     how far the peers' clocks are apart
timeline   the drawing: Chrome's trace events
"""
