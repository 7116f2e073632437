// The traces of charts over steps: a line is a rolling median in its band, or a mean between least and greatest.
import { bytes, factor, integer, percent, seconds } from "./format.js";
import { breaks, kept, rolling } from "./smooth.js";

const MOST_POINTS = 6000; // per chart, which SVG draws in a few milliseconds

/** @typedef {{step: number[], bucket: number, value: Column, low?: Column, high?: Column}} Series values over steps; least and greatest of each bucket */
/** @typedef {{color: string, width: number, dash?: string, name: string, format: (value: number | null) => string, rank?: number, quiet?: boolean}} Look */

/**
 * One rank's times, from its line or from its row of the heat map; null: nothing is known of it.
 * @param {View} view
 * @param {number} rank
 * @returns {Series | null}
 */
export function seriesOf(view, rank) {
  if (view.ranks.includes(rank)) {
    const of = (/** @type {CellName | "compute_s_min" | "compute_s_max"} */ name) => view.cells.map((cell) => known(cell[name]?.[rank]));
    const extremes = view.cellBucket > 1 ? { low: of("compute_s_min"), high: of("compute_s_max") } : {};
    return { step: view.cellStep, bucket: view.cellBucket, value: of("compute_s"), ...extremes };
  }
  const { heat } = view;
  const row = heat ? Math.floor(rank / heat.together) : -1;
  if (!heat || row >= heat.rows) return null;
  const width = heat.step.length;
  return { step: heat.step, bucket: heat.bucket, value: Array.from(heat.values.subarray(row * width, (row + 1) * width), known) };
}

/**
 * A column of the steps, with its extremes where a point stands for several.
 * @param {View} view
 * @param {string} metric
 * @returns {Series}
 */
export function metricOf(view, metric) {
  const extremes = view.bucket > 1 ? { low: view.metrics[`${metric}_min`], high: view.metrics[`${metric}_max`] } : {};
  return { step: view.step, bucket: view.bucket, value: view.metrics[metric] ?? [], ...extremes };
}

/**
 * A line, and its band below it. The band is p10–p90 of the window, or least and greatest where points are means.
 * @param {Series} series
 * @param {Look} look
 * @param {number} window steps of the rolling median; 1: raw values
 * @param {string | null} band its colour; null: none
 * @param {number} most points
 * @returns {any[]} Plotly's traces
 */
export function line(series, look, window, band, most = MOST_POINTS) {
  const points = Math.max(1, Math.round(window / series.bucket));
  const smooth = rolling(series.value, points);
  const [low, high] = series.low && series.high ? [series.low, series.high] : [smooth.low, smooth.high];
  const banded = band !== null && (points > 1 || series.low !== undefined);
  const made = banded ? bandOf(series, low, high, band, most / 2) : [];
  return [...made, trace(series, smooth.middle, look, points, most)];
}

/**
 * An area between two lines.
 * @param {{step: number[], bucket: number}} series
 * @param {Column} low
 * @param {Column} high
 * @param {string} color
 * @param {number} most
 */
export function bandOf(series, low, high, color, most) {
  const base = { type: "scatter", mode: "lines", hoverinfo: "skip", showlegend: false, connectgaps: false, line: { width: 0, color } };
  /** @type {any[]} */
  const parts = [];
  // Plotly fills across gaps, so each part without a gap is an area by itself.
  for (const places of unbroken(series, low, Math.ceil(most))) {
    const x = places.map((at) => middleOf(series, at));
    parts.push({
      ...base, fill: "toself", fillcolor: color,
      x: [...x, ...[...x].reverse()],
      y: [...places.map((at) => low[at]), ...[...places].reverse().map((at) => high[at])],
    });
  }
  return parts;
}

/**
 * Places to draw, in parts without gaps.
 * @param {{step: number[], bucket: number}} series
 * @param {Column} low
 * @param {number} most
 */
function unbroken({ step, bucket }, low, most) {
  const broken = breaks(step, bucket);
  const every = Math.max(1, Math.ceil(step.length / Math.max(2, most)));
  /** @type {number[][]} */
  const parts = [[]];
  step.forEach((_, at) => {
    const last = /** @type {number[]} */ (parts.at(-1));
    if (known(low[at]) === null || broken.has(at)) parts.push(known(low[at]) === null ? [] : [at]);
    else if (!last.length || at - /** @type {number} */ (last.at(-1)) >= every || at === step.length - 1) last.push(at);
  });
  return parts.filter((places) => places.length > 1);
}

/**
 * @param {Series} series
 * @param {Column} shown
 * @param {Look} look
 * @param {number} points of the window
 * @param {number} most
 */
function trace(series, shown, { color, width, dash = "solid", name, format, rank, quiet = false }, points, most) {
  const broken = breaks(series.step, series.bucket);
  /** @type {(number | null)[]} */
  const x = [];
  /** @type {Column} */
  const y = [];
  /** @type {string[]} */
  const words = [];
  let before = -1;
  const places = series.low && series.high && !quiet ? kept(series.high, most) : kept(shown, most);
  for (const at of places) {
    if (before >= 0 && [...range(before + 1, at)].some((place) => broken.has(place))) {
      x.push(middleOf(series, at) - series.bucket / 2);
      y.push(null);
      words.push("");
    }
    before = at;
    x.push(middleOf(series, at));
    y.push(known(shown[at]));
    words.push(quiet ? "" : hover(series, shown, at, points, format));
  }
  return {
    type: "scatter", mode: "lines", connectgaps: false, showlegend: false, name, x, y, customdata: words,
    line: { color, width, dash }, meta: rank === undefined ? undefined : { rank },
    ...(quiet ? { hoverinfo: "skip" } : { hovertemplate: `${name ? `${name}: ` : ""}%{customdata}<extra></extra>` }),
  };
}

/**
 * What a point says: the raw value first, which the smoothed line does not show.
 * @param {Series} series
 * @param {Column} shown
 * @param {number} at
 * @param {number} points
 * @param {(value: number | null) => string} format
 */
function hover({ value, low, high, bucket }, shown, at, points, format) {
  if (low && high) return `${format(known(value[at]))}, ${format(known(low[at]))} – ${format(known(high[at]))}`;
  if (points <= 1) return format(known(value[at]));
  return `${format(known(value[at]))}, median ${format(known(shown[at]))}${bucket > 1 ? " at most" : ""}`;
}

/**
 * Where a point is: in the middle of its steps.
 * @param {{step: number[], bucket: number}} series
 * @param {number} at
 */
const middleOf = ({ step, bucket }, at) => step[at] + (bucket - 1) / 2;

/**
 * @param {number} from
 * @param {number} to included
 */
function* range(from, to) {
  for (let at = from; at <= to; at++) yield at;
}

/**
 * @param {number | null | undefined} value
 * @returns {number | null}
 */
export const known = (value) => (value === undefined || value === null || Number.isNaN(value) ? null : value);

/** How each unit is written, on the axis and on hover. */
export const FORMATS = {
  seconds,
  percent,
  factor,
  integer,
  bytes,
  plain: (/** @type {number | null} */ value) => (value === null ? "–" : Number(value.toPrecision(4)).toLocaleString("en", { maximumSignificantDigits: 4 })),
};
