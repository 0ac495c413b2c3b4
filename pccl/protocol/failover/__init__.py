"""Continuing a run after the loss of its master.

machine         the state machine of a master process: no run, recovering peers, or leading
bootstrap       when newcomers may start a new run
gathering       the recovering peers of one run
recovery        recovery reports, and the run that follows from them
durable_state   the record that a master keeps on disk, and majorities
"""
