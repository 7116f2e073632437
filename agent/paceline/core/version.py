"""Paceline's version."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("paceline")
# Paceline runs from a checkout that is on PYTHONPATH and not installed.
except PackageNotFoundError:
    __version__ = "0+unknown"
