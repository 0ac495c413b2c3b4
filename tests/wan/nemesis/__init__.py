"""A nemesis: real peers and masters on hosts of their own, faults of hosts, networks, clocks and disks, and a checker
that relies on the reports of the peers only.

    history     what a peer reports: a line for each event in a file of its own
    values      the ops of a step, and each peer's contributions, derived from seeds
    peer        a peer as a user would write it: it synchronizes, reduces, applies and retries (a process)
    trainer     the same for the training classes (a process)
    checker     compares the reports with the library's promises; shares no code with pccl
    progress    checks that peers that can continue do so in time
    faults      faults of hosts, processes, links, clocks and disks
    scenarios   the faults of each scenario by name, and random mixtures
    stage       hosts, their processes, and the network between them
    clock       the wall clock of one process, which jumps (clock.c, preloaded)
    disk        a file system of a few blocks, for some processes alone
    supervisor  plays a scenario from beginning to end
    timeline    the events as text and as a picture
    __main__    `sudo python -m tests.wan.nemesis`
"""
