"""Paceline's version."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("paceline")
# Paceline is not installed: it runs from a checkout that is on PYTHONPATH.
except PackageNotFoundError:
    __version__ = "0+unknown"
