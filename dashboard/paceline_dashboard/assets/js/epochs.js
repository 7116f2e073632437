// What each epoch came to, and what each worker did in one of them. It is asked for when the reader opens it.
import { get } from "./api.js";
import { byId, make, problem, show, text } from "./dom.js";
import { factor, integer, number, percent, plural, ratio, seconds } from "./format.js";

const EPOCHS = 12; // the newest that are shown
const WORKERS = 32; // of an epoch: those that were slowest most often

/** @typedef {{head: string, meaning: string, of: (row: any) => string}} Figure a column: its name, and what a row says */

/** @type {Figure[]} */
const OF_EPOCH = [
  { head: "Steps", meaning: "Complete steps", of: ({ steps }) => integer(steps) },
  { head: "Time", meaning: "Sum of the times of its steps", of: ({ wall_s }) => seconds(wall_s) },
  { head: "Per step", meaning: "Mean time of a step", of: ({ step_s }) => seconds(step_s) },
  { head: "SE", meaning: "Straggler effect: (max T − min T) / mean T, mean of its steps", of: ({ se }) => ratio(se) },
  { head: "Waste", meaning: "Share of the workers' time spent waiting for the slowest", of: ({ waste }) => percent(waste) },
  { head: "Step DIF", meaning: "Sample standard deviation of the workers' loads in a step", of: ({ dif }) => number(dif) },
  { head: "ETT error", meaning: "Mean of |ETT − T| / T", of: ({ ett_error }) => percent(ett_error) },
  { head: "Loss", meaning: "Mean of its steps", of: ({ loss }) => number(loss) },
];

/** @type {Figure[]} */
const OF_WORKER = [
  { head: "Σ T", meaning: "Time spent computing", of: ({ compute_s }) => seconds(compute_s) },
  { head: "Σ ETT", meaning: "What plans expected that to be", of: ({ ett_s }) => seconds(ett_s) },
  { head: "Waited", meaning: "For slower workers", of: ({ wait_s }) => seconds(wait_s) },
  { head: "Slowest in", meaning: "Share of the steps in which it was the slowest", of: ({ slowest_share }) => percent(slowest_share) },
  { head: "Share", meaning: "Of the load of all workers", of: ({ share }) => percent(share) },
  { head: "Samples", meaning: "That it trained on", of: ({ samples }) => integer(samples) },
  { head: "DIF", meaning: "Sample standard deviation of the sizes of its own samples", of: ({ dif }) => number(dif) },
  { head: "Came", meaning: "Samples that another worker had in the epoch before, and their load ÷ its own", of: (row) => moved(row.came, row.came_load, row.load) },
  { head: "Went", meaning: "Samples of the epoch before that another worker has now, and their load ÷ its own", of: (row) => moved(row.went, row.went_load, row.load) },
];

/**
 * @param {number | null} samples
 * @param {number | null} load
 * @param {number} own load of the worker in this epoch
 */
function moved(samples, load, own) {
  if (samples === null || load === null) return "–";
  return samples && own ? `${integer(samples)} · ${factor(load / own)}` : integer(samples);
}

/**
 * The workers to show: those that were the slowest most often first.
 * @param {any[]} workers
 */
export function listed(workers) {
  const order = [...workers].sort((x, y) => y.slowest_share - x.slowest_share || x.rank - y.rank);
  return order.slice(0, WORKERS);
}

export class Epochs {
  /** @param {string} path of the run's REST */
  constructor(path) {
    this.path = path;
    this.epoch = -1; // whose workers are shown; -1: none
    this.newest = -1; // epoch of the answer that is shown
    this.known = ""; // key of the answer that is shown
  }

  open() {
    byId("epochs").addEventListener("toggle", () => this.refresh(this.known));
  }

  /**
   * Shows the newest epochs, if the reader has opened them.
   * @param {string} key changes when there may be more to show
   */
  async refresh(key) {
    const details = byId("epochs");
    if (!details?.open || (key === this.known && key !== "")) return;
    await this.#asking(async () => {
      const epochs = await get(`${this.path}/epochs`, { limit: EPOCHS });
      this.known = key;
      this.#draw(epochs.reverse());
      if (this.epoch >= 0 && this.epoch >= this.newest) await this.#workers(this.epoch); // else it is over
      this.newest = epochs[0]?.epoch ?? -1;
    });
  }

  /** @param {() => Promise<void>} ask which says here what the server refuses */
  async #asking(ask) {
    try {
      await ask();
      problem("epochs-problem", "");
    } catch (error) {
      if (error.status === undefined) throw error;
      problem("epochs-problem", error.message);
    }
  }

  /** @param {any[]} epochs newest first */
  #draw(epochs) {
    show("epochs-none", epochs.length === 0);
    const first = (/** @type {any} */ { epoch }) => {
      const button = make("button", { type: "button", className: "quiet" }, `epoch ${integer(epoch)}`);
      button.setAttribute("aria-pressed", String(epoch === this.epoch));
      button.addEventListener("click", () => this.#asking(() => this.#workers(epoch)));
      return button;
    };
    byId("epochs-table").replaceChildren(...(epochs.length ? [tableOf("Epoch", first, OF_EPOCH, epochs)] : []));
  }

  /** @param {number} epoch */
  async #workers(epoch) {
    const workers = await get(`${this.path}/epochs/${epoch}/workers`);
    this.epoch = epoch;
    for (const button of byId("epochs-table").querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.textContent === `epoch ${integer(epoch)}`));
    const rows = listed(workers);
    const words = `Epoch ${integer(epoch)} by worker`;
    text("epochs-words", rows.length < workers.length ? `${words}: the ${rows.length} of ${plural(workers.length, "worker")} that were slowest most often` : words);
    byId("epochs-workers").replaceChildren(...(rows.length ? [tableOf("Worker", ({ rank }) => `rank ${integer(rank)}`, OF_WORKER, rows)] : []));
  }
}

/**
 * @param {string} name of the first column
 * @param {(row: any) => Node | string} first what it holds
 * @param {Figure[]} figures
 * @param {any[]} rows
 */
function tableOf(name, first, figures, rows) {
  const head = [make("th", { scope: "col" }, name), ...figures.map(({ head: words, meaning }) => make("th", { scope: "col", title: meaning }, words))];
  const lines = rows.map((row) => make("tr", {}, make("th", { scope: "row" }, first(row)), ...figures.map(({ of }) => make("td", {}, of(row)))));
  return make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": `Figures by ${name.toLowerCase()}` }, make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines)));
}
