"""Mutants: plausible faults that are put into a copy of pccl, one at a time, and that its tests must find.

A test that has never failed may be blind. So each mutant in `mutants/*.toml` is one fault that somebody could have
written: a dropped condition, a wrong comparison, a barrier that is lost, a verdict forgotten. It says which promise it
breaks. A mutant that survives all tests shows a test that is missing, a scenario to which the simulator is blind, or a
line that does nothing.

    mutants     what a mutant is; the lists of them; how one is applied
    tree        private copies of the working tree, in which mutants live
    stages      what is tried on a mutant, in the order of cost: schedules, unit tests, everything that concerns it
    play        plays schedules in such a copy, and says which one failed
    instruments where in a module a mutant could make a difference
    reach       in which schedules it could, so that only these are played with it
    watchdog    what pytest says to us: the test that failed first, or hangs
    results     what became of mutants: remembered between runs, and shown as scores

What a run relies on:

    1  A mutant is applied to a private copy. The working tree is only read.
    2  A mutant whose line is not found, or found twice, is an error with its name: the list must not rot. A test of the
       default run says so.
    3  A mutant is killed when a schedule or a test fails in its copy. A hang counts as killed, and is said to be one. A
       test that touches sockets or processes may fail for another reason: it counts if it fails again and again, and
       passes without the mutant in between.
    4  A mutant that no test could find is equivalent. It carries the argument for that, and counts apart.
    5  Results are remembered by the mutant and all sources that they depend on. `killers.json` has the schedule or the
       test that killed a mutant last: that one is tried first, so what is known already is found again in seconds.
"""
