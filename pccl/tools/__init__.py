"""Tools built on the public API: `pccl launch`, `pccl demo`, `pccl bench`, `pccl stress` and the sampler audit.

harness     child processes: guard, JSON lines, environment
report      console, JSON, plot checks and exit codes of the commands
launch      a master and N copies of a script
audit       a proof from samplers' logs that each sample was used once
demo/       training across processes that die and join
bench/      throughput and latency compared with a raw ring and Gloo
stress/     random faults, and a checker for every guarantee
"""
