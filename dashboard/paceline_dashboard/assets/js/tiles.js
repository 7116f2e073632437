// The three tiles under the banner, each with its scale, and the row of the model's quality.
import { byId, show, text } from "./dom.js";
import { factor, integer, mean, money, number, percent, plural, ratio, seconds, workerHours } from "./format.js";
import { drawSpark } from "./spark.js";
import { ENDED } from "./summary.js";

export const RECENT = 50; // steps that the tiles cover
const FEWEST = 16; // with fewer steps, figures have no colour
const WASTE = [0.06, 0.2]; // to watch, held up
const SE = [0.1, 0.3];
const SLOWER = [1.1, 1.3]; // time of a rank ÷ the median's

/**
 * "bad", "warn" or "" by two thresholds.
 * @param {number | null | undefined} value
 * @param {number[]} thresholds
 */
export function tone(value, [watch, bad]) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "";
  return value >= bad ? "bad" : value >= watch ? "warn" : "";
}

/**
 * Worker-hours that waited, from columns of steps: of each point waste × longest time × workers × those of its steps
 * that count.
 * @param {any} trend an answer of `GET steps`
 * @param {number} world
 * @param {number} since first step that counts
 */
export function waited(trend, world, since = 0) {
  let total = 0;
  for (let at = 0; at < (trend?.step?.length ?? 0); at++) {
    const spent = (trend.waste[at] ?? 0) * (trend.compute_max[at] ?? 0);
    total += spent * stepsSince(trend, at, since) * world;
  }
  return total / 3600;
}

/**
 * Worker-hours of all that the run did, from a step on.
 * @param {any} trend an answer of `GET steps`
 * @param {number} world
 * @param {number} since first step that counts
 */
function trained(trend, world, since) {
  let total = 0;
  for (let at = 0; at < (trend?.step?.length ?? 0); at++) total += (trend.step_s[at] ?? 0) * stepsSince(trend, at, since) * world;
  return total / 3600;
}

/**
 * Worker-hours that waited, and those that were lost to all causes, since the first cause began. Ranks that wait for
 * their data loader compute evenly, so no column of steps has that time: the verdict's share tells it.
 * @param {any} trend an answer of `GET steps`
 * @param {number} world
 * @param {Verdict | null} verdict
 */
export function hoursOf(trend, world, verdict) {
  const cause = verdict?.causes[0];
  const computing = waited(trend, world, cause?.since ?? 0);
  if (!verdict || !cause) return { waited: computing, lost: computing };
  const all = trained(trend, world, cause.since ?? verdict.from ?? 0);
  const input = verdict.causes.some(({ kind, until }) => kind === "input" && until === null);
  return { waited: input ? verdict.waste_now * all : computing, lost: verdict.lost_now * all };
}

/**
 * How many steps of a point count. A point ends with its bucket; the newest ends with the newest step.
 * @param {any} trend
 * @param {number} at
 * @param {number} since
 */
function stepsSince({ step, bucket, to }, at, since) {
  const end = Math.min((Math.floor(step[at] / bucket) + 1) * bucket, to + 1);
  return Math.max(0, end - Math.max(step[at], since));
}

/**
 * The first point that is coloured: the one that holds `since`. The newest two always are, since a line needs two.
 * @param {number[]} steps first step of each point
 * @param {number | null} since null: all
 */
export function colouredFrom(steps, since) {
  if (since === null) return 0;
  const holds = steps.findLastIndex((step) => step <= since);
  return Math.max(0, Math.min(holds, steps.length - 2));
}

/**
 * Which worker is slowest: its name, time ÷ the median, where it is, and its part of all waiting.
 * @param {Verdict | null} verdict
 * @param {any[]} workers of `GET workers`
 * @param {Map<number, WorkerCause>} causes
 */
export function slowest(verdict, workers, causes) {
  const cause = verdict?.causes.find((each) => each.ranks.length && each.until === null && each.factor !== null);
  if (cause) {
    const caused = cause.ranks.reduce((sum, rank) => sum + (causes.get(rank)?.caused ?? 0), 0);
    const all = cause.ranks.length === 1 ? `rank ${cause.ranks[0]}` : `${integer(cause.ranks.length)} ranks`;
    return { name: all, factor: cause.factor, where: cause.nodes.join(", "), caused };
  }
  const known = workers.filter((worker) => worker.compute_s > 0);
  if (known.length < 2) return null;
  const order = [...known].sort((x, y) => y.compute_s - x.compute_s);
  const median = order[Math.floor(order.length / 2)].compute_s;
  const first = order[0];
  const of = causes.get(first.rank);
  return { name: `rank ${first.rank}`, factor: first.compute_s / median, where: "", caused: of?.caused ?? 0 };
}

/**
 * @param {string} id of the tile
 * @param {{value: string, unit?: string, note: string, bold?: string, tone?: string}} shown
 */
function tile(id, { value, unit = "", note, bold = "", tone: level = "" }) {
  text(id, unit ? `${value} ${unit}` : value);
  text(`${id}-bold`, bold);
  text(`${id}-note`, note);
  byId(`${id}-tile`).className = `tile panel ${level}`;
}

/**
 * @param {number} hours
 * @param {Verdict["price"]} price of a worker-hour
 */
export const priced = (hours, price) => (price ? `${workerHours(hours)}, ${money(hours, price)}` : workerHours(hours));

/**
 * @param {object} given
 * @param {Run} given.run
 * @param {import("./data.js").RunData} given.data
 * @param {Verdict | null} given.verdict
 * @param {any} given.trend columns of the whole run
 * @param {any[]} given.workers
 * @param {Map<number, WorkerCause>} given.causes
 */
export function drawTiles({ run, data, verdict, trend, workers, causes }) {
  const recent = data.rowsBetween(data.latest - RECENT + 1, data.latest);
  const of = (/** @type {string} */ name) => mean(recent.map((row) => row[name]));
  const enough = recent.length >= FEWEST;
  const since = verdict?.causes[0]?.since ?? null;
  const from = colouredFrom(trend?.step ?? [], since);
  text("tiles-span", recent.length ? `last ${plural(recent.length, "step")}` : "no step yet");
  stepTime(of("step_s"), verdict?.limit_s ?? null, enough, (level, limit) =>
    drawSpark(byId("spark-step-time"), trend?.step_s ?? [], { scale: limit, words: limit === null ? "" : `${seconds(limit)} limit`, from, level }));
  const known = verdict !== null && verdict.level !== "unknown";
  const [waste, se] = [known && enough ? verdict.waste_now : of("waste"), of("se")]; // the mean of steps hides rare long waits
  const level = enough ? tone(waste, WASTE) : "";
  text("kpi-se", ratio(se));
  byId("kpi-se").className = enough ? tone(se, SE) : "";
  const { waited: hours } = hoursOf(trend, run.world ?? run.nproc, verdict);
  const when = since === null ? (ENDED.includes(run.state) ? " in the run" : " so far") : ` since step ${integer(since)}`;
  tile("kpi-waste", { value: percent(waste), bold: hours ? priced(hours, verdict?.price ?? null) : "", note: hours ? when : recent.length ? "ranks hardly wait" : "no step yet", tone: level });
  drawSpark(byId("spark-waste"), trend?.waste ?? [], { scale: WASTE[0], words: "6 % ok", from, level });
  drawSlowest(slowest(verdict, workers, causes), enough, trend, from);
  drawQuality(of, recent.length);
}

/**
 * @param {number | null} stepS
 * @param {number | null} limitS
 * @param {boolean} enough
 * @param {(level: string, limit: number | null) => void} spark
 */
function stepTime(stepS, limitS, enough, spark) {
  const over = stepS !== null && limitS ? stepS / limitS - 1 : null;
  const level = enough && over !== null && stepS !== null && limitS ? tone(1 - limitS / stepS, WASTE) : "";
  const note = over === null ? (stepS === null ? "no step yet" : "the fluid limit is not known yet") : over > 0.005 ? ` the fluid limit of ${seconds(limitS)}` : `at the fluid limit of ${seconds(limitS)}`;
  tile("kpi-step-time", { value: seconds(stepS), bold: over !== null && over > 0.005 ? `${percent(over)} above` : "", note, tone: level });
  spark(level, limitS);
}

/**
 * @param {ReturnType<typeof slowest>} worst
 * @param {boolean} enough
 * @param {any} trend
 * @param {number} from
 */
function drawSlowest(worst, enough, trend, from) {
  const level = enough ? tone(worst?.factor, SLOWER) : "";
  const near = worst !== null && worst.factor !== null && worst.factor < SLOWER[0];
  tile("kpi-slowest", {
    value: worst === null ? "–" : near ? "none" : worst.name,
    bold: worst === null ? "" : factor(worst.factor),
    note: worst === null ? "no step of two ranks yet" : `${near ? ` the median at most, ${worst.name}` : " the median"}${worst.where ? `, ${worst.where}` : ""}`,
    tone: level,
  });
  text("kpi-caused", worst === null || near || worst.caused < 0.005 ? "" : `causes ${percent(worst.caused)} of waiting`);
  const ratios = (trend?.compute_max ?? []).map((/** @type {number | null} */ most, /** @type {number} */ at) => (most === null || !trend.compute_mean[at] ? null : most / trend.compute_mean[at]));
  drawSpark(byId("spark-slowest"), ratios, { scale: 1, words: "1× even", from, level });
}

/**
 * @param {(name: string) => number | null} of mean of the recent steps
 * @param {number} count
 */
function drawQuality(of, count) {
  const error = of("ett_error");
  text("kpi-ett-error", percent(error));
  text("kpi-ett-error-note", count === 0 ? "" : error === null ? "no estimate yet" : error < 0.05 ? "good" : error < 0.15 ? "fair" : "poor");
  text("kpi-dif", number(of("dif")));
}

/**
 * What the last switch gained.
 * @param {import("./data.js").RunData} data
 * @param {import("./effect.js").Effects} effects
 */
export function drawSpeedup(data, effects) {
  const change = data.switches.filter((known) => known.version > 0 && known.effective_step !== null).at(-1);
  const effect = change ? effects.of(change) : undefined;
  const gain = effect?.known ? 1 / (1 - effect.saving) : null;
  show("quality-speedup", change !== undefined);
  text("kpi-speedup", factor(gain));
  const since = change ? `${change.policy}, since step ${integer(change.effective_step)}` : "";
  text("kpi-speedup-note", change && !effect?.known ? `${since}: not known yet` : since);
}
