// The page that lays runs, or parts of runs, side by side. Its address holds all that was chosen.
import { get } from "./api.js";
import { CONFIG, extentOf, scale } from "./charts.js";
import { byId, connection, crumbs, make, problem, show, whenThere } from "./dom.js";
import { amount, integer, median, number, percent, seconds } from "./format.js";
import { plotly } from "./loading.js";
import { csvOf, LETTERS, namesOf, partsOf, positions, queryOf, smoothed, stateOf } from "./sides.js";
import { termed } from "./terms.js";
import { SIGNS } from "./target.js";
import { onTheme, theme } from "./theme.js";

const POINTS = 1000;
const RUNS = 100; // to choose from
const MOST_RANKS = 32; // drawn one by one

/** @type {Record<string, [string, (value: number | null) => string]>} */
const FIGURES = {
  step_s: ["Time per step", seconds],
  samples_per_s: ["Samples per second", number],
  waste: ["Waste", percent],
  se: ["SE", number],
  loss: ["Loss after as many samples", number],
  compute_mean: ["Compute, mean of ranks", seconds],
  comm_s: ["Communication", seconds],
  ett_error: ["ETT error", percent],
  dif: ["DIF of a step", number],
};
/** @type {Record<string, string>} */
const OF_METRIC = { last: "at last", best: "best", least: "least", greatest: "greatest" };
/** @type {Record<string, [string, (value: number | null) => string]>} */
const OF_TARGET = { after_s: ["Time to", seconds], epoch: ["Epoch of", integer], trained: ["Samples to", integer] };
/** @type {Record<string, string>} */
const OF_MONEY = { cost: "Cost of its steps", waited_cost: "Of it, for waiting" };
/** @type {[string, "seconds" | "percent" | "plain"][]} */
const CHARTS = [["step_s", "seconds"], ["waste", "percent"], ["loss", "plain"]];
/** @type {Record<string, string>} */
const AXES = { step: "steps since each side's first", sample: "samples that the run had trained on", time: "seconds since each side's first step" };

/**
 * Opens the page; returns a function that closes it.
 * @param {Pick<PageData, "palette">} page
 */
export function openCompare(page) {
  const opened = new ComparePage(page);
  opened.open();
  return () => opened.close();
}

class ComparePage {
  /** @param {Pick<PageData, "palette">} page */
  constructor(page) {
    this.page = page;
    this.closed = false;
    this.state = stateOf(location.search);
    /** @type {Run[]} */
    this.runs = [];
    /** @type {Map<string, Switch[]>} */
    this.switches = new Map();
    /** @type {Comparison | null} */
    this.answer = null;
    /** @type {ComparedLines[]} */
    this.lines = [];
    this.asked = 0;
    this.endTheme = () => {};
  }

  async open() {
    crumbs("Compare");
    connection("connecting");
    await whenThere("compare-answer");
    if (this.closed) return;
    for (const name of /** @type {("align" | "smooth")[]} */ (["align", "smooth"])) {
      const control = byId(`compare-${name}`);
      control.value = String(this.state[name]);
      control.addEventListener("change", () => {
        this.#change({ [name]: name === "smooth" ? Number(control.value) : control.value });
        this.#draw();
      });
    }
    byId("compare-link").addEventListener("click", () => navigator.clipboard?.writeText(location.href));
    byId("compare-csv").addEventListener("click", () => this.#download());
    this.endTheme = onTheme(() => this.#draw());
    this.#addSearch();
    this.#drawSides(); // the runs to choose from follow
    await this.#guarded(async () => {
      this.runs = (await get("runs", { limit: RUNS })).items;
      await this.#refresh();
    });
  }

  close() {
    this.closed = true;
    this.endTheme();
    for (const name of [...CHARTS.map(([metric]) => metric), "ranks"]) {
      if (byId(`compare-${name}`)?.data) window.Plotly.purge(`compare-${name}`);
    }
  }

  /** A field for runs that are not among the newest. */
  #addSearch() {
    if (byId("compare-find")) return;
    const input = make("input", { type: "text", id: "compare-find", maxLength: 200 });
    const count = make("span", { id: "compare-count", className: "muted", role: "status" });
    input.addEventListener("change", () => this.#guarded(async () => {
      const name = input.value.trim();
      const { items, next_cursor: more } = await get("runs", { name, limit: RUNS });
      if (this.closed || name !== input.value.trim()) return;
      const chosen = new Set(this.state.sides.map((side) => partsOf(side).run));
      const kept = this.runs.filter(({ id }) => chosen.has(id) && !items.some((/** @type {Run} */ run) => run.id === id));
      this.runs = [...items, ...kept];
      count.textContent = more === null ? `${integer(items.length)} to choose from` : `the newest ${RUNS} of more to choose from`;
      this.#drawSides();
    }));
    byId("compare-sides").before(make("div", { className: "bar" }, make("label", { for: "compare-find" }, "Runs whose name has"), input, count));
  }

  /** @param {Partial<CompareState>} changed */
  #change(changed) {
    Object.assign(this.state, changed);
    const query = queryOf(this.state);
    history.replaceState(history.state, "", query ? `?${query}` : location.pathname);
  }

  /** @param {string[]} sides */
  #choose(sides) {
    this.#change({ sides });
    this.#guarded(() => this.#refresh());
  }

  /** @param {() => Promise<void>} task */
  async #guarded(task) {
    try {
      await task();
    } catch (error) {
      if (error.status === undefined) throw error;
      if (this.closed) return;
      if (error.status === 0) connection("lost");
      problem("compare-problem", error.message);
    }
  }

  async #refresh() {
    const turn = ++this.asked;
    const { sides } = this.state;
    const wanted = sides.map((side) => partsOf(side).run).filter(Boolean);
    await Promise.all([...new Set(wanted)].map((run) => this.#know(run)));
    if (this.closed || turn !== this.asked) return;
    this.#drawSides();
    const whole = sides.filter(Boolean);
    if (whole.length < 2) {
      this.answer = null;
    } else {
      const answer = await compared(whole);
      const lines = await Promise.all(answer.sides.map((side, at) => linesOf(side, namesOf(answer.sides)[at])));
      await plotly();
      if (this.closed || turn !== this.asked) return;
      this.answer = answer;
      this.lines = lines;
    }
    connection("live");
    problem("compare-problem", "");
    this.#show();
  }

  /** @param {string} run */
  async #know(run) {
    const path = `runs/${encodeURIComponent(run)}`;
    if (!this.runs.some(({ id }) => id === run)) this.runs.push(await get(path));
    if (!this.switches.has(run)) this.switches.set(run, await get(`${path}/switches`));
  }

  /** The sides by now, two at least. A control may be used before what was chosen last is drawn. */
  #sides() {
    const { sides } = this.state;
    return sides.length < 2 ? [...sides, "", ""].slice(0, 2) : sides;
  }

  #drawSides() {
    const sides = this.#sides();
    const cards = sides.map((side, at) => this.#card(sides, side, at));
    const add = make("button", { type: "button", id: "compare-add" }, `Add, up to ${LETTERS.length}`);
    add.addEventListener("click", () => this.#choose([...this.#sides(), this.#sides().at(-1) ?? ""]));
    const swap = make("button", { type: "button", id: "compare-swap" }, "Swap A and B");
    swap.addEventListener("click", () => {
      const [first, second, ...rest] = this.#sides();
      this.#choose([second, first, ...rest]);
    });
    const buttons = make("div", { className: "bar" }, swap, ...(sides.length < LETTERS.length ? [add] : []));
    byId("compare-sides").replaceChildren(...cards, buttons);
  }

  /**
   * The controls of a side: its run, the part of it, and where it is some steps, which.
   * @param {string[]} sides
   * @param {string} side
   * @param {number} at
   */
  #card(sides, side, at) {
    const { run, part } = partsOf(side);
    const letter = LETTERS[at];
    const choose = (/** @type {string} */ chosen) => this.#choose(this.#sides().map((other, place) => (place === at ? chosen : other)));
    const runs = make("select", { "aria-label": `Run of ${letter}` }, make("option", { value: "" }, "choose a run"),
      ...this.runs.map(({ id, name, policy }) => make("option", { value: id }, `${name}, ${policy} (${id})`)));
    runs.value = run;
    runs.addEventListener("change", () => choose(runs.value));
    const kind = part.startsWith(":") ? ":" : part;
    const versions = (this.switches.get(run) ?? []).filter(({ version, effective_step }) => version === 0 || effective_step !== null);
    const parts = make("select", { className: "part", "aria-label": `Part of ${letter}`, disabled: !run }, make("option", { value: "" }, "the whole run"),
      ...versions.map(({ version, policy, effective_step }) => make("option", { value: `@${version}` }, `${policy}, from step ${integer(effective_step ?? 0)} on`)),
      make("option", { value: ":" }, "some steps"));
    parts.value = kind;
    parts.addEventListener("change", () => choose(run + (parts.value === ":" ? ":0-" : parts.value)));
    const badge = make("span", { className: "compare-letter", "aria-hidden": "true" }, letter);
    const remove = make("button", { type: "button", "aria-label": `Remove ${letter}`, disabled: sides.length < 3 }, "✕");
    remove.addEventListener("click", () => this.#choose(this.#sides().filter((_, place) => place !== at)));
    const card = make("div", { className: "panel compare-side" }, badge, runs, remove, parts);
    card.style.setProperty("--side", `var(--side-${letter.toLowerCase()})`);
    if (kind === ":") card.append(stepsOf(letter, part, (chosen) => choose(run + chosen)));
    return card;
  }

  #show() {
    show("compare-empty", this.answer === null);
    show("compare-answer", this.answer !== null);
    byId("compare-csv").disabled = this.answer === null;
    if (!this.answer) return;
    byId("compare-words").replaceChildren(...this.answer.words.map((words) => make("p", {}, words)));
    byId("compare-table").replaceChildren(tableOf(this.answer));
    this.#draw();
  }

  #draw() {
    if (!this.answer || !window.Plotly) return;
    const colours = theme(this.page.palette);
    const style = getComputedStyle(document.body);
    const sides = [...LETTERS].map((letter) => style.getPropertyValue(`--side-${letter.toLowerCase()}`).trim());
    for (const [metric, unit] of CHARTS) {
      const traces = this.lines.flatMap((of, at) => this.#traces(of, metric, at, sides[at]));
      window.Plotly.react(`compare-${metric}`, traces, layoutOf(colours, AXES[this.state.align], traces, unit), CONFIG);
    }
    const marks = rankMarks(this.lines, sides);
    const layout = layoutOf(colours, "rank", marks, "seconds");
    layout.yaxis.range[1] *= 1.05; // marks are whole
    Object.assign(layout.xaxis, { type: "category" });
    window.Plotly.react("compare-ranks", marks, layout, CONFIG);
  }

  /**
   * @param {ComparedLines} of
   * @param {string} metric
   * @param {number} at
   * @param {string} color
   */
  #traces(of, metric, at, color) {
    const x = positions(of.columns, this.state.align, of.trained);
    const width = Math.max(1, Math.round(this.state.smooth / of.columns.bucket));
    const { middle, low, high } = smoothed(of.columns[metric] ?? [], width);
    const unknown = x.length > 0 && x.every((place) => place === null);
    const name = `${LETTERS[at]} ${of.label}${unknown ? " (its samples are not known)" : ""}`;
    const line = { type: "scatter", mode: "lines", name, x, y: middle, line: { color, width: 2, dash: at % 2 ? "dash" : "solid" } };
    if (width < 3) return [line];
    const edge = { type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, x };
    return [{ ...edge, y: low }, { ...edge, y: high, fill: "tonexty", fillcolor: `${color}29` }, line];
  }

  #download() {
    if (!this.answer) return;
    const file = new Blob([csvOf(this.answer)], { type: "text/csv" });
    const link = make("a", { href: URL.createObjectURL(file), download: "comparison.csv" });
    link.click();
    URL.revokeObjectURL(link.href);
  }
}

/**
 * Two fields for a range of steps.
 * @param {string} letter
 * @param {string} part
 * @param {(part: string) => void} choose
 */
function stepsOf(letter, part, choose) {
  const [first, last] = part.slice(1).split("-");
  const field = (/** @type {string} */ name, /** @type {string} */ value) =>
    make("input", { type: "number", min: "0", step: "1", value, "aria-label": `${name} step of ${letter}` });
  const [from, to] = [field("First", first), field("Last", last ?? "")];
  for (const input of [from, to]) input.addEventListener("change", () => choose(`:${from.value}-${to.value}`));
  return make("span", { className: "steps small muted" }, "steps", from, "to", to);
}

/**
 * @param {string[]} sides
 * @returns {Promise<Comparison>}
 */
async function compared(sides) {
  return get(`compare?${new URLSearchParams(sides.map((side) => ["side", side]))}`);
}

/**
 * A side's lines: columns of its steps, and each rank's median time of computing.
 * @param {ComparedSide} side
 * @param {string} label
 * @returns {Promise<ComparedLines>}
 */
async function linesOf(side, label) {
  const path = `runs/${encodeURIComponent(side.run)}`;
  const span = { from: side.from, to: side.to, points: POINTS };
  const [columns, ranks] = await Promise.all([
    get(`${path}/steps`, span),
    get(`${path}/worker-steps`, { ...span, points: 100 }),
  ]);
  const times = new Map(ranks.ranks.map((/** @type {number} */ rank, /** @type {number} */ at) => [rank, median(ranks.compute_s[at])]));
  return { label, columns: side.steps ? columns : { bucket: 1, step: [], ended_at: [] }, trained: side.trained, times };
}

/**
 * A mark for each rank and side; of many ranks those whose times differ most between the sides.
 * @param {ComparedLines[]} lines
 * @param {string[]} sides
 */
function rankMarks(lines, sides) {
  const all = [...new Set(lines.flatMap(({ times }) => [...times.keys()]))];
  const apart = (/** @type {number} */ rank) => {
    const known = lines.map(({ times }) => times.get(rank)).filter((time) => typeof time === "number");
    return known.length ? Math.max(...known) - Math.min(...known) : 0;
  };
  const ranks = all.sort((x, y) => apart(y) - apart(x)).slice(0, MOST_RANKS).sort((x, y) => x - y);
  return lines.map(({ label, times }, at) => ({
    type: "scatter", mode: "markers", name: `${LETTERS[at]} ${label}`, x: ranks.map(String), y: ranks.map((rank) => times.get(rank) ?? null),
    marker: { color: sides[at], size: 9, symbol: at % 2 ? "circle" : "circle-open", line: { width: 2, color: sides[at] } },
  }));
}

/**
 * @param {Colours} colours
 * @param {string} title of the x axis
 * @param {any[]} traces
 * @param {"seconds" | "percent" | "plain"} unit of the y axis; without one, the axis need not begin at 0
 */
function layoutOf(colours, title, traces, unit) {
  const axis = { gridcolor: colours.grid, linecolor: colours.line, zerolinecolor: colours.line, fixedrange: true };
  const { range, values, words } = scale(extentOf(traces), unit, unit !== "plain");
  return {
    margin: { l: 56, r: 10, t: 22, b: 36 }, paper_bgcolor: colours.panel, plot_bgcolor: colours.panel,
    font: { family: "inherit", size: 11, color: colours.muted }, hovermode: "x",
    legend: { orientation: "h", x: 1, xanchor: "right", y: 1, yanchor: "bottom", traceorder: "normal" },
    hoverlabel: { bgcolor: colours.panel, bordercolor: colours.line, font: { color: colours.text } },
    dragmode: false, xaxis: /** @type {Record<string, any>} */ ({ ...axis, showgrid: false, title: { text: title, font: { size: 11 }, standoff: 6 } }),
    yaxis: { ...axis, range, tickmode: "array", tickvals: values, ticktext: words },
  };
}

/**
 * A row's name, and how its values are written.
 * @param {ComparedFigure} row
 * @returns {[string, (value: number | null) => string]}
 */
function shownAs({ figure, unit, metric, target }) {
  if (metric) return [`${metric}, ${OF_METRIC[figure] ?? figure}`, number];
  if (target) {
    const [words, form] = OF_TARGET[figure] ?? [figure, number];
    const by = target.source === "training" ? " (training)" : "";
    return [`${words} ${target.metric} ${SIGNS[target.direction]} ${number(target.value)}${by}`, form];
  }
  if (OF_MONEY[figure]) return [OF_MONEY[figure], (value) => (value === null ? "–" : amount(value, unit))];
  return FIGURES[figure] ?? [figure, number];
}

/** @param {Comparison} answer */
function tableOf({ sides, differences }) {
  const letters = sides.map((_, at) => LETTERS[at]);
  const names = namesOf(sides);
  const head = ["Figure", ...letters.map((letter, at) => make("abbr", { title: names[at] }, letter)), ...letters.slice(1).map((letter) => `${letter} − A`)];
  const rows = differences.map((row) => {
    const [name, unit] = shownAs(row);
    const { values, changes } = row;
    return make("tr", {}, make("th", { scope: "row" }, ...termed(name)),
      ...values.map((value) => make("td", {}, unit(value))), ...changes.map((change) => changeCell(change, unit)));
  });
  const heads = make("tr", {}, ...head.map((words) => make("th", { scope: "col" }, words)));
  return make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Table of differences" }, make("table", {}, make("thead", {}, heads), make("tbody", {}, ...rows)));
}

/**
 * @param {Change95 | null} change
 * @param {(value: number | null) => string} unit
 */
function changeCell(change, unit) {
  if (!change) return make("td", { className: "muted" }, "not known");
  const kind = change.better === null ? "" : change.better ? "better" : "worse";
  // Of shares, such as waste, points say more than per cent of per cent.
  const points = unit === percent;
  const shown = points ? signed(change.value, unit).replace("%", "points") : change.ratio === null ? signed(change.value, unit) : signed(change.ratio, percent);
  if (change.low === null || change.high === null) return make("td", {}, signed(change.value, unit));
  const words = change.known ? kind || "differs" : "none shown";
  const range = `${signed(change.low, unit)} to ${signed(change.high, unit)},`;
  return make("td", { className: kind }, shown, make("span", { className: "unit muted" }, `${range} ${words}`));
}

/**
 * @param {number} value
 * @param {(value: number | null) => string} unit
 */
const signed = (value, unit) => {
  const shown = unit(Math.abs(value));
  return Number.parseFloat(shown) === 0 ? shown : `${value > 0 ? "+" : "−"}${shown}`;
};
