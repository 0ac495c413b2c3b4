"""The trio thread behind the blocking API, its helpers and watchdogs, and what forked children do.

portal              the trio thread, and how ordinary threads call into it
waking              coroutines of trio or asyncio that wait for what happens in another thread
latch               an event that may be waited for where signals interrupt
helper_thread       a thread for what would hold up the trio thread
tasks               tasks of pccl within a user's trio program
progress            a trio run goes on, which heartbeats vouch for
faults              texts for bugs of pccl
serving             servers that outlast the program that started them
fork_guard          sockets that forked children close
"""
