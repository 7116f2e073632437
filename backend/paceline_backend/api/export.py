"""REST: a run's tables as CSV, NDJSON or Parquet, streamed.

Rows are read and written in parts, so that the memory never holds a whole file.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import StreamingResponse

from paceline_backend.api.errors import RUN_REFUSALS, ProblemError, documented
from paceline_backend.api.queries import Ranks, StepRange, moment, ranks_of
from paceline_backend.api.rules import VIEWER
from paceline_backend.api.state import store_of
from paceline_backend.store import runs as runs_store
from paceline_backend.store.details.rows import TABLES, Kind, Part, Wanted, parts

router = APIRouter(prefix="/runs/{run}", responses=RUN_REFUSALS, dependencies=[Depends(VIEWER)])

Format = Literal["csv", "ndjson", "parquet"]
MEDIA_TYPES: dict[Format, str] = {
    "csv": "text/csv",
    "ndjson": "application/x-ndjson",
    "parquet": "application/vnd.apache.parquet",
}

Table = Literal["steps", "worker-steps", "rounds", "segments", "switches"]
_FILES: dict[str, Any] = {
    media: {"schema": {"type": "string", "format": "binary"}} for media in MEDIA_TYPES.values()
}


class RowQuery(StepRange):
    """Query parameters that select rows of a table."""

    ranks: Ranks = None
    since: Annotated[
        float | None, moment("only steps and rounds that ended at this Unix time or later")
    ] = None
    until: Annotated[
        float | None, moment("only steps and rounds that ended before this Unix time")
    ] = None


@router.get(
    "/export",
    response_class=StreamingResponse,
    responses={
        200: {"description": "The file with the table's rows.", "content": _FILES},
        **documented(HTTPStatus.NOT_IMPLEMENTED),
    },
)
def export(
    request: Request,
    run: str,
    table: Annotated[Table, Query(description="table to export")] = "steps",
    form: Annotated[Format, Query(alias="format")] = "csv",
    *,
    rows: Annotated[RowQuery, Query()],
) -> StreamingResponse:
    """Stream all rows of a table as a file, however large the table is.

    `since` and `until` apply only to the tables `steps`, `worker-steps` and `rounds`.
    """
    store = store_of(request)
    with store.read() as connection:
        key = runs_store.key_of(connection, run)
    chosen = TABLES[table]
    wanted = Wanted(rows.span, ranks_of(rows.ranks), rows.since, rows.until)
    try:
        pieces = written(form, chosen.kinds, parts(store, key, chosen, wanted))
    except MissingPackageError as error:
        raise ProblemError(HTTPStatus.NOT_IMPLEMENTED, str(error)) from error
    name = f"{run}-{table}.{form}"
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(pieces, media_type=MEDIA_TYPES[form], headers=headers)


class MissingPackageError(Exception):
    """Error: pyarrow, which Parquet needs, is not installed."""


def written(form: Format, kinds: Mapping[str, Kind], parts: Iterable[Part]) -> Iterator[bytes]:
    """Return an iterator over the bytes of a file, with a chunk for each part of the rows.

    `kinds` maps each column name to the type of its values, in the order of the columns.

    Raises:
        MissingPackageError: pyarrow is not installed. The call itself raises the error, not the
            iterator.
    """
    if form == "csv":
        return _csv(kinds, parts)
    if form == "ndjson":
        return _ndjson(kinds, parts)
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise MissingPackageError(
            "format: the server lacks pyarrow, which Parquet requires: pip install "
            "'paceline[parquet]' there, or request csv or ndjson"
        ) from error
    return _parquet(kinds, parts)


def _csv(kinds: Mapping[str, Kind], parts: Iterable[Part]) -> Iterator[bytes]:
    whole = [at for at, kind in enumerate(kinds.values()) if kind == "json"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(kinds)
    for part in parts:
        writer.writerows(_with_json(part, whole))
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()
    # Without rows, the loop above has not yielded the header.
    if rest := text.getvalue():
        yield rest.encode()


def _with_json(part: Part, whole: list[int]) -> Iterable[Iterable[Any]]:
    if not whole:
        return part
    return (
        [json.dumps(value) if at in whole else value for at, value in enumerate(row)]
        for row in part
    )


def _ndjson(kinds: Mapping[str, Kind], parts: Iterable[Part]) -> Iterator[bytes]:
    names = list(kinds)
    for part in parts:
        rows = (orjson.dumps(dict(zip(names, row, strict=True))) for row in part)
        yield b"\n".join(rows) + b"\n"


def _parquet(kinds: Mapping[str, Kind], parts: Iterable[Part]) -> Iterator[bytes]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    of_kind = {
        "integer": pa.int64(),
        "number": pa.float64(),
        "text": pa.string(),
        "json": pa.string(),
    }
    schema = pa.schema([(name, of_kind[kind]) for name, kind in kinds.items()])
    whole = [at for at, kind in enumerate(kinds.values()) if kind == "json"]
    sink = _Sink()
    with pq.ParquetWriter(sink, schema, compression="zstd") as writer:
        for part in parts:
            columns = zip(*_with_json(part, whole), strict=True)
            arrays = [
                pa.array(column, of_type)
                for column, of_type in zip(columns, schema.types, strict=True)
            ]
            writer.write_table(pa.table(arrays, schema=schema))
            yield sink.drained()
    yield sink.drained()


class _Sink(io.RawIOBase):
    """File object for pyarrow. It holds only the bytes that `drained` has not returned yet."""

    def __init__(self) -> None:
        super().__init__()
        self._pieces: list[bytes] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._pieces.append(bytes(data))
        self._size += len(self._pieces[-1])
        return len(self._pieces[-1])

    def tell(self) -> int:
        return self._size

    def drained(self) -> bytes:
        piece = b"".join(self._pieces)
        self._pieces.clear()
        return piece
