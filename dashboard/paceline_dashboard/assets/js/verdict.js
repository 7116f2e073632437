// What the banner of a run says: how the run stands, what that costs, and what would help.
import { hangHours, over, priced, ranksIn } from "./costs.js";
import { clock, duration, integer, moment, percent, plural } from "./format.js";
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
 * The line of a run in the list: also of one that hangs, or that no controller plans.
 * @param {Run} run
 * @param {Pick<Verdict, "level" | "what" | "was"> & {hung_s?: number, coasting?: boolean} | null} verdict
 * @returns {{tone: string, icon: string, title: string}}
 */
export function standing(run, verdict) {
  const line = headline(run, verdict);
  if (run.state !== "running" || verdict === null) return line;
  if (verdict.hung_s) return { tone: "bad", icon: "!", title: `Hung: no step has ended for ${duration(verdict.hung_s)}` };
  if (!verdict.coasting || run.controller?.alive || line.tone === "bad") return line;
  return { tone: "warn", icon: "~", title: "Coasting: no controller plans; ranks train on with the last known shares" };
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
 * @param {import("./costs.js").Cost} cost
 * @param {Verdict["price"]} price of a worker-hour
 * @returns {[string, string]}
 */
export function cost(run, cost, price) {
  const ended = ENDED.includes(run.state);
  const verb = cost.waits ? (ended ? "waited" : "waits") : ended ? "was lost" : "is lost";
  const lead = `${percent(cost.share)} of worker time ${verb}`;
  return [lead, cost.hours ? `: ${priced(cost.hours, price)}${over(cost, ended)}.` : "."];
}

/**
 * Whether another node in place of a slow one would save more than the policy that is recommended.
 * @param {Option | undefined} best
 * @param {WhatIfAnswer["slow_node"]} slow
 */
export function nodeFirst(best, slow) {
  return slow !== null && slow.saving_low > 0 && slow.saving > (best?.forecast?.saving ?? 0);
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
  if (node && nodeFirst(best, slow)) {
    const switching = best?.forecast ? ` ${best.label}: ${interval(best.forecast)}.` : "";
    return [`Another node for ${node.node} would save ${interval(node)} of each step`, `${sooner(node.saving)}.${switching}`];
  }
  if (best?.forecast) return [`${best.label} would save ${interval(best.forecast)} of each step`, `${sooner(best.forecast.saving)}.`];
  const [cause, second] = verdict.causes;
  if (!cause || verdict.level === "healthy") return null;
  const whose = second?.who ? `For ${second.who[0].toLowerCase()}${second.who.slice(1)}` : "Also";
  const further = second && second.kind !== cause.kind ? ` ${whose}: ${second.to_do}.` : "";
  return ["What helps", `: ${cause.to_do}.${further}`.replaceAll("`", "")];
}

/**
 * What would help a next run, of one that has ended.
 * @param {Verdict} verdict
 * @param {Option | undefined} best the option that would have saved most
 * @returns {[string, string] | null}
 */
export function nextTime(verdict, best) {
  const [cause, second] = verdict.causes;
  if (!cause) return null;
  const other = second && second.kind !== cause.kind ? ` Also: ${second.to_do}.` : "";
  const advice = `${cause.to_do}.${other}`.replaceAll("`", "");
  if (!best?.forecast) return ["Next time", `: ${advice}`];
  return ["Next time", `: start it with ${best.label}, which would have saved ${interval(best.forecast)} of each step; and ${advice}`];
}

/**
 * What is said of a run that hangs.
 * @param {Run} run
 * @param {Hang} hang
 * @param {string} node on which all ranks are that the others wait for; empty: unknown, or several
 * @param {Verdict["price"]} price of a worker-hour
 * @returns {{title: string, also: [string, string], cost: [string, string], remedy: [string, string]}}
 */
export function hanging(run, hang, node, price) {
  const world = run.world ?? run.nproc;
  const who = hang.holding.length ? ranksIn(hang.holding) : "";
  const standing = duration(hang.since_s);
  const known = hang.words.split(/(?<=\.) (?=[A-Z])/).slice(1).join(" ") || hang.words;
  const given = who ? `the stacks of ${who} say where ${hang.holding.length === 1 ? "it stands" : "they stand"}` : "the stacks of the ranks say where they stand";
  const stacks = run.driver ? `${given}. The run's script starts its ranks itself: on Ray, run ray stack on their machine` : given;
  const several = (run.nodes_max ?? 1) > 1; // of a run on one node, no node can be replaced
  const replace = who && several && !run.driver ? `replace ${node || (hang.holding.length === 1 ? "its node" : "their nodes")}, or ` : "";
  return {
    title: `Hung: no step has ended for ${standing}${who ? `, all others wait for ${who}${node ? ` on ${node}` : ""}` : ""}`,
    also: ["", known],
    cost: [`All ${plural(world, "worker")} stand still`, `: ${priced(hangHours(hang, world), price)} in the ${standing} since the last step.`],
    remedy: ["What to do", `: ${stacks}. Then ${replace}stop the run and resume it from its newest checkpoint.`],
  };
}

/**
 * What is said of a run that no controller plans.
 * @param {number} since first step that no controller planned
 * @param {import("./costs.js").Cost} cost
 * @param {boolean} local true if rank 0 plans with the run's policy; false: it repeats the last split
 * @returns {{title: string, also: [string, string], cost: [string, string], remedy: [string, string]}}
 */
export function coasting(since, cost, local) {
  if (local) {
    return {
      title: `Rank 0 plans since step ${integer(since)}, because no controller does; ranks stay balanced`,
      also: ["Also", `: rank 0 plans since step ${integer(since)}, because no controller does; see whether a worker of the control plane runs (/readyz says so).`],
      cost: ["Nothing is lost", ". But a policy switch does not take effect until a controller plans again."],
      remedy: ["What to do", ": see whether a worker of the control plane runs; /readyz says so, and its log why not. Once one plans again, the run follows by itself."],
    };
  }
  const lead = cost.share === null ? "What is lost is not known yet" : "Nothing is lost yet";
  const waits = cost.share === null ? "" : `: ${percent(cost.share)} of worker time ${cost.waits ? "waits" : "is lost"}`;
  return {
    title: `Coasting: nobody plans since step ${integer(since)}; ranks train on with the last known shares`,
    also: ["Also", `: nobody plans since step ${integer(since)}; see whether a worker of the control plane runs (/readyz says so).`],
    cost: [lead, `${waits}. But shares no longer follow the ranks' speeds, and a policy switch does not take effect.`],
    remedy: ["What to do", ": see whether a worker of the control plane runs; /readyz says so, and its log why not. Once one plans again, the run follows by itself."],
  };
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
