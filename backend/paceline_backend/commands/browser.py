"""Login of a browser for `paceline up` and `paceline demo`."""

from __future__ import annotations

import os
import sys
import webbrowser
from html import escape
from urllib.parse import quote

from rich.console import Console

from paceline.commands.options import DEFAULT_SERVER
from paceline_backend.server.stack import Stack

_err = Console(stderr=True, highlight=False)


def let_in(stack: Stack, page: str) -> None:
    """Print a link that logs a browser in, and open it if this machine has a screen."""
    link = f"{stack.login_link()}&next={quote(page)}"
    _err.print(f"Link to log one browser in, within ten minutes: {link}", soft_wrap=True)
    other = "" if stack.url == DEFAULT_SERVER else f" --server {stack.url}"
    _err.print(f"`paceline open{other}` prints another link.", soft_wrap=True)
    screen = sys.platform == "darwin" or {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys()
    if screen and _err.is_terminal:
        # Other users of the machine can read a browser's arguments, so a file passes the link.
        path = (stack.data / "open.html").resolve()
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f'<meta http-equiv="refresh" content="0;url={escape(link)}">')
        webbrowser.open(path.as_uri())
