// Forecasts against outcomes, over all runs.
import { BASE, get } from "./api.js";
import { CONFIG } from "./charts.js";
import { byId, connection, crumbs, make, poll, problem, show, text, whenThere } from "./dom.js";
import { integer, moment, percent, plural } from "./format.js";
import { plotly } from "./loading.js";
import { onTheme, theme } from "./theme.js";

const PERIOD_S = 10;
const MOST = 500; // newest outcomes in the chart
const LISTED = 50; // and in the table

/**
 * Opens the page; returns a function that closes it.
 * @param {Pick<PageData, "palette">} page
 */
export function openForecasts(page) {
  const opened = new ForecastsPage(page);
  opened.open();
  return () => opened.close();
}

class ForecastsPage {
  /** @param {Pick<PageData, "palette">} page */
  constructor(page) {
    this.page = page;
    this.closed = false;
    this.drawn = false;
    /** @type {Outcome[]} */
    this.items = [];
    /** @type {(() => void)[]} */
    this.endings = [];
  }

  async open() {
    crumbs("Forecasts");
    connection("connecting");
    await whenThere("forecasts-outcomes");
    if (this.closed) return;
    byId("forecasts-runs").addEventListener("change", () => this.#refresh());
    this.endings.push(
      onTheme(() => this.#draw()),
      poll(() => this.#refresh(), PERIOD_S),
    );
  }

  close() {
    this.closed = true;
    for (const end of this.endings) end();
    if (this.drawn) window.Plotly.purge("chart-outcomes");
  }

  async #refresh() {
    const simulated = byId("forecasts-runs").value;
    try {
      const answer = await get("forecasts/scores", { simulated, limit: MOST });
      if (answer.items.length) await plotly();
      if (this.closed || simulated !== byId("forecasts-runs").value) return;
      connection("live");
      problem("forecasts-problem", "");
      this.#show(answer);
    } catch (error) {
      if (error.status === undefined) throw error;
      if (this.closed) return;
      if (error.status === 0) connection("lost");
      else problem("forecasts-problem", error.message);
    }
  }

  /** @param {{all: Score, presets: (Score & {policy: string})[], items: Outcome[]}} answer */
  #show({ all, presets, items }) {
    this.items = items;
    show("forecasts-empty", all.count === 0);
    show("forecasts-outcomes", all.count > 0);
    text("forecasts-count", all.count ? plural(all.count, "switch", "switches") : "");
    text("forecasts-inside", percent(all.inside));
    text("forecasts-inside-note", `of ${plural(all.count, "outcome")}`);
    text("forecasts-median", percent(all.median_error));
    text("forecasts-p90", percent(all.p90_error));
    text("forecasts-bias", signed(all.bias));
    const head = ["Preset", "Switches", "Inside 95 %", "Median error", "90 % below", "Bias"];
    const scores = presets.map((preset) => [
      preset.policy, integer(preset.count), percent(preset.inside), percent(preset.median_error),
      percent(preset.p90_error), signed(preset.bias),
    ]);
    byId("forecasts-presets").replaceChildren(table(head, scores));
    const names = ["Run", "Preset", "When", "Ranks", "Nodes", "Forecast", "Measured", "Error", "Inside 95 %"];
    const rows = items.slice(0, LISTED).map((item) => [
      make("a", { href: new URL(`runs/${encodeURIComponent(item.run)}`, BASE).pathname }, item.run),
      item.policy, moment(item.at), integer(item.ranks), integer(item.nodes),
      between(item.forecast), between(item), signed(item.error), item.inside ? "yes" : "no",
    ]);
    byId("forecasts-items").replaceChildren(table(names, rows));
    this.#draw();
  }

  #draw() {
    if (!this.items.length || !window.Plotly) return;
    const colours = theme(this.page.palette);
    window.Plotly.react("chart-outcomes", traces(this.items, colours), layout(colours), CONFIG);
    this.drawn = true;
  }
}

/**
 * The outcomes inside the forecasts' intervals, those outside, and the line of equal values.
 * @param {Outcome[]} items
 * @param {Colours} colours
 */
export function traces(items, colours) {
  const all = items.flatMap(({ forecast, saving }) => [forecast.saving, saving]);
  const ends = [Math.min(0, ...all), Math.max(0, ...all)];
  const marks = (/** @type {boolean} */ inside, /** @type {string} */ color, /** @type {string} */ symbol) => {
    const some = items.filter((item) => item.inside === inside);
    const bars = (/** @type {{saving: number, low: number, high: number}[]} */ of) => ({
      type: "data", symmetric: false, color, thickness: 1, width: 3,
      array: of.map(({ saving, high }) => high - saving),
      arrayminus: of.map(({ saving, low }) => saving - low),
    });
    return {
      type: "scatter", mode: "markers", name: inside ? "inside the forecast's interval" : "outside",
      x: some.map(({ forecast }) => forecast.saving), y: some.map(({ saving }) => saving),
      error_x: bars(some.map(({ forecast }) => forecast)), error_y: bars(some),
      marker: { color, symbol, size: 8 }, text: some.map(({ policy, run }) => `${policy}, run ${run}`),
      hovertemplate: "%{text}<br>forecast %{x:.1%}, measured %{y:.1%}<extra></extra>",
    };
  };
  return [
    marks(true, colours.accent, "circle"),
    marks(false, colours.mark, "x"),
    {
      type: "scatter", mode: "lines", name: "as forecast", x: ends, y: ends, hoverinfo: "skip",
      line: { color: colours.muted, width: 1, dash: "dash" },
    },
  ];
}

/** @param {Colours} colours */
function layout(colours) {
  const axis = { gridcolor: colours.grid, zerolinecolor: colours.muted, zerolinewidth: 0.5, linecolor: colours.line, tickformat: "~%", automargin: true };
  return {
    margin: { l: 56, r: 12, t: 24, b: 36 },
    paper_bgcolor: colours.panel,
    plot_bgcolor: colours.panel,
    font: { family: "inherit", size: 11, color: colours.muted },
    legend: { orientation: "h", x: 1, xanchor: "right", y: 1, yanchor: "bottom" },
    hoverlabel: { bgcolor: colours.panel, bordercolor: colours.line, font: { color: colours.text } },
    dragmode: false,
    xaxis: { ...axis, title: { text: "forecast saving", font: { size: 11 }, standoff: 6 }, fixedrange: true },
    yaxis: { ...axis, title: { text: "measured saving", font: { size: 11 }, standoff: 6 }, fixedrange: true },
  };
}

/** @param {number | null} value */
function signed(value) {
  if (value === null) return percent(value);
  const shown = percent(Math.abs(value));
  return Number.parseFloat(shown) === 0 ? shown : `${value > 0 ? "+" : "−"}${shown}`;
}

/** @param {{saving: number, low: number, high: number}} of */
function between({ saving, low, high }) {
  return `${percent(saving)} (${percent(low)} to ${percent(high)})`;
}

/**
 * @param {string[]} head
 * @param {(string | Node)[][]} rows
 */
function table(head, rows) {
  const line = (/** @type {(string | Node)[]} */ [first, ...others]) =>
    make("tr", {}, make("th", { scope: "row" }, first), ...others.map((value) => make("td", {}, value)));
  const names = make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)));
  const parts = [make("thead", {}, names), make("tbody", {}, ...rows.map(line))];
  return make("div", { className: "scroll" }, make("table", {}, ...parts));
}
