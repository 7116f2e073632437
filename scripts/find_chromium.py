"""Prints the path of a Chromium or Chrome on this machine; exits with 1 if there is none."""

import os
import shutil
import sys
from pathlib import Path


def find_chromium() -> str | None:
    """Return the first of $PACELINE_CHROMIUM, a browser on PATH, and Playwright's own download."""
    if path := os.environ.get("PACELINE_CHROMIUM"):
        return path
    for name in ("chromium", "google-chrome", "google-chrome-stable"):
        if path := shutil.which(name):
            return path
    cache = Path.home() / ".cache" / "ms-playwright"
    return next((str(p) for p in sorted(cache.glob("chromium-*/chrome-linux*/chrome"))), None)


if __name__ == "__main__":
    browser = find_chromium()
    if browser is None:
        sys.exit(1)
    sys.stdout.write(browser + "\n")
