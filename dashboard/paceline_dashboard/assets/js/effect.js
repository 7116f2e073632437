// The effect of a policy switch on SE and step time: means of up to 20 steps before and after.
import { get } from "./api.js";
import { mean, ratio, seconds } from "./format.js";
import { rows } from "./data.js";

export const SIDE = 20;

export class Effects {
  /**
   * @param {string} run
   * @param {import("./data.js").RunData} data
   */
  constructor(run, data) {
    this.run = run;
    this.data = data;
    /** @type {Map<number, Row[] | undefined>} */
    this.fetched = new Map(); // version → rows around a switch that is older than the page's data
  }

  clear() {
    this.fetched.clear();
  }

  /**
   * {before, after}: rows of steps, or null before the switch took effect.
   * @param {Switch} change
   * @returns {{before: Row[], after: Row[]} | null}
   */
  around(change) {
    const at = change.effective_step;
    if (change.version === 0 || at === null || at === undefined) return null;
    const { switches } = this.data;
    const place = switches.indexOf(change);
    const from = Math.max(at - SIDE, switches[place - 1]?.effective_step ?? 0);
    const to = Math.min(at + SIDE, switches[place + 1]?.effective_step ?? Infinity) - 1;
    let rows = this.data.rowsBetween(from, to);
    if (!this.data.reachesBackTo(from)) {
      this.#fetch(change.version, from, to);
      rows = this.fetched.get(change.version) ?? rows;
    }
    return { before: rows.filter((row) => row.step < at), after: rows.filter((row) => row.step >= at) };
  }

  /**
   * "SE 0.62 → 0.09, step time 312 ms → 148 ms (2.11× faster; means of 20 and 12 steps)", or "".
   * @param {Switch} change
   */
  words(change) {
    const sides = this.around(change);
    if (!sides || !sides.before.length || !sides.after.length) return "";
    /** @type {(side: "before" | "after", name: string) => number | null} */
    const of = (side, name) => mean(sides[side].map((row) => row[name]));
    const [slow, fast] = [of("before", "step_s"), of("after", "step_s")];
    if (slow === null || fast === null) return "";
    const gain = slow >= fast ? `${(slow / fast).toFixed(2)}× faster` : `${(fast / slow).toFixed(2)}× slower`;
    return (
      `SE ${ratio(of("before", "se"))} → ${ratio(of("after", "se"))}, ` +
      `step time ${seconds(slow)} → ${seconds(fast)} (${gain}; ` +
      `means of ${sides.before.length} and ${sides.after.length} steps)`
    );
  }

  /**
   * @param {number} version
   * @param {number} from
   * @param {number} to
   */
  #fetch(version, from, to) {
    if (this.fetched.has(version)) return;
    this.fetched.set(version, undefined);
    get(`runs/${encodeURIComponent(this.run)}/steps`, { from, to, points: 2 * SIDE }).then(
      (columns) => this.fetched.set(version, [...rows(columns)]),
      () => this.fetched.delete(version), // the server is away: ask again at the next drawing
    );
  }
}
