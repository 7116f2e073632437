// What the banner of a run says: how the run stands, what that costs, and what would help.
import { clock, duration, integer, moment, percent, plural, workerHours } from "./format.js";
import { ENDED } from "./summary.js";

/** @type {Record<string, {tone: string, icon: string, word: string}>} */
const LEVELS = {
  "held-up": { tone: "bad", icon: "!", word: "Held up" },
  watch: { tone: "warn", icon: "~", word: "To watch" },
  healthy: { tone: "ok", icon: "✓", word: "Healthy" },
};

/** @type {Record<string, string>} */
const STATES = { finished: "Finished", stopped: "Stopped" };

const WAITING = {
  pending: "Not started yet",
  queued: "Waiting in the queue",
  starting: "Starting: no rank has told of a step yet",
  running: "The first verdict comes after a few steps",
};

/**
 * A failure's first line without the place of the log on the server.
 * @param {string} words
 */
export function withoutPaths(words) {
  return words.replace(/; log: \S+/g, "").replace(/(?:\/[^\s/:;,"']+)+\/([^\s/:;,"']+)/g, "$1");
}

/**
 * One line: tone, icon and words. For the banner and for the list of runs.
 * @param {Run} run
 * @param {Pick<Verdict, "level" | "what" | "was"> | null} verdict null: not known (yet)
 * @returns {{tone: string, icon: string, title: string}}
 */
export function headline(run, verdict) {
  const known = verdict !== null && verdict.level !== "unknown";
  if (run.state === "failed") {
    const [words] = (run.message ?? `exit code ${run.exit_code}`).trim().split("\n");
    const at = run.step === null || run.step === undefined ? "" : ` at step ${integer(run.step)}`;
    return { tone: "bad", icon: "✕", title: `Failed${at}: ${withoutPaths(words)}` };
  }
  if (ENDED.includes(run.state)) {
    const at = run.state === "stopped" && run.step !== null && run.step !== undefined ? ` at step ${integer(run.step)}` : "";
    return { tone: "grey", icon: "■", title: `${STATES[run.state]}${at}${known && verdict.was ? `: ${verdict.was}` : ""}` };
  }
  if (verdict === null && run.state === "running" && run.step !== null && run.step !== undefined) return { tone: "grey", icon: "…", title: "Looking at the newest steps…" };
  if (!known) return { tone: "grey", icon: "…", title: run.state === "queued" && run.message ? `Waiting: ${run.message}` : (WAITING[/** @type {keyof typeof WAITING} */ (run.state)] ?? run.state) };
  const { tone, icon, word } = LEVELS[verdict.level];
  return { tone, icon, title: `${word}: ${verdict.what}` };
}

/**
 * "26 % ± 4": half of the interval that holds 95 %.
 * @param {{saving: number, saving_low: number, saving_high: number}} forecast
 */
export function interval({ saving, saving_low: low, saving_high: high }) {
  const half = (100 * (high - low)) / 2;
  return `${(100 * saving).toFixed(0)} % ± ${half < 1 ? half.toFixed(1) : half.toFixed(0)}`;
}

/**
 * What it costs: the words in bold, and the rest.
 * @param {Run} run
 * @param {Verdict} verdict
 * @param {{waited: number, lost: number, since: number | null}} hours of workers, and since which time
 * @returns {[string, string]}
 */
export function cost(run, verdict, { waited, lost, since }) {
  const ended = ENDED.includes(run.state);
  const waits = verdict.waste_now >= verdict.lost_now / 2; // else the reduction, say, takes long for all
  const share = waits ? verdict.waste_now : verdict.lost_now;
  const lead = waits ? `${percent(share)} of worker time ${ended ? "waited" : "waits"}` : `${percent(share)} of the time ${ended ? "was" : "is"} lost`;
  const hours = waits ? waited : lost;
  if (!hours) return [lead, "."];
  const span = since === null ? (ended ? " in the run" : " so far") : ` in the ${duration(Date.now() / 1000 - since)} since`;
  return [lead, `: ${workerHours(hours)}${ended ? " in the run" : span}.`];
}

/**
 * What would help: the words in bold, and the rest; null: nothing is known to.
 * @param {Verdict} verdict
 * @param {Option | undefined} best the option that is recommended
 * @param {WhatIfAnswer["slow_node"]} slow forecast of another node in place of a slow one
 * @param {number | null} leftS time until the run's end
 * @returns {[string, string] | null}
 */
export function remedy(verdict, best, slow, leftS) {
  const node = slow && slow.saving_low > 0 ? slow : null;
  const sooner = (/** @type {number} */ saving) =>
    leftS === null || leftS < 60 ? "" : `: done about ${clock(Date.now() / 1000 + leftS * (1 - saving))} instead of ${clock(Date.now() / 1000 + leftS)}`;
  if (best?.forecast) {
    const other = node && node.saving > best.forecast.saving ? ` Another node for ${node.node}: ${interval(node)}.` : "";
    return [`${best.label} would save ${interval(best.forecast)} of each step`, `${sooner(best.forecast.saving)}.${other}`];
  }
  if (node) return [`Another node for ${node.node} would save ${interval(node)} of each step`, `${sooner(node.saving)}.`];
  const [cause, second] = verdict.causes;
  if (!cause || verdict.level === "healthy") return null;
  const whose = second?.who ? `For ${second.who[0].toLowerCase()}${second.who.slice(1)}` : "Also";
  const further = second && second.kind !== cause.kind ? ` ${whose}: ${second.to_do}.` : "";
  return ["What helps", `: ${cause.to_do}.${further}`.replaceAll("`", "")];
}

/**
 * What the end of a failed run costs, and what would help.
 * @param {Run} run
 * @returns {{cost: [string, string], remedy: [string, string]}}
 */
export function failure(run) {
  const memory = (run.message ?? "").toLowerCase().includes("out of memory");
  const mend = memory ? "a smaller global batch, or more memory for that rank" : "mend what the log says";
  return {
    cost: [plural(run.world ?? run.nproc, "worker"), ` train nothing${run.ended_at ? ` since ${moment(run.ended_at)}` : ""}.`],
    remedy: ["What helps", `: ${mend}; then resume it. A script with checkpoints goes on from its newest one.`],
  };
}
