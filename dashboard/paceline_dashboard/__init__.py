"""Dashboard for operators: Dash pages in the web process, with live data directly from the API."""

from paceline_dashboard.lazy import mount

__all__ = ["mount"]
