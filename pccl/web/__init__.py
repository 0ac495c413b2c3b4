"""The page of a run: a read-only HTTP server of a master.

`server` speaks HTTP, `routes` maps paths and host names to answers, `prometheus` writes the metrics, `page.html` is the
page.
"""
