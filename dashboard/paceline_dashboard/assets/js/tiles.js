// The three tiles under the banner, each with its scale, and the row of the model's quality.
import { hangHours, over, priced, ranksIn } from "./costs.js";
import { MOST_LINES } from "./data.js";
import { byId, show, text } from "./dom.js";
import { duration, factor, integer, mean, number, percent, plural, ratio, seconds } from "./format.js";
import { drawSpark } from "./spark.js";
import { ENDED } from "./summary.js";

export const RECENT = 50; // steps that the tiles cover
const FEWEST = 16; // with fewer steps, figures have no colour
const WASTE = [0.06, 0.2]; // to watch, held up
const SE = [0.1, 0.3];
const SLOWER = [1.1, 1.3]; // time of a rank ÷ the typical rank's
const TONES = ["", "warn", "bad"];
/** @type {Record<string, string>} */
const LEVELS = { "held-up": "bad", watch: "warn" };

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
 * Which worker is slowest: its name, time ÷ the typical rank's, where it is, and its part of all waiting. `why` is set
 * where something else than its speed keeps the others waiting.
 * @param {Verdict | null} verdict
 * @param {any[]} workers of `GET workers`
 * @param {Map<number, WorkerCause>} causes
 * @param {Hang | null} hung
 * @returns {{name: string, factor: number | null, where: string, caused: number, why: string, tone: string} | null}
 */
export function slowest(verdict, workers, causes, hung) {
  const plain = { why: "", tone: "" };
  if (hung?.holding.length) {
    const nodes = new Set(hung.holding.map((rank) => causes.get(rank)?.on_node ?? ""));
    const step = hung.step === null ? "its step" : `step ${integer(hung.step + 1)}`;
    return { name: ranksIn(hung.holding), factor: null, where: [...nodes].join(", "), caused: 0, why: `does not end ${step}`, tone: "bad" };
  }
  const going = verdict?.causes.filter((each) => each.ranks.length && each.until === null) ?? [];
  const costing = going.filter(({ hidden }) => !hidden); // those that the plan makes up for come last
  const cause = costing.find((each) => each.factor !== null) ?? costing.find((each) => each.kind === "input") ?? going.find((each) => each.factor !== null);
  if (cause) {
    // What ranks caused before the plan made up for them is over.
    const caused = cause.hidden ? 0 : cause.ranks.reduce((sum, rank) => sum + (causes.get(rank)?.caused ?? 0), 0);
    const madeUpFor = { why: `${factor(cause.factor)} slower, with less to do`, tone: "" };
    const own = cause.hidden ? madeUpFor : cause.factor === null ? { why: cause.ranks.length === 1 ? "waits for its data loader" : "wait for their data loaders", tone: tone(cause.share, WASTE) } : plain;
    const name = cause.ranks.length > MOST_LINES ? plural(cause.ranks.length, "rank") : ranksIn(cause.ranks);
    return { name, factor: cause.factor, where: cause.nodes.join(", "), caused, ...own };
  }
  const known = workers.filter((worker) => worker.compute_s > 0);
  if (known.length < 2) return null;
  const batches = verdict?.causes.some(({ kind, ranks, until }) => kind === "data" && until === null && !ranks.length);
  if (batches) return { name: "none", factor: null, where: "ranks are alike", caused: 0, why: "batches differ", tone: "" };
  const order = [...known].sort((x, y) => y.compute_s - x.compute_s);
  const typical = order[Math.floor(order.length / 2)].compute_s; // the lower median, as in verdicts
  const first = order[0];
  const of = causes.get(first.rank);
  return { name: `rank ${first.rank}`, factor: first.compute_s / typical, where: "", caused: of?.caused ?? 0, ...plain };
}

/**
 * @param {string} id of the tile
 * @param {Shown} shown
 */
function tile(id, { value, bold, note, tone: level }) {
  text(id, value);
  text(`${id}-bold`, bold);
  text(`${id}-note`, note);
  byId(`${id}-tile`).className = `tile panel ${level}`;
}

/**
 * @param {object} given
 * @param {Run} given.run
 * @param {import("./data.js").RunData} given.data
 * @param {Verdict | null} given.verdict
 * @param {any} given.trend columns of the whole run
 * @param {any[]} given.workers
 * @param {Map<number, WorkerCause>} given.causes
 * @param {import("./costs.js").Cost} given.cost as the banner tells it
 * @param {Hang | null} given.hung
 */
export function drawTiles({ run, data, verdict, trend, workers, causes, cost, hung }) {
  const recent = data.rowsBetween(data.latest - RECENT + 1, data.latest);
  const of = (/** @type {string} */ name) => mean(recent.map((row) => row[name]));
  const enough = recent.length >= FEWEST;
  const since = verdict?.causes[0]?.since ?? null;
  const from = colouredFrom(trend?.step ?? [], since);
  const se = of("se");
  text("tiles-span", recent.length ? `last ${plural(recent.length, "step")}` : "no step yet");
  text("kpi-se", ratio(se));
  byId("kpi-se").className = enough ? tone(se, SE) : "";
  drawStepTime(stepTile(of("step_s"), verdict, enough, hung), trend, from, hung);
  const lost = lostTile(run, cost, verdict, enough, hung);
  tile("kpi-waste", lost);
  const { values, scale } = lostCourse(trend, verdict?.causes[0]?.kind, cost);
  drawSpark(byId("spark-waste"), values, { scale, words: "6 % ok", from, level: hung ? "" : lost.tone });
  drawSlowest(slowest(verdict, workers, causes, hung), enough, trend, from, hung);
  drawQuality(of, recent.length);
}

/**
 * A colour that is not worse than the banner's.
 * @param {string} level
 * @param {Verdict | null} verdict
 */
function atMost(level, verdict) {
  if (verdict === null || verdict.level === "unknown") return level;
  return TONES[Math.min(TONES.indexOf(level), TONES.indexOf(LEVELS[verdict.level] ?? ""))];
}

/** @typedef {{value: string, bold: string, note: string, tone: string}} Shown what a tile says */

/**
 * What the tile of the time per step says. Its scale is the fluid limit, or the time without what the verdict names.
 * @param {number | null} stepS
 * @param {Verdict | null} verdict
 * @param {boolean} enough steps for a colour
 * @param {Hang | null} hung
 * @returns {Shown & {scale: number | null, words: string}}
 */
export function stepTile(stepS, verdict, enough, hung) {
  const limitS = verdict?.limit_s ?? null;
  const limit = { scale: limitS, words: limitS === null ? "" : `${seconds(limitS)} limit` };
  if (hung) return { ...limit, value: duration(hung.since_s), bold: "no step ends", note: stepS === null ? "" : `, usually one takes ${seconds(stepS)}`, tone: "bad" };
  if (stepS === null) return { ...limit, value: seconds(stepS), bold: "", note: "no step yet", tone: "" };
  const lost = verdict?.lost_now ?? 0;
  const over = limitS ? stepS / limitS - 1 : 0;
  const above = over > 0.005;
  const colour = (/** @type {string} */ level) => (enough ? atMost(level, verdict) : "");
  const [byLimit, byLoss] = [limitS ? tone(1 - limitS / stepS, WASTE) : "", tone(lost, WASTE)];
  if (TONES.indexOf(byLoss) > TONES.indexOf(byLimit)) { // the limit has the same reduction, so it does not show a slow one
    const without = seconds(stepS * (1 - lost));
    return { value: seconds(stepS), bold: `${percent(lost)} of it is lost`, note: `: ${without} without that`, tone: colour(byLoss), scale: stepS * (1 - lost), words: without };
  }
  const note = limitS === null ? "the fluid limit is not known yet" : above ? ` the fluid limit of ${seconds(limitS)}` : `at the fluid limit of ${seconds(limitS)}`;
  return { ...limit, value: seconds(stepS), bold: above ? `${percent(over)} above` : "", note, tone: colour(byLimit) };
}

/**
 * @param {Shown & {scale: number | null, words: string}} shown
 * @param {any} trend
 * @param {number} from
 * @param {Hang | null} hung the steps before a hang are not its
 */
function drawStepTime({ scale, words, ...shown }, trend, from, hung) {
  tile("kpi-step-time", shown);
  drawSpark(byId("spark-step-time"), trend?.step_s ?? [], { scale, words, from, level: hung ? "" : shown.tone });
}

/**
 * What the tile of the lost time says: as the banner.
 * @param {Run} run
 * @param {import("./costs.js").Cost} cost
 * @param {Verdict | null} verdict
 * @param {boolean} enough steps for a colour
 * @param {Hang | null} hung
 * @returns {Shown}
 */
export function lostTile(run, cost, verdict, enough, hung) {
  const price = verdict?.price ?? null;
  const world = run.world ?? run.nproc;
  if (hung) return { value: "100 %", bold: priced(hangHours(hung, world), price), note: " since the last step", tone: "bad" };
  const known = verdict !== null && verdict.level !== "unknown";
  const level = known ? (LEVELS[verdict.level] ?? "") : tone(cost.share, WASTE);
  const verb = cost.waits ? "waited" : "lost";
  const note = cost.hours ? ` ${verb}${over(cost, ENDED.includes(run.state))}` : cost.share === null ? ((run.step ?? null) === null ? "no step yet" : "not known yet") : cost.waits ? "ranks hardly wait" : "of all workers";
  return { value: percent(cost.share), bold: cost.hours ? priced(cost.hours, price) : "", note, tone: enough ? level : "" };
}

/**
 * The share of time that was lost, point by point: what ranks waited, with the reduction if that is what takes long.
 * @param {any} trend
 * @param {string | undefined} kind of the first cause
 * @param {import("./costs.js").Cost} cost
 * @returns {{values: (number | null)[], scale: number}}
 */
export function lostCourse(trend, kind, { waits }) {
  const values = (trend?.step_s ?? []).map((/** @type {number | null} */ stepS, /** @type {number} */ at) => {
    const [most, middle, reduced] = [trend.compute_max[at], trend.compute_mean[at], trend.comm_s[at]];
    if (!stepS || most === null || middle === null) return null;
    if (kind === "input") return reduced === null ? null : Math.max(0, stepS - reduced - middle) / stepS; // loading is neither
    return (Math.max(0, most - middle) + (!waits && kind === "network" ? (reduced ?? 0) : 0)) / stepS;
  });
  return { values, scale: WASTE[0] };
}

/**
 * @param {ReturnType<typeof slowest>} worst
 * @param {boolean} enough
 * @param {any} trend
 * @param {number} from
 * @param {Hang | null} hung the steps before a hang are not its
 */
function drawSlowest(worst, enough, trend, from, hung) {
  const shown = slowestTile(worst, enough);
  tile("kpi-slowest", shown);
  text("kpi-caused", worst === null || worst.caused < 0.005 || shown.value === "none" ? "" : `causes ${percent(worst.caused)} of waiting`);
  const ratios = (trend?.compute_max ?? []).map((/** @type {number | null} */ most, /** @type {number} */ at) => (most === null || !trend.compute_mean[at] ? null : most / trend.compute_mean[at]));
  drawSpark(byId("spark-slowest"), ratios, { scale: 1, words: "1× even", from, level: hung ? "" : shown.tone });
}

/**
 * What the tile of the slowest worker says.
 * @param {ReturnType<typeof slowest>} worst
 * @param {boolean} enough steps for a colour
 * @returns {Shown}
 */
export function slowestTile(worst, enough) {
  if (worst === null) return { value: "–", bold: "", note: "no step of two ranks yet", tone: "" };
  const where = worst.where ? `, ${worst.where}` : "";
  if (worst.why) return { value: worst.name, bold: worst.why, note: where, tone: worst.tone };
  const near = worst.factor !== null && worst.factor < SLOWER[0];
  return {
    value: near ? "none" : worst.name,
    bold: factor(worst.factor),
    note: near ? ` the typical rank's time at most, ${worst.name}${where}` : ` the typical rank's time${where}`,
    tone: enough ? tone(worst.factor, SLOWER) : "",
  };
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
