"""The trio thread behind the blocking API, its helpers and watchdogs, and the handling of forks."""
