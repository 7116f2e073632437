"""Tells engines which of their machines are cordoned."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from paceline_backend.backends import Engine, EngineRefusedError
from paceline_backend.store import Store
from paceline_backend.store.nodes import engine_cordons
from paceline_backend.store.nodes.engine_cordons import Word

log = logging.getLogger(__name__)


def tell(store: Store, engine: Engine, plane: str, words: Iterable[Word]) -> None:
    """Tells an engine what it does not know yet. A worker that is killed has it told twice.

    Args:
        store: the database.
        engine: to tell.
        plane: the control plane's id.
        words: what is to be told.

    Raises:
        EngineAwayError: the engine does not answer: it is told later.
        StoreError: or one of its kinds.
    """
    for word in words:
        refusal = None
        try:
            engine.cordon_as(plane, word.host, word.reason)
        except EngineRefusedError as error:
            refusal = str(error)
            what = "the end of a cordon" if word.reason is None else "a cordon"
            log.warning("%s refuses %s of %s: %s", engine.title, what, word.host, error)
        with store.write() as connection:
            engine_cordons.note(connection, word, refusal)
