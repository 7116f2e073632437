"""Logs on standard error, as text or as JSON, with secrets redacted.

``PACELINE_LOG_FORMAT=json`` makes each line a JSON object. Processes call `to_stderr` once, and
`hide` or `hide_environment` for each source of secrets.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterable, Mapping

from paceline.core.errors import InputError

_HIDDEN = "***"
# Minimum number of characters of a hidden value. Hiding shorter values would make logs unreadable.
_SHORTEST_HIDDEN = 8
# Values that are not hidden: short words and paths are no secrets, and logs are full of them.
_COMMON = re.compile(r"(?=.{1,15}\Z)([a-z]+|/[\w./-]*)")
# Names of variables whose values are secrets, even a value that is a plain word: PGPASSWORD, …
_SECRET_NAME = re.compile(
    r"(password|passwd|passphrase|secret|token|key|credential|_pass|_pwd)s?(_|\Z)", re.IGNORECASE
)
# Minimum number of characters of a hidden value whose variable's name matches `_SECRET_NAME`.
_LEAST_NAMED = 4
# Values that are settings, not secrets, although the variable's name matches: MAX_TOKENS=4096.
_SETTING = re.compile(r"true|false|none|null|auto|[0-9.]{1,7}", re.IGNORECASE)
# Maximum number of values to hide. If there are more, the oldest are no longer hidden.
_MOST_HIDDEN = 10_000

_SECRETS = ("PACELINE_TOKEN", "PACELINE_AGENT_TOKEN", "PACELINE_VIEWER_TOKEN")
_PATTERNS = (
    # A token of Paceline.
    (re.compile(r"\b(pl_[A-Za-z0-9]{1,32})_[\w~-]+"), rf"\1_{_HIDDEN}"),
    (re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]+", re.IGNORECASE), rf"\1 {_HIDDEN}"),
    # The password in a URL.
    (re.compile(r"(\w://[^\s/:@]*):[^\s\"']+@"), rf"\1:{_HIDDEN}@"),
    (re.compile(r"([?&](?:code|token|password)=)[^\s&\"']+"), rf"\1{_HIDDEN}"),
    (re.compile(r"(--(?:token|password)[ =])[^\s\"']+"), rf"\1{_HIDDEN}"),
)

# The values to hide, oldest first.
_values: dict[str, None] = {}
# The same values, longest first, so that a value that contains a shorter one is hidden as a whole.
_longest_first: list[str] = []


def hide(values: Iterable[str]) -> None:
    """Hide values in this process's logs, except short values, common words and paths."""
    _remember(
        value for value in values if len(value) >= _SHORTEST_HIDDEN and not _COMMON.fullmatch(value)
    )


def hide_environment(environment: Mapping[str, str]) -> None:
    """Hide the values of a run's environment variables in this process's logs.

    If a variable's name suggests a secret, its value is hidden even if it is an ordinary word, a
    path, or shorter than the values that `hide` hides. Not hidden are values with fewer than
    `_LEAST_NAMED` characters, and settings such as `true` or `4096`.
    """
    named = (value for name, value in environment.items() if _SECRET_NAME.search(name))
    _remember(v for v in named if len(v) >= _LEAST_NAMED and not _SETTING.fullmatch(v))
    hide(environment.values())


def _remember(values: Iterable[str]) -> None:
    global _longest_first
    for value in values:
        _values[value] = None
    while len(_values) > _MOST_HIDDEN:
        del _values[next(iter(_values))]
    _longest_first = sorted(_values, key=len, reverse=True)


def redacted(text: str) -> str:
    """Return a text without its secrets."""
    for value in _longest_first:
        text = text.replace(value, _HIDDEN)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


class PlainFormatter(logging.Formatter):
    """A formatter of plain text; it also redacts secrets in tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's lines, redacted."""
        return redacted(super().format(record))


class Json(logging.Formatter):
    """A formatter of one JSON object per line, for log collectors."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line, redacted."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{stamp}.{int(record.msecs):03}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": redacted(record.getMessage()),
            "process": record.process,
            "thread": record.threadName,
        }
        if record.exc_info:
            line["exception"] = redacted(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False)


def to_stderr(
    logger: logging.Logger, text: str, environment: Mapping[str, str] = os.environ
) -> None:
    """Send the log records of a logger and its children to standard error.

    `text` is the format of a line, unless ``PACELINE_LOG_FORMAT`` is ``json``. Secrets of
    `environment` are hidden.

    Raises:
        InputError: ``PACELINE_LOG_FORMAT`` is neither ``text`` nor ``json``.
    """
    kind = environment.get("PACELINE_LOG_FORMAT") or "text"
    if kind not in ("text", "json"):
        raise InputError(f"PACELINE_LOG_FORMAT is {kind!r}: it must be 'text' or 'json'")
    hide_environment({name: environment[name] for name in _SECRETS if name in environment})
    handler = logging.StreamHandler()
    handler.setFormatter(Json() if kind == "json" else PlainFormatter(text))
    logger.addHandler(handler)
