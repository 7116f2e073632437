// Steps older than those the page holds, thinned out by the server.
import { get } from "./api.js";
import { historyView } from "./data.js";

const POINTS = 1000;
const MOST_CELLS = 60_000; // workers × points in one answer
const MOST_RANKS = 2048; // of more workers, as many at even distances

export class History {
  /** @param arrived called when a view has come. */
  constructor(path, arrived) {
    this.path = path;
    this.arrived = arrived;
    this.clear();
  }

  clear() {
    this.key = null;
    this.found = null;
    this.stale = true;
    this.busy = false;
  }

  /** Asks again at the next drawing: the run went on. */
  refresh() {
    this.stale = true;
  }

  /** The view of steps [from, to], or null while it is on its way; the last one of the same `key` meanwhile. */
  view(key, from, to, world) {
    if (this.key !== key) {
      this.clear();
      this.key = key;
    }
    if (this.stale && !this.busy) this.#fetch(from, to, world);
    return this.found;
  }

  async #fetch(from, to, world) {
    this.busy = true;
    this.stale = false;
    const { key } = this;
    const every = Math.ceil(world / MOST_RANKS);
    const shown = Math.ceil(world / every);
    const points = Math.max(50, Math.min(POINTS, Math.floor(MOST_CELLS / Math.max(1, shown))));
    const ranks = every > 1 ? Array.from({ length: shown }, (_, i) => i * every).join(",") : undefined;
    try {
      const [steps, table] = await Promise.all([
        get(`${this.path}/steps`, { from, to, points: POINTS }),
        get(`${this.path}/worker-steps`, { from, to, points, ranks }),
      ]);
      if (key !== this.key) return; // something else is being looked at by now
      this.found = historyView(steps, table);
      this.arrived();
    } catch (error) {
      if (error.status === undefined) throw error;
      this.stale = true; // the server is away: again at the next drawing
    } finally {
      if (key === this.key) this.busy = false;
    }
  }
}
