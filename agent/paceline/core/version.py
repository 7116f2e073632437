"""This release's version."""

from importlib.metadata import version

__version__ = version("paceline")
