"""The version, written here once; pyproject.toml reads it."""

__version__ = "0.3.0"
