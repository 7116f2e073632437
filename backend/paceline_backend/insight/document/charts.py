"""Pictures of a report: lines over steps as SVG, and the heat map of the ranks' times.

`svg` draws a `Chart`: lines and bands over steps, with marks where the policy was switched.
`heat_map` draws each rank's time ÷ the median of its step, as a PNG inside an SVG with the same
axes and marks. Colours are CSS classes, so that one file suits light and dark screens and paper.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup, escape

Floats = npt.NDArray[np.float64]

WIDTH, HEIGHT = 860, 190
# Margins around the area of the lines, in pixels.
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 20, 34
_TICKS = 5

# The heat map has at most this many rows. If there are more ranks, a row shows the slowest of
# several consecutive ranks.
_MOST_HEAT_ROWS = 256
_SHADES = 64
# A rank has the strongest colour if its time is at least this many times the median, or at most
# 1 ÷ this many times.
_SPAN = 2.0  # × the median
_LABELS = 16

Colour = tuple[int, int, int]
# Colours of ranks that are faster than, as fast as, and slower than the median. The dashboard uses
# the same colours.
_LIGHT: tuple[Colour, Colour, Colour] = ((0x2F, 0x7F, 0xB8), (0xEE, 0xF0, 0xF2), (0xC2, 0x4D, 0x00))
_DARK: tuple[Colour, Colour, Colour] = ((0x4A, 0xA3, 0xDD), (0x26, 0x2D, 0x34), (0xFF, 0x84, 0x35))
# Index of the transparent colour in the palette.
_UNKNOWN = 0


@dataclass(frozen=True)
class ChartLine:
    """Line of a chart; NaN leaves a gap, and a line without a label is not in the legend."""

    y: Floats
    style: str = "main"
    label: str = ""


@dataclass(frozen=True)
class Band:
    """Area between two lines."""

    low: Floats
    high: Floats
    label: str = ""


@dataclass(frozen=True)
class Mark:
    """Vertical line at a step, with a label."""

    step: float
    label: str


@dataclass(frozen=True)
class Chart:
    """Line chart over ascending steps `x`.

    Lines are drawn in order, so later lines cover earlier ones. `level` is the height and label of
    a horizontal line. If `zero` is true, the axis starts at 0.
    """

    title: str
    unit: str
    x: Floats
    lines: Sequence[ChartLine]
    bands: Sequence[Band] = ()
    marks: Sequence[Mark] = ()
    level: tuple[float, str] | None = None
    zero: bool = True


class Scale:
    """Mapping from a range of values to pixels."""

    def __init__(self, low: float, high: float, begin: float, end: float) -> None:
        self.low, self.high = low, high if high > low else low + 1
        self._begin, self._per = begin, (end - begin) / (self.high - self.low)

    def __call__(self, value: float) -> float:
        """Return the pixel of a value."""
        return self._begin + (value - self.low) * self._per

    def ticks(self, whole: bool = False) -> list[float]:
        """Return round values within the range, for the labels of an axis."""
        step = _round_step((self.high - self.low) / _TICKS, whole)
        first = math.ceil(self.low / step - 1e-9)
        count = math.floor(self.high / step + 1e-9) - first + 1
        return [(first + k) * step for k in range(count)]


def _round_step(least: float, whole: bool) -> float:
    """Return the smallest number of the form 1, 2 or 5 × 10ⁿ that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    step = next((k * power for k in (1, 2, 5, 10) if k * power >= least * (1 - 1e-9)), 10 * power)
    return max(step, 1.0) if whole else step


def number(value: float) -> str:
    """Return a number for an axis, without superfluous digits."""
    if value == 0:
        return "0"
    if abs(value) >= 1000 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.4g}"


def svg(chart: Chart) -> Markup:
    """Return a chart as SVG; empty if its lines have no values."""
    known = np.concatenate([_known(line.y) for line in chart.lines] or [np.empty(0)])
    if not len(known):
        return Markup()
    bands = [_known(part) for band in chart.bands for part in (band.low, band.high)]
    levels = [] if chart.level is None else [np.array([chart.level[0]])]
    values = np.concatenate([known, *bands, *levels])
    low = min(0.0, float(values.min())) if chart.zero else float(values.min())
    high = float(values.max())
    y = Scale(low, high + 0.04 * (high - low), HEIGHT - BOTTOM, TOP)
    x = x_scale(chart.x)
    inner = [axes(x, y, chart.unit)]
    inner += [_band(chart.x, band, x, y) for band in chart.bands]
    inner += [_level(chart.level, y)] if chart.level is not None else []
    inner += [_path(chart.x, line, x, y) for line in chart.lines]
    inner += [marks(chart.marks, x, HEIGHT)]
    return figure(chart.title, _key(chart), Markup().join(inner), HEIGHT)


def figure(title: str, key: str | Markup, inner: Markup, height: int) -> Markup:
    """Return `inner` as a drawing of a given height; its caption is `title`, then `key`."""
    return Markup(
        '<figure><figcaption><b>{}</b> {}</figcaption><svg viewBox="0 0 {} {}" role="img" '
        'aria-label="{}">{}</svg></figure>'
    ).format(title, key, WIDTH, height, title, inner)


def x_scale(steps: Floats) -> Scale:
    """Return the scale of steps, which all drawings of a report share."""
    return Scale(float(steps[0]), float(steps[-1]), LEFT, WIDTH - RIGHT)


def axes(x: Scale, y: Scale | None, unit: str, height: int = HEIGHT) -> Markup:
    """Return the axis of steps and the vertical axis; without `y` only the axis of steps."""
    parts = []
    for value in y.ticks() if y is not None else ():
        at = y(value) if y is not None else 0.0
        parts.append(
            f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>'
            f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{number(value)}</text>'
        )
    parts += [
        f'<text x="{x(value):.1f}" y="{height - BOTTOM + 16}" text-anchor="middle">'
        f"{number(value)}</text>"
        for value in x.ticks(whole=True)
    ]
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{height - 3}" text-anchor="end">step</text>')
    parts.append(f'<text x="{LEFT - 6}" y="{TOP - 8}" text-anchor="end">{escape(unit)}</text>')
    return Markup("".join(parts))


def marks(each: Iterable[Mark], x: Scale, height: int) -> Markup:
    """Return vertical lines with their labels; marks outside the axis are left out."""
    parts = []
    for mark in each:
        if x.low <= mark.step <= x.high:
            at = x(mark.step)
            side = ("end", -4) if at > WIDTH - 140 else ("start", 4)
            parts.append(
                f'<path class="mark" d="M{at:.1f} {TOP}V{height - BOTTOM}"/><text class="mark" '
                f'x="{at + side[1]:.1f}" y="{TOP - 8}" text-anchor="{side[0]}">'
                f"{escape(mark.label)}</text>"
            )
    return Markup("".join(parts))


def _level(level: tuple[float, str], y: Scale) -> Markup:
    at = y(level[0])
    return Markup(
        '<path class="limit" d="M{} {}H{}"/><text class="limit" x="{}" y="{}" text-anchor="end">'
        "{}</text>"
    ).format(
        LEFT, f"{at:.1f}", WIDTH - RIGHT, WIDTH - RIGHT - 4, f"{min(at - 4, 999):.1f}", level[1]
    )


def _path(steps: Floats, line: ChartLine, x: Scale, y: Scale) -> Markup:
    parts, begins = [], True
    for step, value in zip(steps.tolist(), line.y.tolist(), strict=True):
        if math.isnan(value):
            begins = True
            continue
        parts.append(f"{'M' if begins else 'L'}{x(step):.1f} {y(value):.1f}")
        begins = False
    return Markup('<path class="line {}" d="{}"/>').format(line.style, "".join(parts))


def _band(steps: Floats, band: Band, x: Scale, y: Scale) -> Markup:
    known = ~(np.isnan(band.low) | np.isnan(band.high))
    if not known.any():
        return Markup()
    upper = [
        f"{x(step):.1f} {y(value):.1f}"
        for step, value in zip(steps[known].tolist(), band.high[known].tolist(), strict=True)
    ]
    lower = [
        f"{x(step):.1f} {y(value):.1f}"
        for step, value in zip(steps[known].tolist(), band.low[known].tolist(), strict=True)
    ]
    return Markup('<path class="band" d="M{}Z"/>').format("L".join([*upper, *lower[::-1]]))


def _key(chart: Chart) -> Markup:
    items = [("band", band.label) for band in chart.bands if band.label]
    items += [(line.style, line.label) for line in chart.lines if line.label]
    return Markup().join(
        Markup('<span class="key"><i class="{}"></i>{}</span>').format(style, label)
        for style, label in items
    )


def _known(values: Floats) -> Floats:
    return np.asarray(values[~np.isnan(values)])


def rolling(values: Floats, window: int, quantile: float) -> Floats:
    """Return a quantile (0 to 1) over `window` values around each value, ignoring NaN."""
    half = window // 2
    padded = np.concatenate([np.full(half, np.nan), values, np.full(half, np.nan)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)
    known = ~np.isnan(windows).all(axis=1)
    result = np.full(len(values), np.nan)
    result[known] = np.nanquantile(windows[known], quantile, axis=1)
    return result


def ratios(compute_s: Floats) -> Floats:
    """Return each time ÷ the median of the step, [ranks, steps]; NaN where a rank had no batch."""
    known = np.where(compute_s > 0, compute_s, np.nan)
    column = ~np.isnan(known).all(axis=0)
    median = np.full(known.shape[1], np.nan)
    median[column] = np.nanmedian(known[:, column], axis=0)
    return np.asarray(known / median)


def heat_map(cells: Mapping[str, Any], switched: Sequence[Mark]) -> Markup:
    """Return the heat map of `cells`; empty if there are fewer than two ranks or steps.

    `cells` come from `store.reads.worker_step_columns`.
    """
    ranks, steps = cells["ranks"], np.array(cells["step"], dtype=np.float64)
    if len(ranks) < 2 or len(steps) < 2:
        return Markup()
    shown = ratios(np.array(cells["compute_s"], dtype=np.float64))
    each = -(-len(ranks) // _MOST_HEAT_ROWS)
    rows = _grouped(shown, each)
    row_px = max(2, min(14, 420 // len(rows)))
    height = TOP + BOTTOM + row_px * len(rows)
    x = x_scale(steps)
    inner = [_picture(rows, palette, name, height) for palette, name in _BOTH]
    inner += [axes(x, None, "rank", height), _labels(ranks[::each], row_px)]
    inner += [marks(switched, x, height)]
    title = "Computing time of each rank ÷ median of the step"
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
    """Return palette indices for ratios: 1 for at most 0.5, `_SHADES` for at least 2."""
    place = (np.log(np.where(np.isnan(rows), 1.0, rows)) / np.log(_SPAN) + 1) / 2
    index = 1 + np.clip(np.rint(place * (_SHADES - 1)), 0, _SHADES - 1)
    return np.where(np.isnan(rows), _UNKNOWN, index).astype(np.uint8)


def _shades(palette: tuple[Colour, ...]) -> bytes:
    low, middle, high = (np.array(colour, dtype=np.float64) for colour in palette)
    made = [middle]
    for place in np.linspace(-1, 1, _SHADES):
        end = low if place < 0 else high
        made.append(middle + (end - middle) * abs(place))
    return np.rint(np.array(made)).astype(np.uint8).tobytes()


def png(indices: npt.NDArray[np.uint8], palette: bytes) -> bytes:
    """Return a PNG image with a palette, whose first colour is transparent.

    `indices` has the index of each pixel's colour, [rows, columns]. `palette` has three bytes for
    each colour.
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
