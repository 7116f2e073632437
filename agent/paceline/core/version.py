"""Paceline's version."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("paceline")
except PackageNotFoundError:  # run from a checkout that is on PYTHONPATH and not installed
    __version__ = "0+unknown"
