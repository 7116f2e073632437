"""Options that several commands of the control plane share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Database = Annotated[
    str | None,
    typer.Option(
        envvar="PACELINE_DATABASE",
        help="SQLAlchemy URL of the database; default: an SQLite file in --data.",
    ),
]
Data = Annotated[
    Path, typer.Option(envvar="PACELINE_DATA", help="Directory of the embedded database and bus.")
]
DATA = Path(".paceline")
