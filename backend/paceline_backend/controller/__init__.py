"""One controller per active run: plans segments under a lease."""

from paceline_backend.controller.controller import Controller
from paceline_backend.controller.leases import Lease
from paceline_backend.controller.manager import ControllerManager

__all__ = ["Controller", "ControllerManager", "Lease"]
