// What the script measures: evaluations over the whole run, and metrics of training over the steps shown. A run without
// any has none of these charts.
import { StepAxis } from "./axis.js";
import { CONFIG, layout } from "./charts.js";
import { byId, make, show, text } from "./dom.js";
import { integer, number, seconds } from "./format.js";
import { FORMATS, line } from "./lines.js";
import { marks } from "./marks.js";

const LEAST_SPAN = 20; // least number of steps on the axis
const AGAIN_MS = 5000; // between two drawings of a chart to which only the run's end is new

/**
 * The newest evaluation in words.
 * @param {EvaluationAnswer} evaluation
 */
export function newestWords({ step, epoch, trained, after_s: afterS, metrics }) {
  const values = Object.entries(metrics).map(([name, value]) => `${name} ${number(value)}`);
  const where = step < 0 ? "before the first step" : `after step ${integer(step)}, epoch ${epoch}, ${integer(trained)} samples`;
  return `Newest evaluation, ${where}${afterS === null ? "" : ` and ${seconds(afterS)}`}: ${values.join(", ")}.`;
}

/**
 * The best value of each metric so far; where nobody said which are better, its least and its greatest.
 * @param {EvaluationAnswer[]} evaluations ascending
 * @param {Target | null} target
 */
export function bestWords(evaluations, target) {
  const names = [...new Set(evaluations.flatMap(({ metrics }) => Object.keys(metrics)))].sort();
  const said = names.flatMap((name) => {
    const points = evaluations.flatMap(({ step, metrics }) => {
      const value = metrics[name] ?? null;
      return value === null ? [] : [{ step, value }];
    });
    if (!points.length) return [];
    const least = points.reduce((best, each) => (each.value < best.value ? each : best));
    const greatest = points.reduce((best, each) => (each.value > best.value ? each : best));
    const direction = target?.metric === name ? target.direction : name === "loss" ? "<=" : null;
    if (direction === null) return [`${name} between ${valueWords(least)} and ${valueWords(greatest)}`];
    return [`${name} at best ${valueWords(direction === "<=" ? least : greatest)}`];
  });
  return said.length ? `So far: ${said.join("; ")}.` : "";
}

/** @param {{step: number, value: number}} point */
function valueWords({ step, value }) {
  return `${number(value)} ${step < 0 ? "before the first step" : `after step ${integer(step)}`}`;
}

/**
 * The values of a metric by step; of steps that were trained again the newest.
 * @param {Iterable<EvaluationAnswer>} evaluations ascending
 * @param {string} name
 * @returns {{x: number[], y: Column}}
 */
export function courseOf(evaluations, name) {
  /** @type {{x: number[], y: Column}} */
  const course = { x: [], y: [] };
  for (const { step, metrics } of evaluations) {
    if (!(name in metrics)) continue;
    course.x.push(step);
    course.y.push(metrics[name]);
  }
  return course;
}

export class Metrics {
  constructor() {
    /** @type {Map<number, EvaluationAnswer>} */
    this.evaluations = new Map(); // by step
    /** @type {Record<string, StepColumns>} */
    this.training = {}; // by name, of the steps shown
    this.bucket = 1;
    /** @type {Map<string, string>} */
    this.ids = new Map(); // of charts: kind and name → element
    /** @type {Map<string, {key: string, at: number, latest: number}>} */
    this.drawn = new Map(); // by element
  }

  /**
   * Takes evaluations: all, or the newest. Those that are known stay.
   * @param {EvaluationAnswer[]} answer
   */
  add(answer) {
    const all = [...this.evaluations.values(), ...answer].sort((x, y) => x.at - y.at || x.ranks - y.ranks);
    this.evaluations = new Map(all.map((each) => [each.step, each]));
    let newest = 0; // attempt
    for (const { step, attempt } of this.course) {
      if (attempt < newest) this.evaluations.delete(step); // undone
      newest = Math.max(newest, attempt);
    }
  }

  /**
   * Takes an answer of `GET metrics`.
   * @param {{bucket: number, metrics: Record<string, any>}} answer
   */
  update({ bucket, metrics }) {
    this.bucket = bucket;
    this.training = metrics;
  }

  /** The evaluations, in the order of steps. */
  get course() {
    return [...this.evaluations.values()].sort((x, y) => x.step - y.step);
  }

  /** Names of metrics of evaluations. */
  get names() {
    return [...new Set(this.course.flatMap(({ metrics }) => Object.keys(metrics)))].sort();
  }

  /**
   * The charts of training metrics, for charts.js.
   * @param {Colours} colours
   * @param {number} window steps of the rolling median
   * @returns {ExtraChart[]}
   */
  charts(colours, window) {
    if (Object.keys(this.training).length) show("metrics", true); // before the charts get their size
    return Object.entries(this.training).map(([name, { step, value, min: low, max: high }]) => {
      const look = { color: colours.accent, width: 1.6, name, format: FORMATS.plain };
      const series = { step, bucket: this.bucket, value, ...(low ? { low, high } : {}) };
      return { id: this.#chart("training", name), traces: line(series, look, window, colours.greyBand), options: { unit: "plain", zero: false } };
    });
  }

  /**
   * Draws the evaluations: all of them, whichever steps the other charts show.
   * @param {import("./data.js").RunData} data
   * @param {Run} run
   * @param {Colours} colours
   */
  draw(data, run, colours) {
    const { course, names } = this;
    show("metrics", names.length > 0 || Object.keys(this.training).length > 0);
    const newest = course.at(-1);
    text("metrics-words", newest ? `${newestWords(newest)} ${bestWords(course, run.target)}`.trimEnd() : "");
    for (const name of names) this.#plot(name, courseOf(course, name), data, run, colours);
  }

  /**
   * @param {string} name
   * @param {{x: number[], y: Column}} course
   * @param {import("./data.js").RunData} data
   * @param {Run} run
   * @param {Colours} colours
   */
  #plot(name, course, data, run, colours) {
    const id = this.#chart("evaluations", name);
    const element = byId(id);
    if (!element?.clientWidth) return;
    const target = run.target?.metric === name && run.target.source === "evaluations" ? run.target : null;
    const key = JSON.stringify([course, target, colours.accent, data.switches, element.clientWidth]);
    const before = this.drawn.get(id);
    const now = performance.now();
    if (before?.key === key && (before.latest === data.latest || now - before.at < AGAIN_MS)) return;
    this.drawn.set(id, { key, at: now, latest: data.latest });
    const from = Math.min(data.begins, course.x[0]);
    const to = Math.max(data.latest, /** @type {number} */ (course.x.at(-1)), from + LEAST_SPAN - 1);
    const values = [...course.y, ...(target ? [target.value] : [])].filter((value) => value !== null);
    const marked = marks(data, [], [], from, to, colours);
    const wanted = target ? [{ type: "line", xref: "paper", yref: "y", x0: 0, x1: 1, y0: target.value, y1: target.value, line: { color: colours.ok, width: 1.2, dash: "dash" } }] : [];
    /** @type {Partial<ChartOptions>} */
    const options = {
      ...marked, shapes: [...marked.shapes, ...wanted], unit: "plain", zero: false, size: [element.clientWidth, element.clientHeight],
      extent: values.length ? [Math.min(...values), Math.max(...values)] : null,
    };
    const met = target?.met?.step;
    const trace = {
      ...course, type: "scatter", mode: "lines+markers", name, connectgaps: false, line: { color: colours.accent, width: 1.4 },
      marker: { color: course.x.map((step) => (step === met ? colours.ok : colours.accent)), size: course.x.map((step) => (step === met ? 10 : 5)) },
      hovertemplate: "%{y:.4~g}<extra></extra>",
    };
    window.Plotly.react(element, [trace], { ...layout(new StepAxis(from, to), colours, options), dragmode: false }, CONFIG);
  }

  /**
   * The element of a metric's chart, with its card.
   * @param {"evaluations" | "training"} kind
   * @param {string} name
   */
  #chart(kind, name) {
    const known = this.ids.get(`${kind} ${name}`);
    if (known) return known;
    const id = `chart-${kind}-${this.ids.size}`;
    this.ids.set(`${kind} ${name}`, id);
    const title = kind === "training" ? `${name}, in training` : name;
    const buttons = ["png", "svg", "csv"].map((form) => make("button", { type: "button", "data-chart": id, "data-save": form }, form.toUpperCase()));
    const save = make("details", { className: "save" }, make("summary", { "aria-label": `Save ${title}`, title: "Save as a picture or as numbers" }, "Save"), make("div", { className: "save-forms" }, ...buttons));
    const card = make("figure", { className: "panel chart" }, make("figcaption", {}, title, save), make("div", { id, className: "plot", role: "img", "aria-label": title }));
    byId(`metrics-${kind}`).append(card);
    return id;
  }

  close() {
    for (const id of this.drawn.keys()) {
      const element = byId(id);
      if (element) window.Plotly.purge(element);
    }
  }
}
