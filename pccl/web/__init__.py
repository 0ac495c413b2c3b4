"""The page of a run: a read-only HTTP server of a master."""
