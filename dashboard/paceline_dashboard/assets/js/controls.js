// What the reader chose for all charts: smoothing, steps or wall clock, and the rank in colour.
import { axisOf } from "./axis.js";
import { ranksIn } from "./costs.js";
import { byId, make, show, text } from "./dom.js";

const SHARE = 10; // of the steps shown are so many windows at least

export class ChartControls {
  /** @param {() => void} changed */
  constructor(changed) {
    this.changed = changed;
    this.window = 50; // steps of the rolling median
    /** @type {"steps" | "clock"} */
    this.kind = "steps";
    /** @type {number | null} */
    this.pinned = null; // a rank that the reader chose
    /** @type {Map<number, WorkerCause>} */
    this.causes = new Map(); // rank → worker of `GET attribution`
    this.world = 1;
    /** @type {Cause[]} */
    this.named = []; // what goes on, by the verdict
    this.ended = false; // the run has
  }

  open() {
    choices("chart-smoothing", (value) => this.#set({ window: Number(value) }));
    choices("chart-axis", (value) => this.#set({ kind: value === "clock" ? "clock" : "steps" }));
    byId("chart-unpin").addEventListener("click", () => this.pin(null));
    const input = make("input", { id: "chart-rank", type: "number", min: "0", step: "1", placeholder: "worst" });
    byId("chart-rank-place").replaceChildren(input); // Dash has no plain input
    input.addEventListener("change", () => {
      const rank = input.value === "" ? null : Math.min(this.world - 1, Math.max(0, Math.round(Number(input.value))));
      this.pin(rank);
    });
  }

  /**
   * Takes what an address says.
   * @param {import("./address.js").Chosen} chosen
   */
  take({ smoothing, axis, rank }) {
    Object.assign(this, { window: smoothing, kind: axis, pinned: rank });
    press("chart-smoothing", String(smoothing));
    press("chart-axis", axis);
  }

  /**
   * Takes the workers of an answer of `GET attribution`.
   * @param {WorkerCause[]} workers
   */
  explain(workers) {
    this.causes = new Map(workers.map((worker) => [worker.rank, worker]));
    this.changed();
  }

  /**
   * Takes the causes of an answer of `GET verdict`.
   * @param {Verdict} verdict
   * @param {boolean} ended whether the run has
   */
  judge({ causes }, ended) {
    this.named = causes.filter(({ until }) => until === null);
    this.ended = ended;
    this.changed();
  }

  /**
   * The ranks that the verdict names together with a rank, ascending.
   * @param {number} rank
   */
  #groupOf(rank) {
    return this.named.find(({ ranks }) => ranks.includes(rank) && ranks.length < this.world)?.ranks ?? [rank];
  }

  /**
   * The rank in colour; the same rank again, or null: the one for which others wait most.
   * @param {number | null} rank
   */
  pin(rank) {
    this.#set({ pinned: rank === this.pinned ? null : rank });
  }

  /** The rank for which others wait most, if there is one. */
  get worst() {
    let most = null;
    for (const worker of this.causes.values()) {
      if (worker.cause !== "none" && worker.caused > (most?.caused ?? 0)) most = worker;
    }
    return most?.rank ?? null;
  }

  /**
   * How charts show a view of the steps [from, to].
   * @param {View} view
   * @param {number} from
   * @param {number} to
   * @returns {import("./charts.js").Reading}
   */
  reading(view, from, to) {
    this.world = view.world;
    const focus = this.pinned ?? this.worst;
    const slow = focus !== null && (this.causes.get(focus)?.cause ?? "none") !== "none";
    const group = focus === null ? [] : this.pinned === null ? this.#groupOf(focus) : [focus];
    const its = this.named.filter(({ ranks }) => focus !== null && ranks.includes(focus));
    const madeUpFor = its.length > 0 && its.every(({ hidden }) => hidden);
    const said = madeUpFor ? `${ranksIn(group)} with less to do` : `${ranksIn(group)} ${verbOf(group.length, this.ended)} waited for`;
    text("chart-pinned", focus === null ? "" : this.pinned === null ? said : `rank ${focus} pinned`);
    byId("chart-pinned").className = slow && !madeUpFor ? "badge bad" : "badge";
    show("chart-pinned", focus !== null);
    show("chart-unpin", this.pinned !== null);
    const input = byId("chart-rank");
    if (document.activeElement !== input) input.value = this.pinned ?? "";
    return { axis: axisOf(this.kind, from, to, view), window: windowOf(this.window, to - from + 1), focus, group, slow };
  }

  /** @param {Partial<ChartControls>} change */
  #set(change) {
    Object.assign(this, change);
    this.changed();
  }
}

/**
 * @param {number} count
 * @param {boolean} past
 */
const verbOf = (count, past) => (past ? (count === 1 ? "was" : "were") : count === 1 ? "is" : "are");

/**
 * Steps of the rolling median: those chosen, but at most a tenth of the steps shown, or a short range would be one flat line.
 * @param {number} chosen
 * @param {number} shown
 */
export function windowOf(chosen, shown) {
  return Math.max(1, Math.min(chosen, Math.round(shown / SHARE)));
}

/**
 * Buttons of which one is pressed; each has its value in `data-value`.
 * @param {string} id of their group
 * @param {(value: string) => void} chosen
 */
export function choices(id, chosen) {
  const buttons = [...byId(id).querySelectorAll("button")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      press(id, button.dataset.value);
      chosen(button.dataset.value);
    });
  }
}

/**
 * Shows which of such buttons is pressed.
 * @param {string} id of their group
 * @param {string} value
 */
export function press(id, value) {
  for (const button of byId(id).querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.value === value));
}
