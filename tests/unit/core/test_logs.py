"""What a log line looks like, and that no secret is in it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from paceline.core import logs
from paceline.core.errors import InputError

SECRET = "hunter2hunter2"


class Err:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def getvalue(self) -> str:
        self._text += self._capsys.readouterr().err
        return self._text


@pytest.fixture
def err(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Err:
    monkeypatch.setattr(logs, "_values", {})
    monkeypatch.setattr(logs, "_longest_first", [])
    return Err(capsys)


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    logger = logging.getLogger("test_logs")
    logger.propagate = False
    yield logger
    logger.handlers.clear()


@pytest.mark.parametrize("kind", ["text", "json"])
@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (f"token pl_0a1b2c3d_{SECRET} is wrong", "token pl_0a1b2c3d_*** is wrong"),
        (f"Authorization: Bearer {SECRET}, said x", "Authorization: Bearer ***, said x"),
        (f"redis://node:{SECRET}@host:6379/0 is away", "redis://node:***@host:6379/0 is away"),
        (f"postgresql://u:p@{SECRET}@db/x", "postgresql://u:***@db/x"),
        (f"rediss://:{SECRET}@host", "rediss://:***@host"),
        (f"redis://u:a/{SECRET}/b@host is away", "redis://u:***@host is away"),
        (f"GET /login?code={SECRET}&next=/", "GET /login?code=***&next=/"),
        (f"paceline agent --token {SECRET} --node n", "paceline agent --token *** --node n"),
        (f"PACELINE_TOKEN is {SECRET}!", "PACELINE_TOKEN is ***!"),
        ("http://host:8000/runs/r at 3:40 @noon", "http://host:8000/runs/r at 3:40 @noon"),
    ],
)
def test_secrets_are_hidden(
    err: Err, log: logging.Logger, kind: str, message: str, shown: str
) -> None:
    settings = {"PACELINE_LOG_FORMAT": kind}
    if "PACELINE_TOKEN" in message:
        settings["PACELINE_TOKEN"] = SECRET
    logs.to_stderr(log, "%(message)s", settings)
    log.warning("%s", message)
    line = err.getvalue()
    assert (json.loads(line)["message"] if kind == "json" else line.strip()) == shown


def test_values_of_an_environment_are_hidden(err: Err, log: logging.Logger) -> None:
    logs.to_stderr(log, "%(message)s", {})
    logs.hide([SECRET, SECRET + "-and-more", "1", ""])
    log.warning("1 file of %s-and-more, %s", SECRET, SECRET)
    assert err.getvalue() == "1 file of ***, ***\n"


@pytest.mark.parametrize("kind", ["text", "json"])
def test_tracebacks_are_there_without_secrets(err: Err, log: logging.Logger, kind: str) -> None:
    logs.to_stderr(log, "%(message)s", {"PACELINE_LOG_FORMAT": kind})
    address = f"redis://u:{SECRET}@host"
    try:
        raise ValueError(address)
    except ValueError:
        log.exception("failed")
    assert SECRET not in err.getvalue()
    words = json.loads(err.getvalue())["exception"] if kind == "json" else err.getvalue()
    assert words.rstrip().endswith("ValueError: redis://u:***@host")


def test_a_json_line(err: Err, log: logging.Logger) -> None:
    logs.to_stderr(log, "", {"PACELINE_LOG_FORMAT": "json"})
    log.error("two\nlines of %d", 7)
    (text,) = err.getvalue().splitlines()
    line = json.loads(text)
    assert line["message"] == "two\nlines of 7"
    assert (line["level"], line["logger"]) == ("ERROR", "test_logs")
    assert line["time"].endswith("Z")


def test_what_is_remembered_is_bounded(err: Err, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_MOST_HIDDEN", 2)
    logs.hide(["A" * 8, "B" * 8, "C" * 8])
    assert logs.redacted(f"{'A' * 8} {'B' * 8} {'C' * 8}") == f"{'A' * 8} *** ***"


def test_words_and_paths_stay_readable(err: Err) -> None:
    words = "training in /opt/conda by production"
    logs.hide([*words.split(), "/opt/conda", "correcthorsebattery", "hunter22"])
    assert logs.redacted(words) == words
    assert logs.redacted("correcthorsebattery hunter22") == "*** ***"


@pytest.mark.parametrize(
    "name",
    ["PGPASSWORD", "db_password", "WANDB_API_KEY", "HF_TOKEN", "SECRETS", "TOKEN_2", "MYSQL_PWD"],
)
@pytest.mark.parametrize("value", ["sunflower", "tulip", "/opt/conda"])
def test_a_variable_that_is_named_a_secret_is_hidden_also_as_a_word(
    err: Err, name: str, value: str
) -> None:
    logs.hide_environment({name: value})
    assert logs.redacted(f"it says {value}!") == "it says ***!"


@pytest.mark.parametrize("name", ["MODE", "TOKENIZERS_PARALLELISM", "PWD", "KEYBOARD", "PASSES"])
def test_other_variables_leave_words_readable(err: Err, name: str) -> None:
    logs.hide_environment({name: "training", "LONG": SECRET, "A_KEY": "1"})
    assert logs.redacted(f"1 training of {SECRET}") == "1 training of ***"


@pytest.mark.parametrize("value", ["4096", "true", "None", "0.001"])
def test_settings_are_no_secrets_whatever_their_names(err: Err, value: str) -> None:
    logs.hide_environment({"MAX_TOKENS": value, "USE_KEY": value})
    assert logs.redacted(f"it is {value}") == f"it is {value}"


def test_an_unknown_format_is_refused(log: logging.Logger) -> None:
    with pytest.raises(InputError, match="'text' or 'json'"):
        logs.to_stderr(log, "", {"PACELINE_LOG_FORMAT": "xml"})
