"""Configuration file with values of command-line options, so that secrets need not be arguments.

The TOML file may have a table for each command, with keys named after the command's options: table
``[server]`` with ``database = "…"`` sets ``--database`` of ``paceline server``.
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
    """Return the path of the configuration file; None if there is no file.

    The path is ``PACELINE_CONFIG`` if set, else ``~/.config/paceline/config.toml``.
    """
    if named := os.environ.get("PACELINE_CONFIG"):
        return Path(named)
    base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    usual = Path(base) / "paceline" / "config.toml"
    return usual if usual.exists() else None


def defaults(command: object) -> dict[str, Any]:
    """Return the configuration file's values as the command line's ``default_map``.

    An option on the command line, or its environment variable, takes precedence.

    Raises:
        InputError: the file cannot be read, other users may read it, or it has an unknown setting.
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
    """Return a table's values, keyed by the names of the command's parameters."""
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
