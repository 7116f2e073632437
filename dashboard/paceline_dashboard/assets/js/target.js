// What the operator wants of a run's model: in words, and the form that sets it.
import { change } from "./api.js";
import { overtakenWords } from "./changes.js";
import { byId, make, problem, show, text } from "./dom.js";
import { integer, number, seconds } from "./format.js";
import { newestWords } from "./metrics.js";

/** @type {Record<Target["direction"], string>} */
export const SIGNS = { ">=": "≥", "<=": "≤" };

/**
 * A target in words: what is wanted, and when it was met.
 * @param {Target | null} target
 */
export function targetWords(target) {
  if (target === null) return "None is set.";
  const { metric, value, direction, source, met, best, best_step: at } = target;
  const wanted = `${metric} ${SIGNS[direction]} ${number(value)}`;
  const by = source === "training" ? " The training loss counts, as its mean over 100 steps." : "";
  if (met === null) return `${wanted} is not met yet${best === null ? "" : `; the best so far is ${number(best)}${at === null ? "" : `, after step ${integer(at)}`}`}.${by}`;
  const after = met.after_s === null ? "" : ` after ${seconds(met.after_s)}`;
  return `${wanted} was met${after}: in step ${integer(met.step)}, epoch ${met.epoch}, with ${integer(met.trained)} samples (${number(met.value)}).${by}`;
}

/**
 * What a run's model has reached so far; empty: nothing is measured, and nobody wants anything.
 * @param {Pick<Run, "target" | "evaluation">} run
 */
export function reachedWords({ target, evaluation }) {
  const words = evaluation ? [newestWords(evaluation)] : [];
  if (target) words.push(`Target: ${targetWords(target)}`);
  return words.join(" ");
}

export class TargetPanel {
  /**
   * @param {string} path of the run
   * @param {() => Run} run its newest state
   * @param {(run: Run) => void} changed takes the run after a change
   */
  constructor(path, run, changed) {
    this.path = `${path}/target`;
    this.run = run;
    this.changed = changed;
    this.metric = make("input", { id: "target-metric", type: "text", maxLength: 64, required: true });
    this.metric.setAttribute("list", "target-names");
    this.names = make("datalist", { id: "target-names" });
    this.value = make("input", { id: "target-value", type: "number", step: "any", required: true });
    byId("target-metric-place").replaceChildren(this.metric, this.names); // Dash has no plain inputs
    byId("target-value-place").replaceChildren(this.value);
    byId("target-set").addEventListener("click", () => this.#set());
    byId("target-remove").addEventListener("click", () => this.#send("DELETE", {}));
    byId("target-form").addEventListener("toggle", () => this.#fill());
  }

  /** @param {string[]} names of metrics that the run's evaluations have */
  draw(names) {
    const { target } = this.run();
    text("target-words", targetWords(target));
    show("target-remove", target !== null);
    const known = [...new Set([...names, "loss"])];
    if (this.names.children.length !== known.length) this.names.replaceChildren(...known.map((name) => make("option", { value: name })));
  }

  /** Puts the present target into the form when it opens, or a metric that there is. */
  #fill() {
    if (!byId("target-form").open) return;
    const { target } = this.run();
    this.metric.value = target?.metric ?? this.names.firstElementChild?.value ?? "";
    this.value.value = target?.value ?? "";
    byId("target-direction").value = target?.direction ?? (this.metric.value === "loss" ? "<=" : ">=");
    problem("target-problem", "");
  }

  #set() {
    if (!this.metric.reportValidity() || !this.value.reportValidity()) return;
    const wanted = { metric: this.metric.value.trim(), value: Number(this.value.value), direction: byId("target-direction").value };
    this.#send("PUT", { ...wanted, by: "dashboard" });
  }

  /**
   * @param {string} method
   * @param {object} body
   */
  async #send(method, body) {
    try {
      const path = method === "DELETE" ? `${this.path}?by=dashboard` : this.path;
      this.changed(await change(method, path, body, this.run().revision));
      byId("target-form").open = false;
      problem("target-problem", "");
    } catch (error) {
      if (error.status === undefined) throw error;
      problem("target-problem", error.status === 412 ? `${overtakenWords(error)} Set it again.` : error.message);
    }
  }
}
