// The banner under a run's title: the verdict, what it costs, what would help, and the buttons for it.
import { get } from "./api.js";
import { byId, make, show, text } from "./dom.js";
import { duration } from "./format.js";
import { ENDED, simulated } from "./summary.js";
import { cost, failure, headline, remedy } from "./verdict.js";

const FORECAST_S = 120; // least time between two requests for forecasts: the server simulates for seconds
const FIRST_STEPS = 100; // before the first request for forecasts: with fewer, they are vague

export class Banner {
  /**
   * @param {string} path of the run's REST
   * @param {import("./whatif.js").WhatIf} whatif
   * @param {OpenSwitchDialog} openDialog
   */
  constructor(path, whatif, openDialog) {
    this.path = path;
    this.whatif = whatif;
    /** @type {Verdict | null} */
    this.verdict = null;
    this.forecastAfter = 0;
    this.hung = "";
    const choose = () => openDialog(whatif.best?.policy, whatif.best?.parameters);
    byId("verdict-switch").addEventListener("click", choose);
    byId("dock-switch").addEventListener("click", choose);
    byId("dock-stop").addEventListener("click", () => byId("stop-open").click());
    byId("verdict-why").addEventListener("click", () => {
      const panel = byId("workers-title");
      panel.scrollIntoView({ block: "start" });
      panel.focus({ preventScroll: true });
    });
    byId("verdict-more").addEventListener("click", () => this.#more(byId("verdict-others").hidden));
    byId("run-log-copy").addEventListener("click", () => navigator.clipboard.writeText(byId("run-log").textContent));
  }

  /**
   * Asks for forecasts where the verdict calls for a decision, and not more often than it helps.
   * @param {Run} run
   */
  async forecast(run) {
    const worth = this.verdict && ["watch", "held-up"].includes(this.verdict.level) && this.verdict.steps >= FIRST_STEPS;
    if (!worth || ENDED.includes(run.state) || performance.now() < this.forecastAfter) return;
    this.forecastAfter = performance.now() + 1000 * FORECAST_S;
    await this.whatif.ask();
  }

  /**
   * Asks whether a run hangs of which no step has come for long.
   * @param {number | null} silentS how long
   */
  async hang(silentS) {
    if (silentS === null) this.hung = "";
    else {
      const answer = await get(`${this.path}/hang`);
      this.hung = answer.hung ? answer.words : "";
    }
  }

  /**
   * @param {Run} run
   * @param {{waited: number, lost: number, since: number | null}} hours of workers, and since which time
   * @param {number | null} leftS
   */
  draw(run, hours, leftS) {
    const line = this.hung && run.state === "running" ? { tone: "bad", icon: "!", title: this.hung } : headline(run, this.verdict);
    byId("verdict").className = `verdict ${line.tone}`;
    text("verdict-icon", line.icon);
    text("verdict-title", line.title);
    const ended = ENDED.includes(run.state);
    const verdict = this.verdict;
    const calls = verdict !== null && !this.hung && ["watch", "held-up"].includes(verdict.level);
    const failed = run.state === "failed" ? failure(run) : null;
    pair("verdict-cost", failed ? failed.cost : calls ? cost(run, verdict, hours) : null);
    pair("verdict-remedy", failed ? failed.remedy : calls && !ended ? remedy(verdict, this.whatif.best, this.whatif.answer?.slow_node ?? null, leftS) : null);
    const second = calls ? verdict?.causes[1] : undefined;
    pair("verdict-also", second ? ["Also", `: ${ended ? second.words : `${second.what}.`}`] : null);
    this.#buttons(run, calls && !ended);
    this.#others(second ? 2 : 1);
    show("verdict-why", verdict !== null && verdict.causes.length > 0);
  }

  /**
   * @param {Run} run
   * @param {boolean} calls whether the verdict calls for a decision
   */
  #buttons(run, calls) {
    const best = calls ? this.whatif.best : undefined;
    show("verdict-switch", best !== undefined);
    show("dock", !ENDED.includes(run.state));
    const words = best ? `Switch to ${best.label}…` : "Switch policy…";
    if (best) text("verdict-switch", words);
    text("dock-switch", words);
    byId("dock-switch").className = best ? "primary" : "";
    const nodes = calls ? (this.verdict?.causes[0]?.nodes ?? []) : [];
    show("verdict-replace", nodes.length === 1 && (run.nodes_max ?? 1) > 1 && !simulated(run));
    if (nodes.length === 1) byId("verdict-replace").value = nodes[0];
  }

  /** @param {number} told how many causes the lines above tell */
  #others(told) {
    const rest = this.verdict?.causes.slice(told) ?? [];
    show("verdict-more", rest.length > 0);
    if (!rest.length) return this.#more(false);
    text("verdict-more", byId("verdict-others").hidden ? `and ${rest.length} more` : "less");
    const shown = JSON.stringify(rest.map((cause) => cause.words));
    const list = byId("verdict-others");
    if (list.dataset.shown === shown) return undefined;
    list.dataset.shown = shown;
    list.replaceChildren(...rest.map((cause) => make("li", {}, cause.words)));
    return undefined;
  }

  /** @param {boolean} open */
  #more(open) {
    show("verdict-others", open);
    byId("verdict-more").setAttribute("aria-expanded", String(open));
  }
}

/**
 * A line of which the first words are bold; null hides it.
 * @param {string} id
 * @param {[string, string] | null} words
 */
function pair(id, words) {
  show(id, words !== null);
  if (words === null) return;
  const element = byId(id);
  if (element.textContent === words.join("")) return;
  element.replaceChildren(make("b", {}, words[0]), words[1]);
}

/**
 * How long no step has come, in words for the header.
 * @param {number} silentS
 */
export const silence = (silentS) => `last step ${duration(silentS)} ago`;
