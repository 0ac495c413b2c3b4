"""The trio thread behind the blocking API, its helpers and watchdogs, and what forked children do.

portal      the trio thread, how ordinary threads call into it, and servers that outlast the program
waking      latches, coroutines that wait for other threads, and warnings of long waits
tasks       tasks of pccl within a user's trio program, helper threads, and texts for bugs of pccl
progress    whether a trio run makes progress, which heartbeats depend on
process     sockets that forked children close, and the name of the process's clock
"""
