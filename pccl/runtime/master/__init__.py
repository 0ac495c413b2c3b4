"""Runs a master.

server              one run on one listening socket: connections, heartbeats, the clock
authentication      who may speak to the master
durable_effects     effects of the machine in order, with what must be on disk before them
fence_file          the directory that keeps evicted peers from leading a run on
ring_search         the best ring for what is known of its links
standby_watch       what a standby knows of the other masters
status_board        the status that is shown to whoever asks
"""
