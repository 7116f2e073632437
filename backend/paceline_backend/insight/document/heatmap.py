"""Heat map of each rank's time ÷ the median of its step, as a PNG inside an SVG."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from paceline_backend.insight.document.charts import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Floats,
    Mark,
    axes,
    figure,
    marks,
    x_scale,
)

# If there are more ranks, neighbours share a row, which shows the slowest of them.
_MOST_ROWS = 256
_SHADES = 64
# This ratio and its reciprocal have the strongest colours.
_SPAN = 2.0  # × the median
_LABELS = 16

Colour = tuple[int, int, int]
# Colours for faster, equal and slower ranks. The dashboard uses the same ones.
_LIGHT: tuple[Colour, Colour, Colour] = ((0x2F, 0x7F, 0xB8), (0xEE, 0xF0, 0xF2), (0xC2, 0x4D, 0x00))
_DARK: tuple[Colour, Colour, Colour] = ((0x4A, 0xA3, 0xDD), (0x26, 0x2D, 0x34), (0xFF, 0x84, 0x35))
# Index of the transparent colour in the palette.
_UNKNOWN = 0


def ratios(compute_s: Floats) -> Floats:
    """Return each rank's time ÷ its step's median, [ranks, steps]; NaN: nothing was computed."""
    known = np.where(compute_s > 0, compute_s, np.nan)
    column = ~np.isnan(known).all(axis=0)
    median = np.full(known.shape[1], np.nan)
    median[column] = np.nanmedian(known[:, column], axis=0)
    return np.asarray(known / median)


def svg(cells: Mapping[str, Any], switched: Sequence[Mark]) -> Markup:
    """Return the heat map of `store.reads.worker_step_columns`; empty below two ranks or steps."""
    ranks, steps = cells["ranks"], np.array(cells["step"], dtype=np.float64)
    if len(ranks) < 2 or len(steps) < 2:
        return Markup()
    shown = ratios(np.array(cells["compute_s"], dtype=np.float64))
    each = -(-len(ranks) // _MOST_ROWS)
    rows = _grouped(shown, each)
    row_px = max(2, min(14, 420 // len(rows)))
    height = TOP + BOTTOM + row_px * len(rows)
    x = x_scale(steps)
    inner = [_picture(rows, palette, name, height) for palette, name in _BOTH]
    inner += [axes(x, None, "rank", height), _labels(ranks[::each], row_px)]
    inner += [marks(switched, x, height)]
    title = "Each rank's time of computing ÷ the median of its step"
    key = Markup('<span class="key"><i class="heat"></i>0.5 – 1 – 2</span>')
    return figure(title, key, Markup().join(inner), height)


def _grouped(shown: Floats, each: int) -> Floats:
    known = np.where(np.isnan(shown), -np.inf, shown)
    slowest = np.maximum.reduceat(known, np.arange(0, len(shown), each), axis=0)
    return np.where(np.isinf(slowest), np.nan, slowest)


_BOTH = ((_LIGHT, "light"), (_DARK, "dark"))


def _picture(rows: Floats, palette: tuple[Colour, ...], name: str, height: int) -> Markup:
    data = base64.b64encode(png(_indices(rows), _shades(palette))).decode()
    return Markup(
        '<image class="{}" x="{}" y="{}" width="{}" height="{}" preserveAspectRatio="none" '
        'href="data:image/png;base64,{}"/>'
    ).format(name, LEFT, TOP, WIDTH - LEFT - RIGHT, height - TOP - BOTTOM, data)


def _labels(ranks: Sequence[int], row_px: int) -> Markup:
    every = max(-(-len(ranks) // _LABELS), -(-12 // row_px))
    return Markup().join(
        Markup('<text x="{}" y="{}" text-anchor="end">{}</text>').format(
            LEFT - 6, f"{TOP + (k + 0.5) * row_px + 4:.1f}", rank
        )
        for k, rank in enumerate(ranks)
        if k % every == 0
    )


def _indices(rows: Floats) -> npt.NDArray[np.uint8]:
    """Return palette indices: 1 for half the median or less, `_SHADES` for twice or more."""
    place = (np.log(np.where(np.isnan(rows), 1.0, rows)) / np.log(_SPAN) + 1) / 2
    index = 1 + np.clip(np.rint(place * (_SHADES - 1)), 0, _SHADES - 1)
    return np.where(np.isnan(rows), _UNKNOWN, index).astype(np.uint8)


def _shades(palette: tuple[Colour, ...]) -> bytes:
    low, middle, high = (np.array(colour, dtype=np.float64) for colour in palette)
    # The first colour stands for unknown values, which are transparent.
    made = [middle]
    for place in np.linspace(-1, 1, _SHADES):
        end = low if place < 0 else high
        made.append(middle + (end - middle) * abs(place))
    return np.rint(np.array(made)).astype(np.uint8).tobytes()


def png(indices: npt.NDArray[np.uint8], palette: bytes) -> bytes:
    """Return a PNG of palette colours, the first of which is transparent.

    `indices` are [rows, columns]; `palette` has three bytes for each colour.
    """
    height, width = indices.shape
    # Filter type 0 at the start of each line means that the line is not filtered.
    lines = b"".join(b"\0" + row.tobytes() for row in indices)
    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    parts = (
        (b"IHDR", head),
        (b"PLTE", palette),
        (b"tRNS", b"\0"),
        (b"IDAT", zlib.compress(lines, 9)),
        (b"IEND", b""),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, body) for kind, body in parts)


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
