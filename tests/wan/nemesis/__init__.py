"""A nemesis: real peers and masters on hosts of their own, faults that are done to them, and a judge that believes
only what the peers report.

    history     what a peer reports: a line for each event in a file of its own
    values      the ops of a step, and each peer's contributions, derived from seeds
    peer        a peer as a user would write it: it synchronizes, reduces, applies and retries (a process)
    trainer     the same for the training classes (a process)
    checker     judges the reports against the library's promises; shares no code with pccl
    progress    judges whether those that could go on did, and in what time
    faults      what is done to hosts, processes, links, clocks and disks
    scenarios   the faults of each scenario by name, and random mixtures
    stage       hosts, their processes, and the network between them
    clock       the wall clock of one process, which jumps (clock.c, preloaded)
    disk        a file system of a few blocks, for some processes alone
    supervisor  plays a scenario from beginning to end
    timeline    what happened, as text and as a picture
    __main__    `sudo python -m tests.wan.nemesis`
"""
