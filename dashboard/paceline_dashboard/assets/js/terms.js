// What the terms of docs/glossary.md mean, where modules write them. Pages written in Python have `tip` of components.py.
import { make } from "./dom.js";

/** @type {Record<string, string>} */
const MEANINGS = {
  ETT: "Estimated training time: what the plan expected of a worker's step.",
  "ETT error": "How far the estimated training time (ETT) of a worker's step is from the measured one, mean of |ETT − T| / T.",
  SE: "Straggler effect: (max T − min T) / mean T of the workers' compute times T in one step. 0 is perfect balance.",
  Waste: "Straggler waste: the share of the workers' time of computing that they wait for the slowest.",
  "DIF of a step": "Data imbalance factor: sample standard deviation of the workers' loads in a step, in the data set's size unit.",
  JCT: "Job completion time: from the run's begin to its end. A run that was resumed keeps its begin.",
  Queued: "From the run's creation until it began: in a queue, and while its processes started.",
  "Dataset DIF": "Data imbalance factor: sample standard deviation of the samples' sizes, in their unit.",
};

/**
 * A name, and a small "?" after it that explains it on hover and focus, if it is a term.
 * @param {string} name
 * @returns {(Node | string)[]}
 */
export function termed(name) {
  const meaning = MEANINGS[name];
  if (!meaning) return [name];
  return [name, make("button", { type: "button", className: "tip", "data-meaning": meaning, "aria-label": `About ${name}: ${meaning}` }, "?")];
}
