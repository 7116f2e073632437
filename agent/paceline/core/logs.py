"""Logs on standard error: as text or as JSON, and never with a secret in them.

``PACELINE_LOG_FORMAT=json`` makes each line a JSON object.
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
_LEAST = 8  # characters: shorter values would make logs unreadable
# A word or a path is no secret unless it is long, and logs are full of them.
_COMMON = re.compile(r"(?=.{1,15}\Z)([a-z]+|/[\w./-]*)")
# Names of variables that hold secrets, which may be words: PGPASSWORD, WANDB_API_KEY, HF_TOKEN, …
_SECRET_NAME = re.compile(
    r"(password|passwd|passphrase|secret|token|key|credential|_pass|_pwd)s?(_|\Z)", re.IGNORECASE
)
_LEAST_NAMED = 4  # characters, of such a variable
_SETTING = re.compile(r"true|false|none|null|auto|[0-9.]{1,7}", re.IGNORECASE)  # MAX_TOKENS=4096
_MOST = 10_000  # values that are remembered

_SECRETS = ("PACELINE_TOKEN", "PACELINE_AGENT_TOKEN", "PACELINE_VIEWER_TOKEN")
_PATTERNS = (
    (re.compile(r"\b(pl_[A-Za-z0-9]{1,32})_[\w~-]+"), rf"\1_{_HIDDEN}"),  # a token of Paceline
    (re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]+", re.IGNORECASE), rf"\1 {_HIDDEN}"),
    (re.compile(r"(\w://[^\s/:@]*):[^\s\"']+@"), rf"\1:{_HIDDEN}@"),  # a URL's password
    (re.compile(r"([?&](?:code|token|password)=)[^\s&\"']+"), rf"\1{_HIDDEN}"),
    (re.compile(r"(--(?:token|password)[ =])[^\s\"']+"), rf"\1{_HIDDEN}"),
)

_values: dict[str, None] = {}  # the oldest first
_longest_first: list[str] = []  # the same: one value may be the beginning of another


def hide(values: Iterable[str]) -> None:
    """Keeps some values out of this process's logs, unless they are short or words."""
    _remember(value for value in values if len(value) >= _LEAST and not _COMMON.fullmatch(value))


def hide_environment(environment: Mapping[str, str]) -> None:
    """Keeps a run's variables out of this process's logs.

    The values of those whose names tell of a secret are hidden also if they are words.
    """
    named = (value for name, value in environment.items() if _SECRET_NAME.search(name))
    _remember(v for v in named if len(v) >= _LEAST_NAMED and not _SETTING.fullmatch(v))
    hide(environment.values())


def _remember(values: Iterable[str]) -> None:
    global _longest_first
    for value in values:
        _values[value] = None
    while len(_values) > _MOST:
        del _values[next(iter(_values))]
    _longest_first = sorted(_values, key=len, reverse=True)


def redacted(text: str) -> str:
    """A text without its secrets."""
    for value in _longest_first:
        text = text.replace(value, _HIDDEN)
    for pattern, replacement in _PATTERNS:
        text = pattern.sub(replacement, text)
    return text


class Text(logging.Formatter):
    """Lines for people, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's lines."""
        return redacted(super().format(record))


class Json(logging.Formatter):
    """A JSON object a line, for collectors."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's line."""
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
    """Sends what a logger and those below it say to standard error.

    Args:
        logger: the root logger, or that of a package.
        text: the format of a line, unless ``PACELINE_LOG_FORMAT`` asks for JSON.
        environment: where ``PACELINE_LOG_FORMAT`` and secrets are.

    Raises:
        InputError: ``PACELINE_LOG_FORMAT`` is neither ``text`` nor ``json``.
    """
    kind = environment.get("PACELINE_LOG_FORMAT") or "text"
    if kind not in ("text", "json"):
        raise InputError(f"PACELINE_LOG_FORMAT is {kind!r}: it must be 'text' or 'json'")
    hide_environment({name: environment[name] for name in _SECRETS if name in environment})
    handler = logging.StreamHandler()
    handler.setFormatter(Json() if kind == "json" else Text(text))
    logger.addHandler(handler)
