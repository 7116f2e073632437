"""The operator's dashboard: Dash pages in the web process, live data straight from the API."""

from paceline_dashboard.app import mount

__all__ = ["mount"]
