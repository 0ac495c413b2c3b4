"""The run's status page, served by the master over read-only HTTP."""
