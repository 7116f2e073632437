"""Removes stragglers from data-parallel PyTorch training: the library and the node agent."""

from importlib.metadata import version

from paceline.errors import PacelineError

__version__ = version("paceline")
__all__ = ["PacelineError", "__version__"]
