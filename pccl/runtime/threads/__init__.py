"""The trio thread behind the blocking API, its helpers and watchdogs, and what forked children do."""
