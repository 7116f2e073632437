"""Kept effects of switches with forecasts, as if runs had been there and gone."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from paceline_backend.store import Store
from paceline_backend.store.schema import effects


def keep_outcome(
    store: Store, run: str, forecast: float | None, saving: float | None, **values: Any
) -> None:
    """An outcome: ± 0.03 as forecast, ± 0.01 as measured.

    Args:
        run: public id; the run need not be there.
        forecast: saving; None: there was no forecast.
        saving: measured; None: too few steps.
        values: other columns of `effects`.
    """
    row: dict[str, Any] = {
        "run": run,
        "version": 1,
        "policy": "chronica",
        "backend": "local",
        "nodes": 1,
        "ranks": 4,
        "at": 1000.0,
        "noted_at": 2000.0,
        "complete": True,
        "scored": saving is not None and forecast is not None,
        **values,
    }
    expected = None
    if forecast is not None:
        expected = {"saving": forecast, "low": forecast - 0.03, "high": forecast + 0.03}
    body = {
        **{name: row[name] for name in ("version", "policy", "complete")},
        "first_step": 60,
        "before_steps": 40,
        "after_steps": 200,
        "known": saving is not None and abs(saving) > 0.01,
        "saving": saving,
        "low": None if saving is None else saving - 0.01,
        "high": None if saving is None else saving + 0.01,
        "forecast": expected,
        "replaced": False,
        "unchanged": False,
    }
    with store.write() as connection:
        connection.execute(sa.insert(effects).values({**row, "body": body}))
