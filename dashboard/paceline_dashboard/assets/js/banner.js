// The banner under a run's title: the verdict, what it costs, what would help, and the buttons for it.
import { BASE, get } from "./api.js";
import { ranksIn } from "./costs.js";
import { byId, make, show, text } from "./dom.js";
import { duration } from "./format.js";
import { ENDED, observed, simulated } from "./summary.js";
import { coasting, cost, failure, hanging, headline, nextTime, nodeFirst, remedy } from "./verdict.js";

const FORECAST_S = 120; // least time between two requests for forecasts: the server simulates for seconds
// Steps of a verdict before forecasts are asked for: with fewer, they are vague. Verdicts over 1,000 ranks and more rest
// on fewer: there a forecast takes minutes, and only the reader asks for one.
const FIRST_STEPS = 100;

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
    /** @type {Hang | null} */
    this.hung = null; // what keeps the run from ending a step
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
    const answer = silentS === null ? null : await get(`${this.path}/hang`);
    this.hung = answer?.hung ? answer : null;
  }

  /**
   * @param {Run} run
   * @param {object} known
   * @param {import("./costs.js").Cost} known.cost
   * @param {number | null} known.leftS
   * @param {number | null} known.coastsSince step since which no controller plans; null: one does
   * @param {boolean} known.local true if rank 0 plans meanwhile
   * @param {(rank: number) => string} known.nodeOf of each rank; empty: unknown
   */
  draw(run, { cost: lost, leftS, coastsSince, local, nodeOf }) {
    const verdict = this.verdict;
    const price = verdict?.price ?? null;
    const ended = ENDED.includes(run.state);
    const hung = run.state === "running" ? this.hung : null;
    const calls = verdict !== null && !hung && ["watch", "held-up"].includes(verdict.level);
    const nodes = [...new Set((hung?.holding ?? []).map(nodeOf))].filter(Boolean);
    const coasts = coastsSince !== null && !hung ? coasting(coastsSince, lost, local) : null;
    const usual = {
      ...headline(run, verdict),
      also: /** @type {[string, string] | null} */ (null),
      cost: calls ? cost(run, lost, price) : null,
      remedy: !calls ? null : ended ? nextTime(verdict, this.whatif.best) : remedy(verdict, this.whatif.best, this.whatif.answer?.slow_node ?? null, leftS),
    };
    const second = calls ? verdict.causes[1] : undefined;
    if (coasts && calls) usual.also = coasts.also;
    else if (second) usual.also = ["Also", `: ${ended ? second.words : `${second.what}.`}`];
    const said = hung
      ? { tone: "bad", icon: "!", ...hanging(run, hung, nodes.length === 1 ? nodes[0] : "", price) }
      : run.state === "failed"
        ? { ...usual, also: null, ...failure(run) }
        : coasts && !calls
          ? { tone: "warn", icon: "~", ...coasts, also: null }
          : usual;
    byId("verdict").className = `verdict ${said.tone} ${run.state}`;
    text("verdict-icon", said.icon);
    text("verdict-title", said.title);
    pair("verdict-also", said.also);
    pair("verdict-cost", said.cost);
    pair("verdict-remedy", said.remedy);
    this.#buttons(run, calls && !ended, hung ? nodes : calls && !ended ? (verdict.causes[0]?.nodes ?? []) : []);
    this.#stacks(run, hung);
    this.#others(second && !(coasts && calls) ? 2 : 1);
    show("verdict-why", verdict !== null && verdict.causes.length > 0 && !hung);
  }

  /**
   * @param {Run} run
   * @param {boolean} calls whether the verdict calls for a decision
   * @param {string[]} nodes on which the slow ranks are
   */
  #buttons(run, calls, nodes) {
    const best = calls && !observed(run) ? this.whatif.best : undefined;
    show("verdict-switch", best !== undefined);
    show("dock", !ENDED.includes(run.state));
    const words = best ? `Switch to ${best.label}…` : "Switch policy…";
    if (best) text("verdict-switch", words);
    text("dock-switch", words);
    byId("dock-switch").className = best ? "primary" : "";
    byId("dock-switch").disabled = observed(run);
    const replaceable = nodes.length === 1 && (run.nodes_max ?? 1) > 1 && !simulated(run);
    show("verdict-replace", replaceable);
    if (nodes.length === 1) byId("verdict-replace").value = nodes[0];
    // The button of what saves most stands out.
    const replace = replaceable && calls && nodeFirst(this.whatif.best, this.whatif.answer?.slow_node ?? null);
    byId("verdict-replace").className = replace ? "primary" : "";
    byId("verdict-switch").className = replace ? "" : "primary";
  }

  /**
   * A link to the page of the rank that the others wait for, which asks for its stacks.
   * @param {Run} run
   * @param {Hang | null} hung
   */
  #stacks(run, hung) {
    show("verdict-stacks", hung !== null && !run.driver);
    if (hung === null) return;
    const rank = hung.holding[0] ?? hung.waiting[0] ?? 0;
    text("verdict-stacks", `Stacks of ${ranksIn([rank])}`);
    byId("verdict-stacks").href = new URL(`runs/${encodeURIComponent(run.id)}/ranks/${rank}`, BASE).href;
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
