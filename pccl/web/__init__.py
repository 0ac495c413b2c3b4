"""The page of a run: an HTTP server of a master that shows its status, read-only and bounded, and nothing else.

`server` speaks HTTP, `routes` knows what lies at which path, `hosts` by which names it may be asked for, `prometheus`
writes the metrics, `page.html` is the page.
"""
