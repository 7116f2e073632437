// The run page's line charts, drawn by Plotly.
import { integer, quantile } from "./format.js";
import { gaps, marks } from "./marks.js";

export const MOST_LINES = 16; // with more workers, quantiles are drawn
const UNSEEN_MS = 1500; // between two drawings of a chart that is scrolled out of sight
const MOST_POINTS = 6000; // per chart, which SVG draws in a few milliseconds
const SYMBOLS = ["circle", "square", "diamond", "cross", "triangle-up", "x", "star", "pentagon", "triangle-down"];
export const CONFIG = { displayModeBar: false, responsive: true, doubleClick: false };

const METRIC_CHARTS = [
  { id: "chart-se", metric: "se", hover: ".3f", tick: "~g" },
  { id: "chart-waste", metric: "waste", hover: ".1%", tick: "~%" },
  { id: "chart-dif", metric: "dif", hover: ".4~s", tick: "~s" },
  { id: "chart-loss", metric: "loss", hover: ".4f", tick: "~g" },
];

export class Charts {
  /**
   * @param {{zoomed: (from: number, to: number) => void, reset: () => void, seen: () => void}} on steps were chosen;
   *   double-clicked to go back; scrolled to
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
    this.range = [0, 0]; // steps drawn, [from, to]
    this.observer = new IntersectionObserver((entries) => this.#seen(entries));
  }

  /**
   * Draws everything: `view` over the steps [from, to] of the x axis; and `others`, more
   * charts over steps.
   * @param {import("./data.js").RunData} data
   * @param {View} view
   * @param {number} from
   * @param {number} to
   * @param {Colours} colours
   * @param {ExtraChart[]} others
   */
  draw(data, view, from, to, colours, others) {
    const missing = gaps(view.step, view.bucket);
    const marked = marks(data, view.coasts, missing, from, to, colours);
    const lines = view.ranks.length <= MOST_LINES;
    this.#plot("chart-compute", lines ? computeLines(view, colours) : computeBand(view, colours), from, to, colours, {
      ...marked, tick: "~s", suffix: "s", legend: true,
    });
    const share = lines ? shareAreas(view, colours) : shareBand(view, colours);
    const labels = lines ? shareLabels(view, share, colours) : [];
    this.#plot("chart-share", share, from, to, colours, {
      shapes: marked.shapes, annotations: [...marked.annotations, ...labels],
      tick: "~%", top: lines ? 1 : undefined, legend: !lines,
    });
    for (const { id, metric, hover, tick } of METRIC_CHARTS) {
      this.#plot(id, [metricLine(view, metric, hover, colours)], from, to, colours, { ...marked, tick });
    }
    for (const { id, traces, options } of others) this.#plot(id, traces, from, to, colours, { ...marked, ...options });
    this.range = [from, to];
    // The axis moved under a resting pointer: show the step that is now under it on the other charts.
    if (this.pointer) this.#others(this.pointer.id, Math.round(from + this.pointer.part * (to - from)));
  }

  close() {
    this.observer.disconnect();
    for (const id of this.wired) window.Plotly.purge(id);
  }

  /**
   * @param {string} id
   * @param {object[]} traces
   * @param {number} from
   * @param {number} to
   * @param {Colours} colours
   * @param {Partial<ChartOptions>} options
   */
  #plot(id, traces, from, to, colours, options) {
    const element = document.getElementById(id);
    const now = performance.now();
    if (!element || (!this.visible.has(id) && now - (this.drawnAt.get(id) ?? -Infinity) < UNSEEN_MS)) return;
    this.drawnAt.set(id, now);
    window.Plotly.react(element, traces, layout(from, to, colours, options), CONFIG);
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
    element.on("plotly_relayout", (/** @type {Record<string, number>} */ change) => {
      const [from, to] = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      if (from !== undefined && to !== undefined) this.on.zoomed(Math.round(from), Math.round(to));
    });
    element.on("plotly_doubleclick", () => this.on.reset());
    element.on("plotly_hover", (/** @type {any} */ event) => this.#hover(id, event.points[0]?.x));
    element.on("plotly_unhover", () => this.#hover(id, undefined));
  }

  /**
   * @param {string} id
   * @param {number | undefined} x
   */
  #hover(id, x) {
    if (this.hovering) return; // this event comes from our own call
    const [from, to] = this.range;
    this.pointer = x === undefined ? null : { id, part: (x - from) / (to - from) };
    this.#others(id, x);
  }

  /**
   * Shows the same step on the other charts.
   * @param {string} source
   * @param {number | undefined} x
   */
  #others(source, x) {
    this.hovering = true;
    for (const id of this.wired) {
      if (id === source) continue;
      if (x === undefined) window.Plotly.Fx.unhover(id);
      else window.Plotly.Fx.hover(id, { xval: x });
    }
    this.hovering = false;
  }
}

/**
 * The layout of all charts, over the steps [from, to].
 * @param {number} from
 * @param {number} to
 * @param {Colours} colours
 * @param {Partial<ChartOptions>} options
 */
export function layout(from, to, colours, { shapes = [], annotations = [], tick, suffix = "", top, legend = false }) {
  const axis = { gridcolor: colours.line, zerolinecolor: colours.line, linecolor: colours.line, automargin: false };
  return {
    shapes,
    annotations,
    margin: { l: 46, r: 12, t: 18, b: legend ? 42 : 24 },
    paper_bgcolor: colours.panel,
    plot_bgcolor: colours.panel,
    font: { family: "inherit", size: 11, color: colours.muted },
    showlegend: legend,
    legend: { orientation: "h", x: 0, y: -0.12, yanchor: "top", font: { size: 11 } },
    hovermode: "x unified",
    hoverlabel: { bgcolor: colours.panel, bordercolor: colours.line, font: { color: colours.text, size: 11 } },
    dragmode: "zoom",
    xaxis: { ...axis, range: [from - 0.5, to + 0.5], showgrid: false, tickformat: ",d", nticks: 8, hoverformat: ",d",
      spikecolor: colours.muted, spikethickness: 1, spikedash: "solid" },
    yaxis: {
      ...axis, fixedrange: true, rangemode: "tozero", tickformat: tick, ticksuffix: suffix, nticks: 6,
      ...(top === undefined ? {} : { range: [0, top] }),
    },
  };
}

/**
 * @param {View} view
 * @param {string} metric
 * @param {string} hover
 * @param {Colours} colours
 */
function metricLine(view, metric, hover, colours) {
  const y = view.metrics[metric] ?? [];
  /** @type {[Column, Column] | null} */
  const bounds = view.bucket > 1 ? [view.metrics[`${metric}_min`], view.metrics[`${metric}_max`]] : null;
  return {
    ...thin(...broken(view.step, y, view.bucket, bounds), MOST_POINTS),
    type: "scatter", mode: "lines", name: "", line: { color: colours.accent, width: 1.4 },
    connectgaps: false, hovertemplate: `%{y:${hover}}<extra></extra>`,
  };
}

/**
 * @param {View} view
 * @param {Colours} colours
 */
function computeLines(view, colours) {
  const most = MOST_POINTS / (2 * Math.max(1, view.ranks.length));
  return view.ranks.flatMap((rank, at) => {
    const color = colours.ranks[at % colours.ranks.length];
    const trace = (/** @type {CellName} */ name) => ({
      ...thin(...broken(view.cellStep, column(view, name, rank), view.cellBucket), most),
      type: "scatter", connectgaps: false, legendgroup: `${rank}`,
    });
    return [
      {
        ...trace("compute_s"), mode: "lines+markers", name: `rank ${rank}`, line: { color, width: 1.6 },
        // Marks on some points distinguish ranks without colour.
        marker: { symbol: SYMBOLS[at % SYMBOLS.length], size: 6, maxdisplayed: 12, color },
        hovertemplate: "%{y:.3~s}s",
      },
      {
        ...trace("ett_s"), mode: "lines", name: `ETT ${rank}`, showlegend: false,
        line: { color, width: 1, dash: "dash" }, hovertemplate: "%{y:.3~s}s",
      },
    ];
  });
}

/** @typedef {[label: string, q: number, dash: string, width: number]} Level */
/** @type {Level[]} */
const BAND = [
  ["max", 1, "solid", 1.8],
  ["p90", 0.9, "dash", 1.4],
  ["p50", 0.5, "dot", 1.4],
];

/**
 * The slowest rank's time comes from the steps, so it is exact even with few workers' rows here.
 * @param {View} view
 * @param {Colours} colours
 */
function computeBand(view, colours) {
  const [max, ...others] = quantileLines(view, "compute_s", BAND, colours, "%{y:.3~s}s");
  const slowest = metricLine(view, "compute_max", ".3~s", colours);
  return [{ ...max, x: slowest.x, y: slowest.y }, ...others];
}

/**
 * @param {View} view
 * @param {Colours} colours
 */
function shareBand(view, colours) {
  return quantileLines(view, "share", [...BAND, ["min", 0, "dashdot", 1.4]], colours, "%{y:.3~p}");
}

/**
 * @param {View} view
 * @param {CellName} name
 * @param {Level[]} levels
 * @param {Colours} colours
 * @param {string} hovertemplate
 */
function quantileLines(view, name, levels, colours, hovertemplate) {
  return levels.map(([label, q, dash, width], at) => {
    const y = view.cells.map((cell) => quantileOf(cell, name, q));
    return {
      ...thin(...broken(view.cellStep, y, view.cellBucket), MOST_POINTS / levels.length),
      type: "scatter", mode: "lines", name: `${label} of ${view.ranks.length < view.world ? `${integer(view.ranks.length)} of ` : ""}${integer(view.world)} workers`, connectgaps: false,
      line: { color: colours.ranks[at], dash, width }, hovertemplate,
    };
  });
}

/**
 * Remembers the result: sorting a thousand workers at each step would take longer than drawing.
 * @param {Cell} cell
 * @param {CellName} name
 * @param {number} q
 */
function quantileOf(cell, name, q) {
  cell.quantiles ??= {};
  return (cell.quantiles[`${name}${q}`] ??= quantile(cell[name], q));
}

/**
 * @param {View} view
 * @param {Colours} colours
 */
function shareAreas(view, colours) {
  const most = MOST_POINTS / Math.max(1, view.ranks.length);
  const every = Math.max(1, Math.ceil(view.cellStep.length / most)); // stacked bands need the same x for all ranks, so extremes cannot be kept
  const at = view.cellStep.map((_, i) => i).filter((i) => i % every === 0);
  return view.ranks.map((rank, order) => ({
    x: at.map((i) => view.cellStep[i]),
    y: at.map((i) => known(view.cells[i].share[rank]) ?? 0),
    type: "scatter", mode: "lines", stackgroup: "share", name: `rank ${rank}`,
    line: { width: 0.8, color: colours.ranks[order % colours.ranks.length] },
    hovertemplate: "%{y:.1%}",
  }));
}

/**
 * The rank of each band, written inside the band at its right end.
 * @param {View} view
 * @param {any[]} traces
 * @param {Colours} colours
 */
function shareLabels(view, traces, colours) {
  let below = 0;
  return traces.flatMap((trace, order) => {
    const share = trace.y.at(-1) ?? 0;
    const y = below + share / 2;
    below += share;
    if (share < 0.06) return [];
    return [{
      text: `rank ${view.ranks[order]}`, x: trace.x.at(-1), y, xref: "x", yref: "y", xanchor: "right",
      yanchor: "middle", showarrow: false, font: { size: 11, color: colours.text },
      bgcolor: colours.panel, opacity: 0.85, borderpad: 1, captureevents: false,
    }];
  });
}

const known = (/** @type {number | undefined} */ value) => (value === undefined || Number.isNaN(value) ? null : value);

/**
 * @param {View} view
 * @param {CellName} name
 * @param {number} rank
 */
function column(view, name, rank) {
  return view.cells.map((cell) => known(cell[name][rank]));
}

/**
 * x and y with a null wherever steps are missing, so that no line bridges a gap; keeps extremes if given.
 * @param {number[]} step
 * @param {Column} y
 * @param {number} bucket
 * @param {[Column, Column] | null} bounds
 * @returns {[number[], Column]}
 */
function broken(step, y, bucket, bounds = null) {
  /** @type {number[]} */
  const xs = [];
  /** @type {Column} */
  const ys = [];
  for (let i = 0; i < step.length; i++) {
    if (i > 0 && step[i] - step[i - 1] > 1.5 * bucket) {
      xs.push(step[i - 1] + bucket);
      ys.push(null);
    }
    if (bounds) {
      xs.push(step[i], step[i] + bucket / 2);
      ys.push(bounds[0][i], bounds[1][i]);
    } else {
      xs.push(step[i]);
      ys.push(y[i] ?? null);
    }
  }
  return [xs, ys];
}

/**
 * About `most` points at most: the least and the greatest of each group, so that no spike is lost.
 * @param {number[]} x
 * @param {Column} y
 * @param {number} most
 */
function thin(x, y, most) {
  if (x.length <= most) return { x, y };
  const size = Math.ceil((2 * x.length) / most);
  /** @type {number[]} */
  const xs = [];
  /** @type {Column} */
  const ys = [];
  for (let start = 0; start < x.length; start += size) {
    let low = -1;
    let high = -1;
    let gap = -1;
    for (let i = start; i < Math.min(start + size, x.length); i++) {
      const value = y[i];
      if (value === null) gap = i;
      else {
        if (low < 0 || value < Number(y[low])) low = i;
        if (high < 0 || value > Number(y[high])) high = i;
      }
    }
    const kept = new Set([low, high, gap].filter((i) => i >= 0));
    for (const i of [...kept].sort((a, b) => a - b)) {
      xs.push(x[i]);
      ys.push(y[i]);
    }
  }
  return { x: xs, y: ys };
}
