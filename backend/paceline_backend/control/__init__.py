"""One controller per active run: plans segments under a lease."""

from paceline_backend.control.controller import Controller
from paceline_backend.control.leases import Lease
from paceline_backend.control.manager import ControllerManager

__all__ = ["Controller", "ControllerManager", "Lease"]
