// Rounds of relaxed synchronisation over steps, and the age of gradients.
import { StepAxis } from "./axis.js";
import { CONFIG, layout } from "./charts.js";
import { byId, make, show } from "./dom.js";
import { integer } from "./format.js";

const STALENESS = "chart-staleness";
const PATTERNS = ["", "/", ".", "x", "-", "|"]; // distinguish policies without colour
const MOST_POLICIES = PATTERNS.length; // the newest policies of the steps shown

export class Rounds {
  constructor() {
    /** @type {any} */
    this.answer = null; // the newest answer, if the run has or had rounds
    /** @type {any} */
    this.drawn = undefined; // the chart's element
  }

  get any() {
    return this.answer !== null;
  }

  /**
   * Takes an answer of `GET synchronisation`.
   * @param {any} answer
   * @param {Colours} colours
   */
  update(answer, colours) {
    if (!this.any && answer.newest === null) return;
    this.answer = answer;
    show("rounds", true);
    const words = this.#policies().map((policy) => policy.words);
    const last = answer.newest === null ? "" : `; the last one was in step ${integer(answer.newest)}`;
    const shown = words.length ? words : [`No round in the steps shown${last}.`];
    const list = byId("rounds-words");
    if (list.dataset.shown !== shown.join("\n")) {
      list.dataset.shown = shown.join("\n");
      list.replaceChildren(...shown.map((line) => make("li", {}, line)));
    }
    this.draw(colours);
  }

  /**
   * The charts over steps, for charts.js.
   * @param {Colours} colours
   * @returns {ExtraChart[]}
   */
  charts(colours) {
    if (!this.any) return [];
    const { over_time: over, in_force: policies } = this.answer;
    const world = Math.max(1, ...policies.map((/** @type {any} */ policy) => policy.world));
    /** @type {(column: Column, name: string, color: string, dash: string, more?: object) => object} */
    const line = (column, name, color, dash, more = {}) => ({
      ...this.#line(column), type: "scatter", mode: "lines+markers", name, connectgaps: false,
      line: { color, dash, width: 1.4 }, marker: { color, size: 3 }, ...more,
    });
    const perStep = (/** @type {string} */ column) => over[column].map((/** @type {number} */ sum) => sum / over.bucket);
    const [mean, other, third, fourth] = colours.ranks;
    /** @type {(column: Column, name: string, color: string, dash: string) => object} */
    const seconds = (column, name, color, dash) =>
      line(column, name, color, dash, { mode: "lines", hovertemplate: "%{y:.3~s}s" });
    return [
      {
        id: "chart-contributors", options: { unit: "plain", top: 1.05 * world, legend: true },
        traces: [
          line(over.contributors, "mean", mean, "solid", { hovertemplate: "%{y:.2f}" }),
          line(over.contributors_min, "fewest", other, "dot", { mode: "lines" }),
          line(over.contributors_max, "most", third, "dash", { mode: "lines" }),
        ],
      },
      {
        id: "chart-response", options: { unit: "seconds", legend: true },
        traces: [
          line(over.waited_s, "mean", mean, "solid", { hovertemplate: "%{y:.3~s}s" }),
          seconds(over.waited_s_max, "longest", other, "dot"),
          seconds(over.reduced_s, "reduction", third, "dash"),
          seconds(over.copied_s, "copying", fourth, "dashdot"),
        ],
      },
      {
        id: "chart-dropped", options: { unit: "plain" },
        traces: [{
          type: "bar", name: "", x: over.step.map((/** @type {number} */ step) => step + (over.bucket - 1) / 2), width: over.bucket,
          y: perStep("dropped"), marker: { color: colours.accent, line: { width: 0 } },
          hovertemplate: "%{y:.4~g}<extra></extra>",
        }],
      },
      {
        id: "chart-bytes", options: { unit: "bytes" },
        traces: [line(perStep("bytes"), "", colours.accent, "solid", { hovertemplate: "%{y:.4~s}B<extra></extra>" })],
      },
    ];
  }

  /**
   * Draws the distribution of staleness.
   * @param {Colours} colours
   */
  draw(colours) {
    const element = byId(STALENESS);
    if (!element || !this.any) return;
    const policies = this.#policies();
    const most = Math.max(1, ...policies.map((policy) => policy.staleness.length)); // the last entry counts older gradients, too
    const oldest = Math.max(1, ...policies.map((policy) => policy.staleness.findLastIndex((/** @type {number} */ count) => count > 0)));
    const bins = Math.min(most, oldest + 1);
    const ages = Array.from({ length: bins }, (_, age) => age);
    const traces = policies.map((policy, at) => {
      const all = policy.staleness.reduce((/** @type {number} */ sum, /** @type {number} */ count) => sum + count, 0);
      return {
        type: "bar", name: `${policy.policy}, from step ${policy.from}`, x: ages,
        y: ages.map((age) => (all ? (policy.staleness[age] ?? 0) / all : 0)),
        marker: {
          color: colours.ranks[at], line: { width: 0 },
          pattern: { shape: PATTERNS[at], fillmode: "overlay", fgcolor: colours.panel, size: 5, solidity: 0.35 },
        },
        hovertemplate: "%{y:.1%}",
      };
    });
    const highest = Math.max(0, ...traces.flatMap(({ y }) => y));
    /** @type {Partial<ChartOptions>} */
    const options = { unit: "percent", legend: traces.length > 1, size: [element.clientWidth, element.clientHeight], extent: traces.length ? [0, highest] : null };
    const base = layout(new StepAxis(0, bins - 1), colours, options);
    const ticktext = ages.map((age) => (age && age === most - 1 ? `${age} or more` : age === 1 ? "1 round" : `${age}`));
    const xaxis = { ...base.xaxis, fixedrange: true, zeroline: false, tickmode: "array", tickvals: ages, ticktext };
    window.Plotly.react(element, traces, { ...base, xaxis, bargap: 0.3, dragmode: false }, CONFIG);
    this.drawn = element;
  }

  close() {
    if (this.drawn) window.Plotly.purge(this.drawn);
  }

  /** @returns {any[]} */
  #policies() {
    return this.answer.in_force.slice(-MOST_POLICIES);
  }

  /**
   * x and y, with a null where another policy begins, so that no line joins the rounds of two policies.
   * @param {Column} column
   */
  #line(column) {
    const { over_time: over, in_force: policies } = this.answer;
    const begins = policies.slice(1).map((/** @type {any} */ policy) => policy.from);
    /** @type {number[]} */
    const x = [];
    /** @type {Column} */
    const y = [];
    over.step.forEach((/** @type {number} */ step, /** @type {number} */ at) => {
      if (begins.some((/** @type {number} */ begin) => begin > over.step[at - 1] && begin <= step)) {
        x.push(step - over.bucket / 2);
        y.push(null);
      }
      x.push(step + (over.bucket - 1) / 2);
      y.push(column[at]);
    });
    return { x, y };
  }
}
