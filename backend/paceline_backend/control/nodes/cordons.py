"""Passing of cordons to engines: an engine must not start jobs on cordoned machines."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from paceline_backend.backends import Engine, EngineRefusedError
from paceline_backend.store import Store
from paceline_backend.store.nodes import cordons
from paceline_backend.store.nodes.cordons import Word

log = logging.getLogger(__name__)


def tell(store: Store, engine: Engine, plane: str, words: Iterable[Word]) -> None:
    """Pass pending cordons, and ends of cordons, to an engine.

    A worker that is killed before it records a cordon passes it again, which changes nothing.
    `plane` is the id of the control plane.

    Raises:
        EngineAwayError: the engine does not answer. The rest stays pending.
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
            cordons.note_told(connection, word, refusal)
