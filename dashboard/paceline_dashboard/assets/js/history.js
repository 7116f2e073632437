// Steps older than the page's data, thinned out by the server.
import { get } from "./api.js";
import { historyView } from "./data.js";

const POINTS = 1000;
const MOST_CELLS = 60_000; // workers × points in one answer
const MOST_RANKS = 1024; // the most workers in an answer of the server
const LEAST_PAUSE_MS = 2000; // between an answer and the next request
const PAUSE_PER_MS = 4; // pause per ms that the answer took: an answer may be expensive
const LONGEST_PAUSE_MS = 30_000; // while the server is away

export class History {
  /**
   * @param {string} path
   * @param {() => void} arrived called when a view has arrived
   */
  constructor(path, arrived) {
    this.path = path;
    this.arrived = arrived;
    this.round = 0; // answers to requests of an earlier round are ignored
    this.clear();
  }

  clear() {
    /** @type {string | null} */
    this.key = null;
    /** @type {View | null} */
    this.shown = null;
    /** @type {number} */
    this.end = -1; // the newest step at the time of the request
    /** @type {number} */
    this.failures = 0; // in a row
    /** @type {number} */
    this.notBefore = 0;
    this.round += 1;
    this.busy = false;
  }

  /**
   * The view of steps [from, to] of a run of `world` workers whose newest step is `latest`, or null until it
   * arrives. With a new point to draw it asks again, and returns the last view of the same `key` until then.
   * @param {string} key
   * @param {number} from
   * @param {number} to
   * @param {number} latest
   * @param {number} world
   */
  view(key, from, to, latest, world) {
    if (this.key !== key) {
      this.clear();
      this.key = key;
    }
    const end = Math.min(to, latest);
    const grown = this.shown === null || end - this.end >= this.shown.bucket;
    if (grown && !this.busy && performance.now() >= this.notBefore) this.#fetch(from, end, world);
    return this.shown;
  }

  /**
   * @param {number} from
   * @param {number} to
   * @param {number} world
   */
  async #fetch(from, to, world) {
    this.busy = true;
    const { round } = this;
    const began = performance.now();
    const points = Math.max(50, Math.min(POINTS, Math.floor(MOST_CELLS / Math.min(world, MOST_RANKS))));
    try {
      const [steps, table, coasts] = await Promise.all([
        get(`${this.path}/steps`, { from, to, points: POINTS }),
        get(`${this.path}/worker-steps`, { from, to, points }),
        get(`${this.path}/coasts`, { from, to, points: POINTS }),
      ]);
      if (round !== this.round) return; // the user looks at other steps by now
      this.shown = historyView(steps, table, coasts, world);
      this.end = to;
      this.failures = 0;
      this.#pause(Math.max(LEAST_PAUSE_MS, PAUSE_PER_MS * (performance.now() - began)));
      this.arrived();
    } catch (error) {
      if (error.status === undefined) throw error;
      if (round !== this.round) return;
      this.failures += 1;
      this.#pause(Math.min(LONGEST_PAUSE_MS, LEAST_PAUSE_MS * 2 ** (this.failures - 1)));
    } finally {
      if (round === this.round) this.busy = false;
    }
  }

  /** @param {number} ms */
  #pause(ms) {
    this.notBefore = performance.now() + ms;
  }
}
