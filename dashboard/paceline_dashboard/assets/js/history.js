// Ranges longer than the page's data: thinned out by the server, and brought up to date with the page's newest steps.
import { get } from "./api.js";
import { extended, viewOf } from "./views.js";

const MOST_TAIL = 400; // steps that are added to an answer before the range is asked for again
const LEAST_PAUSE_MS = 2000; // after a failure
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
   * The view of steps [from, to] of a run of `world` workers, or null until it arrives. Steps that came since are those
   * of `data`; the server is asked again when there are many. Until then, the last view of the same `key` is returned.
   * @param {string} key
   * @param {number} from
   * @param {number} to
   * @param {import("./data.js").RunData} data
   * @param {number} world
   */
  view(key, from, to, data, world) {
    if (this.key !== key) {
      this.clear();
      this.key = key;
    }
    const end = Math.min(to, data.latest);
    const grown = this.shown === null || end - this.end >= MOST_TAIL;
    if (grown && !this.busy && performance.now() >= this.notBefore) this.#fetch(from, end, world);
    return this.shown && extended(this.shown, this.end, data, end);
  }

  /**
   * @param {number} from
   * @param {number} to
   * @param {number} world
   */
  async #fetch(from, to, world) {
    this.busy = true;
    const { round } = this;
    try {
      const answer = await get(`${this.path}/view`, { from, to });
      if (round !== this.round) return; // the user looks at other steps by now
      this.shown = viewOf(answer, world);
      this.end = to;
      this.failures = 0;
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
