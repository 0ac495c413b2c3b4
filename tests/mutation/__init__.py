"""Mutants: faults put into a copy of pccl, one at a time, and a fast test must find each.

Each mutant in `mutants/*.toml` is a fault that breaks a promise: a dropped condition, a wrong comparison, a lost
barrier. `killers.json` names the test file or native test that finds it; schedules of the simulator must find a mutant
of `pccl/protocol` without an entry there. A mutant that survives shows a missing test.

1. A mutant is applied to a private copy of the working tree.
2. A mutant whose line is missing or ambiguous is an error. `test_mutants.py` reports it in the default run.
3. A mutant is killed when its test fails or exceeds `KILLER_S`. Each test first passes without a mutant.
"""
