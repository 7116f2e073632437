// What a run loses: the share of its workers' time, and the hours of workers that this came to.
import { duration, integer, plural, workerHours, money } from "./format.js";

const WAITS = 0.4; // waiting is told where it has so much of all that is lost; else all that is lost
const NO_WAITING = ["network", "between", "planning"]; // causes for which no rank waits for another

/**
 * What a run loses, and since when. Share and hours are of the same steps, so that each follows from the other.
 * @typedef {object} Cost
 * @property {boolean} waits ranks wait for each other; else the time is lost for all of them
 * @property {number | null} share of the workers' time; null: unknown
 * @property {number | null} hours of workers; null: unknown yet
 * @property {number | null} spanS how long these steps took, if they are those since the first cause began
 * @property {number | null} steps how many they are, if they are neither that nor the whole run
 */

/**
 * Times of all workers together in the steps from `since` on, in seconds; null: the first of them are not known yet.
 * Newest steps count one by one; of earlier ones, points of which each has the means of its steps.
 * @param {Row[]} rows the newest steps, ascending
 * @param {any} trend an answer of `GET steps`, or null
 * @param {number} world
 * @param {number} since first step that counts
 * @returns {{waited: number, spent: number} | null}
 */
export function timesSince(rows, trend, world, since) {
  const begins = rows.length ? rows[0].step : Infinity; // of the steps that are known one by one
  const points = trend?.step ?? [];
  if (begins > since && !points.length) return null;
  let [waited, spent] = [0, 0];
  const add = (/** @type {any} */ { step_s: stepS, compute_max: longest, compute_mean: mean }, /** @type {number} */ steps) => {
    waited += steps * Math.max(0, (longest ?? 0) - (mean ?? longest ?? 0));
    spent += steps * (stepS ?? 0);
  };
  for (const row of rows) if (row.step >= since) add(row, 1);
  for (let at = 0; at < points.length; at++) {
    const end = Math.min((Math.floor(points[at] / trend.bucket) + 1) * trend.bucket, trend.to + 1, begins);
    const steps = end - Math.max(points[at], since);
    const point = { step_s: trend.step_s[at], compute_max: trend.compute_max[at], compute_mean: trend.compute_mean[at] };
    if (steps > 0) add(point, steps);
  }
  return { waited: waited * world, spent: spent * world };
}

/**
 * What the run loses. Ranks that wait for their data loader compute evenly, and a slow reduction makes no rank wait for
 * another: no column of steps has that time, so the verdict's share tells it.
 * @param {object} given
 * @param {Row[]} given.rows the newest steps, ascending
 * @param {any} given.trend columns of the whole run, or null
 * @param {number} given.world
 * @param {number} given.begins the run's first step
 * @param {Verdict | null} given.verdict
 * @returns {Cost}
 */
export function costOf({ rows, trend, world, begins, verdict }) {
  if (verdict === null || verdict.level === "unknown") {
    const times = timesSince(rows, trend, world, begins);
    return { waits: true, share: times?.spent ? times.waited / times.spent : null, hours: times && times.waited / 3600, spanS: null, steps: null };
  }
  const going = verdict.causes.filter(({ until, hidden }) => until === null && !hidden);
  const cause = verdict.causes[0];
  const since = cause && cause.until === null ? cause.since : null;
  const waits = !NO_WAITING.includes(cause?.kind) && verdict.waste_now >= WAITS * verdict.lost_now;
  if (waits && !going.some(({ kind }) => kind === "input")) return measured(timesSince(rows, trend, world, since ?? begins), since, verdict, world);
  const share = waits ? verdict.waste_now : verdict.lost_now;
  const newest = Math.max(-1, ...going.map((each) => each.since ?? -1)); // what goes on now has gone on since then
  const from = newest >= 0 ? newest : (verdict.from ?? begins);
  const times = timesSince(rows, trend, world, from);
  const hours = times && (share * times.spent) / 3600;
  const own = newest >= 0 && from === since;
  return { waits, share, hours, spanS: own && times ? times.spent / world : null, steps: own || from <= begins ? null : (verdict.to ?? from) - from + 1 };
}

/**
 * @param {{waited: number, spent: number} | null} times
 * @param {number | null} since
 * @param {Verdict} verdict
 * @param {number} world
 * @returns {Cost}
 */
function measured(times, since, verdict, world) {
  const nobody = verdict.waste_now === 0; // under relaxed synchronisation, the slowest keeps none waiting
  const own = since !== null && times !== null && times.spent > 0;
  return {
    waits: true,
    share: own && !nobody ? times.waited / times.spent : verdict.waste_now,
    hours: nobody ? 0 : times && times.waited / 3600,
    spanS: own ? times.spent / world : null,
    steps: null,
  };
}

/**
 * Over which steps, for the end of a sentence.
 * @param {Cost} cost
 * @param {boolean} ended whether the run has
 */
export function over({ spanS, steps }, ended) {
  if (spanS !== null) return ` in the ${duration(spanS)} since`;
  if (steps !== null) return ` in the last ${integer(steps)} steps`;
  return ended ? " in the run" : " so far";
}

/**
 * @param {number} hours
 * @param {Verdict["price"]} price of a worker-hour
 */
export const priced = (hours, price) => (price ? `${workerHours(hours)}, ${money(hours, price)}` : workerHours(hours));

/**
 * What a hang costs: every worker stands still.
 * @param {{since_s: number}} hang
 * @param {number} world
 */
export const hangHours = (hang, world) => (hang.since_s * world) / 3600;

/**
 * Ranks in words: "rank 6", "ranks 4–7", "512 ranks".
 * @param {number[]} ranks ascending
 */
export function ranksIn(ranks) {
  const [first, last] = [ranks[0], ranks[ranks.length - 1]];
  if (ranks.length === 1) return `rank ${integer(first)}`;
  if (ranks.length === 2) return `ranks ${integer(first)} and ${integer(last)}`;
  return last - first + 1 === ranks.length ? `ranks ${integer(first)}–${integer(last)}` : plural(ranks.length, "rank");
}
