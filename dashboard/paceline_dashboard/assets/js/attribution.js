// Why ranks wait, in words and over time.
import { StepAxis } from "./axis.js";
import { CONFIG, layout } from "./charts.js";
import { byId, text } from "./dom.js";
import { percent, seconds } from "./format.js";

/** Cause → name, and a pattern that distinguishes the causes without colour. */
const CAUSES = {
  data: ["sizes of samples", ""],
  node: ["slow nodes", "/"],
  transient: ["passing slowness", "."],
  input: ["data loading", "x"],
};

const ID = "chart-attribution";

export class AttributionChart {
  constructor() {
    /** @type {any} */
    this.answer = null; // the newest answer
    /** @type {any} */
    this.drawn = undefined; // the chart's element
  }

  /**
   * Takes an answer of `GET attribution`.
   * @param {any} answer
   * @param {Colours} colours
   */
  update(answer, colours) {
    this.answer = answer;
    text("attribution-words", answer.words);
    this.draw(colours);
  }

  /** @param {Colours} colours */
  draw(colours) {
    const element = byId(ID);
    if (!element || !this.answer) return;
    const { over_time: over, shares, from, to } = this.answer;
    const traces = Object.entries(CAUSES).map(([cause, [name, shape]], at) => {
      const color = colours.ranks[at];
      return {
        type: "bar", name: `${name} ${percent(shares[cause])}`, y: over[cause],
        x: over.step.map((/** @type {number} */ step) => step + (over.bucket - 1) / 2), width: over.bucket,
        marker: { color, line: { width: 0 }, pattern: { shape, fillmode: "overlay", fgcolor: colours.panel, size: 5, solidity: 0.35 } },
        customdata: over[cause].map(seconds), hovertemplate: "%{customdata}",
      };
    });
    const sums = over.step.map((/** @type {number} */ _, /** @type {number} */ at) => Object.keys(CAUSES).reduce((sum, cause) => sum + Math.max(0, over[cause][at]), 0));
    const least = Math.min(0, ...Object.keys(CAUSES).flatMap((cause) => over[cause]));
    /** @type {Partial<ChartOptions>} */
    const options = { unit: "seconds", legend: true, size: [element.clientWidth, element.clientHeight], extent: sums.length ? [least, Math.max(...sums)] : null };
    const base = layout(new StepAxis(from ?? 0, to ?? 1), colours, options);
    window.Plotly.react(element, traces, { ...base, barmode: "relative", bargap: 0, dragmode: false }, CONFIG);
    this.drawn = element;
  }

  close() {
    if (this.drawn) window.Plotly.purge(this.drawn);
  }
}
