// The run page's charts over steps, drawn by Plotly.
import { margins, round, StepAxis } from "./axis.js";
import { ranksIn } from "./costs.js";
import { MOST_LINES } from "./data.js";
import { text } from "./dom.js";
import { integer, quantile } from "./format.js";
import { bandOf, FORMATS, known, line, metricOf, seriesOf } from "./lines.js";
import { gaps, marks } from "./marks.js";
import { rolling } from "./smooth.js";

const UNSEEN_MS = 1500; // between two drawings of a chart that is scrolled out of sight
const MUCH = 1.15; // time of a step ÷ the slowest computing, from which on the rest is worth a line
const MOST_POINTS = 6000; // per chart, which SVG draws in a few milliseconds
const NEAR_PX = 24; // a click that is further from every line pins none
const LABEL_PX = 28; // height of a line's name and value
export const CONFIG = { displayModeBar: false, responsive: true, doubleClick: false };

/** @type {{id: string, metric: string, unit: keyof typeof FORMATS, name: string, zero: boolean}[]} */
const METRIC_CHARTS = [
  { id: "chart-se", metric: "se", unit: "plain", name: "SE", zero: true },
  { id: "chart-waste", metric: "waste", unit: "percent", name: "waste", zero: true },
  { id: "chart-dif", metric: "dif", unit: "plain", name: "DIF", zero: true },
  { id: "chart-loss", metric: "loss", unit: "plain", name: "loss", zero: false },
];

/**
 * How charts show a view.
 * @typedef {object} Reading
 * @property {StepAxis} axis
 * @property {number} window steps of the rolling median; 1: raw values
 * @property {number | null} focus the rank in colour
 * @property {number[]} group the ranks in colour: `focus`, and those that the verdict names with it, ascending
 * @property {boolean} slow whether others wait for them
 */

export class Charts {
  /**
   * @param {{zoomed: (from: number, to: number) => void, reset: () => void, seen: () => void,
   *   pinned: (rank: number) => void, pointed: (step: number | null) => void}} on steps were chosen; double-clicked to go
   *   back; scrolled to; a rank's line was clicked; the pointer is at a step
   */
  constructor(on) {
    this.on = on;
    /** @type {Set<string>} */
    this.wired = new Set();
    this.hovering = false;
    /** @type {{id: string, part: number} | null} */
    this.pointer = null; // the chart under the pointer and the position on its axis: {id, part}
    /** @type {Set<string>} */
    this.visible = new Set();
    /** @type {Map<string, number>} */
    this.drawnAt = new Map(); // chart → time of its last drawing, in ms
    this.axis = new StepAxis(0, 0);
    this.observer = new IntersectionObserver((entries) => this.#seen(entries));
  }

  /**
   * Draws everything: `view`, and `others`, more charts over steps.
   * @param {import("./data.js").RunData} data
   * @param {View} view
   * @param {Reading} reading
   * @param {Colours} colours
   * @param {ExtraChart[]} others
   */
  draw(data, view, reading, colours, others) {
    const { axis, window: steps } = reading;
    const marked = marks(data, view.coasts, gaps(view.step, view.bucket), axis.from, axis.to, colours);
    const compute = computeTraces(view, reading, colours);
    this.#plot("chart-compute", compute.traces, axis, colours, { ...marked, unit: "seconds", zero: true, names: compute.names });
    text("chart-compute-key", keyOf(view, reading));
    const share = view.world <= MOST_LINES ? shareAreas(view, reading.group, colours) : shareBand(view, colours);
    this.#plot("chart-share", share.traces, axis, colours, { ...marked, unit: "percent", zero: true, top: view.world <= MOST_LINES ? 1 : undefined, names: share.names });
    for (const { id, metric, unit, name, zero } of METRIC_CHARTS) {
      const look = { color: colours.accent, width: 1.6, name, format: FORMATS[unit] };
      this.#plot(id, line(metricOf(view, metric), look, steps, colours.greyBand), axis, colours, { ...marked, unit, zero });
    }
    for (const { id, traces, options } of others) this.#plot(id, traces, axis, colours, { ...marked, ...options });
    this.axis = axis;
    // The axis moved under a resting pointer: show the step that is now under it on the other charts.
    if (this.pointer) this.#others(this.pointer.id, axis.at(Math.round(axis.from + this.pointer.part * (axis.to - axis.from))));
  }

  close() {
    this.observer.disconnect();
    for (const id of this.wired) window.Plotly.purge(id);
  }

  /**
   * @param {string} id
   * @param {any[]} traces
   * @param {StepAxis} axis
   * @param {Colours} colours
   * @param {Partial<ChartOptions>} options
   */
  #plot(id, traces, axis, colours, options) {
    const element = document.getElementById(id);
    const now = performance.now();
    if (!element || (!this.visible.has(id) && now - (this.drawnAt.get(id) ?? -Infinity) < UNSEEN_MS)) return;
    this.drawnAt.set(id, now);
    const made = layout(axis, colours, { ...options, size: [element.clientWidth, element.clientHeight], extent: extentOf(traces) });
    window.Plotly.react(element, traces.map((each) => placed(each, axis)), made, CONFIG);
    if (!this.wired.has(id)) this.#wire(id, element);
  }

  /** @param {IntersectionObserverEntry[]} entries */
  #seen(entries) {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) this.visible.add(target.id);
      else this.visible.delete(target.id);
    }
    this.on.seen();
  }

  /**
   * @param {string} id
   * @param {any} element
   */
  #wire(id, element) {
    this.wired.add(id);
    this.observer.observe(element);
    element.on("plotly_relayout", (/** @type {Record<string, any>} */ change) => {
      const [from, to] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (from !== undefined && to !== undefined) this.on.zoomed(Math.round(this.axis.step(from)), Math.round(this.axis.step(to)));
    });
    element.on("plotly_doubleclick", () => this.on.reset());
    element.on("plotly_hover", (/** @type {any} */ event) => this.#hover(id, event.points[0]?.x));
    element.on("plotly_unhover", () => this.#hover(id, undefined));
    element.on("plotly_click", (/** @type {any} */ event) => {
      const rank = nearest(element, event);
      if (rank !== null) this.on.pinned(rank);
    });
  }

  /**
   * @param {string} id
   * @param {number | string | undefined} x
   */
  #hover(id, x) {
    if (this.hovering) return; // this event comes from our own call
    const { from, to } = this.axis;
    const step = x === undefined ? null : this.axis.step(x);
    this.pointer = step === null ? null : { id, part: (step - from) / (to - from) };
    this.#others(id, x);
    this.on.pointed(step);
  }

  /**
   * Shows the same step on the other charts.
   * @param {string} source
   * @param {number | string | undefined} x
   */
  #others(source, x) {
    this.hovering = true;
    for (const id of this.wired) {
      if (id === source) continue;
      if (x === undefined) window.Plotly.Fx.unhover(id);
      else window.Plotly.Fx.hover(id, { xval: typeof x === "string" ? this.axis.at(this.axis.step(x)) : x });
    }
    this.hovering = false;
  }
}

/**
 * The rank whose line is nearest to a click.
 * @param {any} element
 * @param {any} event Plotly's
 * @returns {number | null}
 */
function nearest(element, { points, event }) {
  const { _offset: offset } = element._fullLayout.yaxis;
  const y = event.clientY - element.getBoundingClientRect().top - offset;
  let best = null;
  let least = NEAR_PX;
  for (const point of points) {
    const away = Math.abs(point.yaxis.d2p(point.y) - y);
    if (point.data.meta?.rank === undefined || away >= least) continue;
    [best, least] = [point.data.meta.rank, away];
  }
  return best;
}

/**
 * A trace over steps on an axis.
 * @param {any} trace
 * @param {StepAxis} axis
 */
function placed(trace, axis) {
  if (axis.even) return trace;
  const width = trace.width === undefined ? {} : { width: axis.at(axis.from + trace.width) - axis.at(axis.from) };
  return { ...trace, x: trace.x.map((/** @type {number} */ step) => axis.at(step)), ...width };
}

/**
 * The least and the greatest value of all traces; null: there is none.
 * @param {any[]} traces
 * @returns {[number, number] | null}
 */
export function extentOf(traces) {
  let [low, high] = [Infinity, -Infinity];
  for (const { y } of traces) {
    for (const value of y) {
      if (value === null || Number.isNaN(value)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : null;
}

/**
 * The layout of all charts.
 * @param {StepAxis} axis
 * @param {Colours} colours
 * @param {Partial<ChartOptions>} options
 */
export function layout(axis, colours, { shapes = [], annotations = [], names = [], unit = "plain", zero = true, top, legend = false, size = [0, 168], extent = null }) {
  const { left, right } = margins(size[0]);
  const below = legend ? 42 : 24;
  const { range, values, words } = scale(extent, unit, zero, top);
  const ticks = axis.ticks;
  const lines = { gridcolor: colours.grid, zerolinecolor: colours.line, linecolor: colours.line, automargin: false };
  const on = (/** @type {any} */ part) => (part.xref === "x" && !axis.even ? { ...part, ...moved(part, axis) } : part);
  const room = size[1] - 18 - below;
  return {
    shapes: shapes.map(on),
    annotations: [...annotations.map(on), ...(right > 50 ? beside(names, range, room, colours) : []), ...(extent ? [] : [nothing(axis, colours)])],
    margin: { l: left, r: right, t: 18, b: below },
    paper_bgcolor: colours.panel,
    plot_bgcolor: colours.panel,
    font: { family: "inherit", size: 11, color: colours.muted },
    showlegend: legend,
    legend: { orientation: "h", x: 0, y: -0.12, yanchor: "top", font: { size: 11 } },
    hovermode: "x unified",
    hoverlabel: { bgcolor: colours.panel, bordercolor: colours.line, font: { color: colours.text, size: 11 } },
    dragmode: "zoom",
    xaxis: {
      ...lines, type: axis.even ? "linear" : "date", range: axis.range, showgrid: false, zeroline: false, tickmode: "array", tickvals: ticks.values,
      ticktext: ticks.words, tickangle: 0, ticks: "outside", ticklen: 3, tickcolor: colours.line, hoverformat: axis.even ? ",d" : "%H:%M:%S", spikecolor: colours.muted, spikethickness: 1, spikedash: "solid",
    },
    yaxis: { ...lines, fixedrange: true, range, tickmode: "array", tickvals: values, ticktext: words },
  };
}

/**
 * A shape or annotation whose place is given in steps.
 * @param {any} part
 * @param {StepAxis} axis
 */
function moved({ x, x0, x1 }, axis) {
  return x === undefined ? { x0: axis.at(x0), x1: axis.at(x1) } : { x: axis.at(x) };
}

/**
 * The y axis: range, round values, and these in words, the unit at the top one.
 * @param {[number, number] | null} extent
 * @param {keyof typeof FORMATS} unit
 * @param {boolean} zero whether it begins at 0
 * @param {number} [top] where it ends, if that is given
 */
export function scale(extent, unit, zero, top) {
  if (!extent) return { range: [0, 1], values: [], words: [] };
  const low = zero ? Math.min(0, extent[0]) : extent[0];
  let high = top ?? extent[1];
  if (high <= low) high = low + (Math.abs(low) || 1);
  const margin = top === undefined ? 0.05 * (high - low) : 0;
  const range = [zero ? low : low - margin, high + margin];
  const values = round(range[0], range[1], 5);
  const [by, name] = /** @type {[number, string]} */ (unitOf(unit, Math.max(Math.abs(low), Math.abs(high))));
  const words = values.map((value, at) => {
    const shown = Number((value * by).toPrecision(10));
    const digits = Math.abs(shown) >= 1e5 ? `${Number((shown / 1000).toPrecision(6)).toLocaleString("en")}k` : shown.toLocaleString("en", { maximumFractionDigits: 6 });
    return at === values.length - 1 || unit === "percent" ? `${digits}${name}` : digits;
  });
  return { range, values, words };
}

/**
 * What values are multiplied by, and the unit then.
 * @param {string} unit
 * @param {number} most the greatest value
 */
function unitOf(unit, most) {
  if (unit === "percent") return [100, " %"];
  if (unit === "seconds") return most < 1e-3 ? [1e6, " µs"] : most < 1 ? [1000, " ms"] : most < 300 ? [1, " s"] : [1 / 60, " min"];
  if (unit === "bytes") return most < 1e3 ? [1, " B"] : most < 1e6 ? [1e-3, " kB"] : most < 1e9 ? [1e-6, " MB"] : [1e-9, " GB"];
  return unit === "factor" ? [1, "×"] : [1, ""];
}

/**
 * @param {StepAxis} axis
 * @param {Colours} colours
 */
function nothing(axis, colours) {
  return { text: axis.view.step.length ? "not reported in these steps" : "comes with the first step that all workers have ended", xref: "paper", yref: "paper", x: 0.5, y: 0.5, showarrow: false, font: { size: 12, color: colours.muted } };
}

/**
 * Names and values at the right end of lines, far enough from each other to be read.
 * @param {{words: string, y: number | null, color: string}[]} names
 * @param {number[]} range of the y axis
 * @param {number} room height of the plot in px
 * @param {Colours} colours
 */
function beside(names, range, room, colours) {
  const px = (/** @type {number} */ y) => (1 - (y - range[0]) / (range[1] - range[0])) * room;
  const shown = names.filter(({ y }) => y !== null).sort((a, b) => Number(b.y) - Number(a.y));
  let free = -Infinity;
  return shown.map(({ words, y, color }) => {
    const at = Math.max(px(Number(y)), free + LABEL_PX);
    free = at;
    return {
      text: words, xref: "paper", yref: "paper", x: 1, y: 1 - at / room, xanchor: "left", yanchor: "middle", xshift: 6,
      align: "left", showarrow: false, captureevents: false, font: { size: 11, color: color || colours.muted },
    };
  });
}

/**
 * The ranks in focus in colour, all others grey: as lines, or as a band with its median.
 * @param {View} view
 * @param {Reading} reading
 * @param {Colours} colours
 */
export function computeTraces(view, reading, colours) {
  const { window: steps, focus, group, slow } = reading;
  const format = FORMATS.seconds;
  const few = view.world <= MOST_LINES;
  const traces = few ? greyLines(view, steps, group, colours) : greyBand(view, steps, group, colours);
  const middle = lastMedian(traces.filter(({ line: { width }, name }) => width > 0 && name && name !== "slowest"));
  const others = view.world - group.length;
  const names = [{ words: `${focus === null ? `${integer(view.world)} workers` : `${integer(others)} ${others === 1 ? "other" : "others"}`}<br>${format(middle)}`, y: middle, color: colours.muted }];
  const drawn = focus === null ? [] : group.length > 1 ? groupTraces(view, reading, colours) : focusTraces(view, reading, colours);
  traces.push(...drawn);
  const name = group.length > 1 ? ranksIn(group) : nameOf(view, focus ?? 0);
  const last = lastMedian(drawn.filter(({ meta, name: own }) => meta?.rank !== undefined || (own && own === name)));
  if (last !== null) names.push({ words: `<b>${name}</b><br>${format(last)}`, y: last, color: slow ? colours.badText : colours.accent });
  const whole = wholeStep(view, steps, colours);
  const wholeS = lastMedian(whole);
  if (wholeS !== null) names.push({ words: `whole step<br>${format(wholeS)}`, y: wholeS, color: colours.text });
  return { traces: [...traces, ...whole], names };
}

/**
 * The time of whole steps, where much of it is not the slowest worker's computing: what lies between the lines is
 * waiting for data, and the reduction.
 * @param {View} view
 * @param {number} steps
 * @param {Colours} colours
 * @returns {any[]}
 */
function wholeStep(view, steps, colours) {
  const [whole, slowest] = [metricOf(view, "step_s"), metricOf(view, "compute_max")];
  let [took, computed] = [0, 0];
  whole.value.forEach((stepS, at) => {
    const most = known(slowest.value[at]);
    if (known(stepS) === null || most === null) return;
    took += Number(stepS);
    computed += most;
  });
  if (took <= MUCH * computed) return [];
  const look = { color: colours.text, width: 1.2, dash: "dashdot", name: "whole step", format: FORMATS.seconds };
  return line({ ...whole, low: undefined, high: undefined }, look, steps, null, MOST_POINTS / 3);
}

/**
 * One rank, with what the plan expected of it.
 * @param {View} view
 * @param {Reading} reading
 * @param {Colours} colours
 * @returns {any[]}
 */
function focusTraces(view, { window: steps, focus, slow }, colours) {
  const rank = /** @type {number} */ (focus);
  const series = seriesOf(view, rank);
  if (!series) return [];
  const look = { color: slow ? colours.bad : colours.accent, width: 2, name: nameOf(view, rank), format: FORMATS.seconds, rank };
  return [...ettLine(view, rank, steps, colours), ...line(series, look, steps, slow ? colours.badBand : colours.greyBand, MOST_POINTS / 3)];
}

/**
 * Several ranks: each as a line, or all as a band with its median.
 * @param {View} view
 * @param {Reading} reading
 * @param {Colours} colours
 * @returns {any[]}
 */
function groupTraces(view, { window: steps, group, slow }, colours) {
  const color = slow ? colours.bad : colours.accent;
  const most = MOST_POINTS / (2 * Math.max(1, view.ranks.length));
  if (view.world <= MOST_LINES) {
    return group.flatMap((rank) => {
      const series = seriesOf(view, rank);
      return series ? line(series, { color, width: 1.4, name: `rank ${rank}`, format: FORMATS.seconds, rank }, steps, null, most) : [];
    });
  }
  const { heat } = view;
  const series = heat && quantilesOf(heat, rowsOf(heat, group, true));
  if (!series) return [];
  const look = { color, width: 2, name: ranksIn(group), format: FORMATS.seconds };
  return [...bandOf(series, series.p10, series.p90, slow ? colours.badBand : colours.greyBand, MOST_POINTS / 6), ...line(series, look, steps, null, MOST_POINTS / 3)];
}

/**
 * Rows of the heat map: those with a rank of the group, or those without any.
 * @param {Heat} heat
 * @param {number[]} group
 * @param {boolean} inside
 */
function rowsOf(heat, group, inside) {
  const held = new Set(group.map((rank) => Math.floor(rank / heat.together)));
  return Array.from({ length: heat.rows }, (_, row) => row).filter((row) => held.has(row) === inside);
}

/**
 * The median, p10 and p90 over some rows of the heat map; null: there are no rows.
 * @param {Heat} heat
 * @param {number[]} rows
 */
export function quantilesOf({ step, bucket, values }, rows) {
  if (!rows.length) return null;
  const columns = step.map((_, at) => rows.map((row) => values[row * step.length + at]).filter((value) => value >= 0));
  const of = (/** @type {number} */ level) => columns.map((column) => quantile(column, level));
  return { step, bucket, value: of(0.5), p10: of(0.1), p90: of(0.9) };
}

/**
 * @param {View} view
 * @param {number} rank
 */
function nameOf({ ranks, heat }, rank) {
  if (ranks.includes(rank) || !heat || heat.together === 1) return `rank ${integer(rank)}`;
  const first = rank - (rank % heat.together);
  return `ranks ${first}–${Math.min(heat.world, first + heat.together) - 1}`;
}

/**
 * @param {View} view
 * @param {number} steps
 * @param {number[]} group ranks that are drawn in colour
 * @param {Colours} colours
 */
function greyLines(view, steps, group, colours) {
  const ranks = view.ranks.filter((rank) => !group.includes(rank));
  const most = MOST_POINTS / (2 * Math.max(1, view.ranks.length));
  const all = ranks.map((rank) => ({ rank, series: /** @type {import("./lines.js").Series} */ (seriesOf(view, rank)) }));
  const [low, high] = [[], []].map(() => /** @type {Column} */ ([]));
  view.cellStep.forEach((_, at) => {
    const of = (/** @type {"low" | "high"} */ bound) => all.map(({ series }) => known((series[bound] ?? series.value)[at])).filter((value) => value !== null);
    const [least, greatest] = [of("low"), of("high")];
    low.push(least.length ? Math.min(...least) : null);
    high.push(greatest.length ? Math.max(...greatest) : null);
  });
  const points = Math.max(1, Math.round(steps / view.cellBucket));
  const [below, above] = view.cellBucket > 1 ? [low, high] : [rolling(low, points).middle, rolling(high, points).middle];
  const band = all.length > 1 || view.cellBucket > 1 ? bandOf({ step: view.cellStep, bucket: view.cellBucket }, below, above, colours.greyBand, MOST_POINTS / 6) : [];
  const lines = all.flatMap(({ rank, series: { step, bucket, value } }) =>
    line({ step, bucket, value }, { color: colours.grey, width: 1.2, name: `rank ${rank}`, format: FORMATS.seconds, rank }, steps, null, most));
  return [...band, ...lines];
}

/**
 * The slowest worker's time comes from the steps, so it is exact. So do the quantiles of all workers; those without a
 * group are of the heat map's rows.
 * @param {View} view
 * @param {number} steps
 * @param {number[]} group ranks that are drawn in colour
 * @param {Colours} colours
 */
function greyBand(view, steps, group, colours) {
  const { heat } = view;
  const format = FORMATS.seconds;
  const top = metricOf(view, "compute_max");
  const highest = steps > 1 ? withoutDips(top.high ?? top.value) : (top.high ?? top.value);
  const slowest = line({ ...top, low: undefined, high: undefined, value: highest }, { color: colours.grey, width: 1, dash: "dot", name: "slowest", format }, 1, null, MOST_POINTS / 3);
  if (!heat) return slowest;
  const all = { step: heat.step, bucket: heat.bucket, value: heat.bands.compute_p50, p10: heat.bands.compute_p10, p90: heat.bands.compute_p90 };
  const series = (group.length > 1 && quantilesOf(heat, rowsOf(heat, group, false))) || all;
  return [
    ...bandOf(series, series.p10, series.p90, colours.greyBand, MOST_POINTS / 6),
    ...line({ step: series.step, bucket: series.bucket, value: series.value }, { color: colours.grey, width: 1.6, name: "median", format }, steps, null, MOST_POINTS / 3),
    ...slowest,
  ];
}

/**
 * The greatest of each value and its neighbours: an epoch's last batch may be small, and its step short.
 * @param {Column} values
 * @returns {Column}
 */
function withoutDips(values) {
  return values.map((value, at) => (value === null ? null : Math.max(value, values[at - 1] ?? value, values[at + 1] ?? value)));
}

/**
 * What the plan expected of the rank in focus.
 * @param {View} view
 * @param {number} rank
 * @param {number} steps
 * @param {Colours} colours
 */
function ettLine(view, rank, steps, colours) {
  if (!view.ranks.includes(rank)) return [];
  const value = view.cells.map((cell) => known(cell.ett_s[rank]));
  const look = { color: colours.muted, width: 1, dash: "dash", name: `ETT ${rank}`, format: FORMATS.seconds };
  return line({ step: view.cellStep, bucket: view.cellBucket, value }, look, steps, null, MOST_POINTS / 6);
}

/**
 * @param {View} view
 * @param {Reading} reading
 */
function keyOf(view, { window: steps, focus, group }) {
  const others = focus === null ? "all workers" : "the others";
  const grey = view.world <= MOST_LINES ? `${others}, least to greatest` : `${others}: median, p10–p90 · dotted: slowest of all`;
  const bucket = Math.max(view.bucket, view.cellBucket);
  const smooth = bucket > 1 && steps <= bucket ? "means within least and greatest" : steps > 1 ? `rolling median of ${steps} steps` : "raw";
  return `grey: ${grey} · ${smooth}${focus === null || group.length > 1 || !view.ranks.includes(focus) ? "" : " · dashed: ETT"}`;
}

/**
 * Bands upon each other: the ranks in focus in colour, the others in two greys.
 * @param {View} view
 * @param {number[]} group
 * @param {Colours} colours
 */
function shareAreas(view, group, colours) {
  const most = MOST_POINTS / Math.max(1, view.ranks.length);
  const every = Math.max(1, Math.ceil(view.cellStep.length / most)); // stacked bands need the same x for all ranks, so extremes cannot be kept
  const at = view.cellStep.map((_, i) => i).filter((i) => i % every === 0);
  let below = 0;
  /** @type {{words: string, y: number, color: string}[]} */
  const names = [];
  const traces = view.ranks.map((rank, order) => {
    const y = at.map((i) => known(view.cells[i].share[rank]) ?? 0);
    const last = y.at(-1) ?? 0;
    const coloured = group.includes(rank);
    if (coloured) names.push({ words: `<b>rank ${rank}</b><br>${FORMATS.percent(last)}`, y: below + last / 2, color: colours.badText });
    below += last;
    const color = coloured ? colours.bad : colours.grey;
    return {
      x: at.map((i) => view.cellStep[i]), y, type: "scatter", mode: "lines", stackgroup: "share", name: `rank ${rank}`, showlegend: false,
      line: { width: 0.8, color: colours.panel }, fillcolor: faded(color, coloured ? 0.75 : order % 2 ? 0.45 : 0.3), customdata: y.map(FORMATS.percent),
      hovertemplate: `rank ${rank}: %{customdata}<extra></extra>`,
    };
  });
  return { traces, names };
}

/**
 * @param {View} view
 * @param {Colours} colours
 */
function shareBand(view, colours) {
  const { heat } = view;
  if (!heat) return { traces: [], names: [] };
  const series = { step: heat.step, bucket: heat.bucket, value: heat.bands.share_p50 };
  const of = (/** @type {BandName} */ name, /** @type {string} */ words, /** @type {string} */ dash) =>
    line({ ...series, value: heat.bands[name] }, { color: colours.grey, width: 1.2, dash, name: words, format: FORMATS.percent }, 1, null, MOST_POINTS / 6);
  const traces = [
    ...bandOf(series, heat.bands.share_min, heat.bands.share_max, colours.greyBand, MOST_POINTS / 6),
    ...of("share_max", "greatest", "dot"), ...of("share_p90", "p90", "dash"), ...of("share_p50", "median", "solid"), ...of("share_min", "least", "dot"),
  ];
  return { traces, names: [] };
}

/**
 * @param {string} color "#rrggbb" or "rgb(r, g, b)"
 * @param {number} part
 */
function faded(color, part) {
  const hex = color.match(/^#(..)(..)(..)$/)?.slice(1).map((digits) => parseInt(digits, 16));
  return `rgba(${(hex ?? color.match(/\d+/g) ?? [128, 128, 128]).join(",")},${part})`;
}

/**
 * The median of where some lines end.
 * @param {any[]} traces
 */
function lastMedian(traces) {
  const values = traces.map(({ y }) => lastOf(y)).filter((value) => value !== null).sort((a, b) => a - b);
  return values.length ? values[values.length >> 1] : null;
}

/** @param {Column} column */
const lastOf = (column) => column.findLast((value) => known(value) !== null) ?? null;
