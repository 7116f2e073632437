// The table of workers: their last steps, and why others wait for them.
import { whenThere } from "./dom.js";

const PAGE = 25; // as in run_page.py

/** @type {Record<string, string>} */
const WHY = {
  data: "large samples",
  node: "slow node",
  transient: "passing slowness",
  periodic: "regular pauses",
  input: "data loading",
  none: "",
};

/**
 * A cause in a few words.
 * @param {WorkerCause} worker
 */
export function why({ cause, factor }) {
  const words = WHY[cause] ?? cause;
  return cause === "node" && factor !== null ? `${words}, ${factor.toFixed(1)}×` : words;
}

export class WorkersTable {
  constructor() {
    /** @type {any} */
    this.grid = null;
    /** @type {Map<number, WorkerCause>} */
    this.causes = new Map(); // rank → worker of `GET attribution`
    /** @type {{rank: number, compute_s: number}[]} */
    this.workers = [];
    this.many = false;
  }

  /** Shows the rows when the grid's code is loaded; the page does not wait for this. */
  async open() {
    await whenThere("workers-grid");
    this.grid = await window.dash_ag_grid.getApiAsync("workers-grid");
    this.grid.setGridOption("overlayNoRowsTemplate", "No step yet");
    this.#draw();
  }

  /**
   * Takes an answer of `GET workers`.
   * @param {{rank: number, compute_s: number}[]} workers
   */
  update(workers) {
    this.workers = workers;
    this.#draw();
  }

  /**
   * Takes the workers of an answer of `GET attribution`.
   * @param {WorkerCause[]} workers
   */
  explain(workers) {
    this.causes = new Map(workers.map((worker) => [worker.rank, worker]));
    this.#draw();
  }

  /**
   * The slowest of the ranks from `first` to `last`; the first while nothing is known of them.
   * @param {number} first
   * @param {number} last
   */
  slowest(first, last) {
    const some = this.workers.filter(({ rank }) => rank >= first && rank <= last);
    return some.sort((x, y) => y.compute_s - x.compute_s)[0]?.rank ?? first;
  }

  #draw() {
    if (!this.grid || this.grid.isDestroyed()) return;
    if (this.workers.length > PAGE && !this.many) {
      this.many = true;
      this.grid.setGridOption("pagination", true);
      // With many workers, the ones that were slowest most often come first.
      this.grid.applyColumnState({ state: [{ colId: "slowest_share", sort: "desc" }], defaultState: { sort: null } });
    }
    const rows = this.workers.map((worker) => {
      const cause = this.causes.get(worker.rank);
      const known = cause && { why: why(cause), words: cause.words, caused: cause.caused };
      return { ...worker, id: String(worker.rank), ...known };
    });
    this.grid.setGridOption("rowData", rows);
  }
}
