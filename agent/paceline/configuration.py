"""Configuration file with options of commands, so that secrets need not be arguments.

The file has a table for each command, with a key for each of the command's options: ``[server]``
with ``database = "…"``.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from typer.core import TyperCommand, TyperGroup, TyperOption

from paceline.core.errors import InputError
from paceline.node import private


def path() -> Path | None:
    """Return ``PACELINE_CONFIG``, else ``~/.config/paceline/config.toml`` if the file exists."""
    if named := os.environ.get("PACELINE_CONFIG"):
        return Path(named)
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    usual = Path(base) / "paceline" / "config.toml"
    return usual if usual.exists() else None


def defaults(command: object) -> dict[str, Any]:
    """Return the configuration file's values as the command line's ``default_map``.

    An option on the command line, or its environment variable, takes precedence.

    Raises:
        InputError: the file cannot be read, others may read it, or it names something unknown.
    """
    file = path()
    if file is None:
        return {}
    private.check("PACELINE_CONFIG", file)
    try:
        tables = tomllib.loads(file.read_text())
    except ValueError as error:
        raise InputError(f"{file}: {error}") from error
    return _checked(tables, command, str(file))


def _checked(table: Mapping[str, Any], command: object, where: str) -> dict[str, Any]:
    """Return a table's values, keyed by the names of the command's parameters.

    A key that names neither a command nor an option is rejected. `where` is the file and the table,
    for messages.
    """
    checked: dict[str, Any] = {}
    commands = command.commands if isinstance(command, TyperGroup) else {}
    options = {
        name.removeprefix("--"): option
        for option in (command.params if isinstance(command, TyperGroup | TyperCommand) else ())
        if isinstance(option, TyperOption)
        for name in option.opts
        if name.startswith("--")
    }
    for name, value in table.items():
        below = commands.get(name)
        if isinstance(below, TyperGroup | TyperCommand) and isinstance(value, dict):
            checked[name] = _checked(value, below, f"{where}: {name}")
        elif name in options:
            checked[str(options[name].name)] = value
        else:
            known = ", ".join(sorted([*commands, *options]))
            raise InputError(f"{where}: unknown setting {name!r}; known: {known}")
    return checked
