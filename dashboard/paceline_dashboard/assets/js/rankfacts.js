// What the page of a rank says in words and tables: its figures, its node, and its history.
import { byId, make, show, text } from "./dom.js";
import { bytes, factor, integer, median, moment, number, percent, plural, seconds } from "./format.js";
import { termed } from "./terms.js";
import { why } from "./workers.js";

const MOST_RANKS = 16; // beside each other in the timeline
const MATES = 8; // of them on the rank's own node
const WORST = 4; // and of those that are waited for most

/**
 * The ranks that the timeline shows beside one: all of a few, else those of its node, and the worst.
 * @param {number} rank
 * @param {number} world
 * @param {Map<number, WorkerCause>} causes
 * @returns {number[]} ascending
 */
export function beside(rank, world, causes) {
  const all = Array.from({ length: world }, (_, other) => other);
  if (world <= MOST_RANKS) return all;
  const own = causes.get(rank)?.on_node ?? null;
  const near = (/** @type {number} */ other) => Math.abs(other - rank);
  const mates = own === null ? all.filter((other) => near(other) < MATES) : all.filter((other) => causes.get(other)?.on_node === own);
  const worst = [...causes.values()].filter(({ cause }) => cause !== "none").sort((x, y) => y.caused - x.caused).map((cause) => cause.rank);
  const closest = mates.sort((x, y) => near(x) - near(y)).slice(0, MATES);
  return [...new Set([rank, ...closest, ...worst.slice(0, WORST)])].sort((x, y) => x - y);
}

/**
 * The verdict on a rank, or that it is like the others.
 * @param {WorkerCause | undefined} worker of `GET attribution`
 */
export function drawVerdict(worker) {
  const slow = worker !== undefined && worker.cause !== "none";
  show("rank-verdict", worker !== undefined);
  if (!worker) return;
  byId("rank-verdict").className = slow ? "rank-verdict slow" : "rank-verdict";
  const cause = why(worker);
  text("rank-verdict-title", slow ? cause.charAt(0).toUpperCase() + cause.slice(1) : "Like the others");
  text("rank-verdict-words", slow ? worker.words : "Nobody waits for this rank.");
}

/**
 * @param {any[]} workers of `GET workers`
 * @param {number} rank
 * @param {WorkerCause | undefined} cause
 */
export function drawFacts(workers, rank, cause) {
  const own = workers.find((worker) => worker.rank === rank);
  const others = (/** @type {string} */ name) => median(workers.filter((worker) => worker.rank !== rank).map((worker) => worker[name]));
  const total = workers.reduce((sum, worker) => sum + worker.samples, 0);
  const ratio = own ? own.compute_s / (others("compute_s") ?? NaN) : NaN;
  /** @type {[string, string, string, boolean?][]} */
  const facts = own
    ? [
        ["Compute", seconds(own.compute_s), `others ${seconds(others("compute_s"))}`, ratio >= 1.1],
        ["ETT", seconds(own.ett_s), own.ett_error === null ? "" : `${percent(own.ett_error)} off`],
        ["Wait", seconds(own.wait_s), `others ${seconds(others("wait_s"))}`],
        ["Data", seconds(own.data_s), `others ${seconds(others("data_s"))}`],
        ["Causes", cause ? percent(cause.caused) : "–", "of all waiting", cause !== undefined && cause.cause !== "none"],
        ["Slowest in", percent(own.slowest_share), "of the steps"],
        ["Samples a step", number(own.samples), `of ${number(total)}`],
        ["Share of load", percent(own.share), `even is ${percent(1 / workers.length)}`],
        ["Memory, peak", own.memory_bytes ? bytes(own.memory_bytes) : "–", ""],
        ...deviceFacts(own.device),
        ["Lost records", integer(own.missing), "", own.missing > 0],
        ...(own.recompiles ? [/** @type {[string, string, string, boolean]} */ (["Recompiled", integer(own.recompiles), "times, as shapes of batches changed: see Session(shapes=…)", true])] : []),
      ]
    : [];
  const list = byId("rank-facts");
  const key = JSON.stringify(facts);
  if (list.dataset.shown === key) return;
  list.dataset.shown = key;
  list.replaceChildren(...facts.flatMap(([name, value, beside_, bad]) => [
    make("dt", {}, ...termed(name)), make("dd", {}, make("b", { className: bad ? "bad-text" : "" }, value), ` ${beside_}`),
  ]));
}

/**
 * @param {RankDevice | null} own
 * @returns {[string, string, string][]}
 */
export function deviceFacts(own) {
  if (!own) return [];
  const used = own.threads > 0 && own.threads < own.cores ? `${plural(own.threads, "thread")} in use` : "";
  /** @type {[string, string, string][]} */
  const facts = [
    ["Device", own.kind === "cpu" ? "CPU" : own.name, own.emulated ? "emulated" : own.kind === "cpu" ? own.name : own.kind],
    ["Cores it may use", integer(own.cores), used],
    [own.kind === "cpu" ? "Memory of its machine" : "Memory of its device", bytes(own.memory_bytes), ""],
  ];
  if (own.flops !== null) facts.push(["In a trial", `${number(own.flops / 1e9)} GFLOP/s`, ""]);
  return facts;
}

/**
 * @param {any | undefined} node of `GET nodes`
 * @param {string | null} name
 * @param {any | null} past of `GET nodes/{node}/history`
 * @param {WorkerCause[]} ranks those on the node, ascending
 * @param {number} own the page's rank
 */
export function drawNode(node, name, past, ranks, own) {
  text("node-title", name === null ? "Node" : `Node ${name}`);
  text("node-words", name === null ? "On which node it is, is not known." : node ? "" : "This node has no agent that answers.");
  const rows = ranks.length > 64 ? [] : ranks;
  const states = node?.gpu_states?.length === ranks.length ? node.gpu_states : [];
  const table = byId("node-devices");
  table.hidden = !rows.length;
  const head = ["Rank", ...(states.length ? ["Clock", "°C", "Throttled"] : []), "Slower"];
  table.replaceChildren(
    make("thead", {}, make("tr", {}, ...head.map((title) => make("th", { scope: "col" }, title)))),
    make("tbody", {}, ...rows.map((worker, at) => {
      const state = states[at];
      const cells = state ? [state.sm_mhz === null ? "–" : `${integer(state.sm_mhz)} MHz`, number(state.temperature_c), state.throttled_by?.join?.(", ") || state.throttled_by || "no"] : [];
      return make("tr", { className: worker.rank === own ? "own" : "" }, ...[integer(worker.rank), ...cells, factor(worker.factor)].map((cell) => make("td", {}, String(cell))));
    })),
  );
  const slowS = (past?.slow ?? []).reduce((/** @type {number} */ sum, /** @type {any} */ each) => sum + ((each.ended_at ?? Date.now() / 1000) - each.at), 0);
  /** @type {[string, string][]} */
  const facts = [];
  if (node) {
    facts.push(["Agent", node.alive ? "answers" : `last heard ${moment(node.heartbeat_at)}`], ["Runs here", node.runs.join(", ") || "none"]);
    facts.push(["Cores, memory", `${integer(node.cores)}, ${bytes(node.memory_bytes)}`], ["Cordoned", node.cordoned ? `by ${node.cordoned.by}: ${node.cordoned.reason || "no reason given"}` : "no"]);
  }
  if (past) facts.push(["Named slow", past.slow.length ? `${plural(past.slow.length, "time")}, ${seconds(slowS)}` : "never"]);
  byId("node-facts").replaceChildren(...facts.flatMap(([title, value]) => [make("dt", {}, title), make("dd", {}, value)]));
}

/**
 * What happened to a rank, newest first.
 * @param {number} rank
 * @param {any} verdict of `GET verdict`
 * @param {{slow_steps: [number, number][]} | undefined} worker of `GET attribution`
 * @param {Switch[]} switches
 * @param {number} begins the run's first step
 * @returns {{step: number, words: string, kind: string}[]}
 */
export function historyOf(rank, verdict, worker, switches, begins) {
  const events = [{ step: begins, words: "first step of the run", kind: "" }];
  for (const cause of verdict?.causes ?? []) {
    if (cause.ranks.includes(rank)) events.push({ step: cause.since ?? verdict.from ?? begins, words: cause.since === null ? `${cause.words} It began here or earlier.` : cause.words, kind: "bad" });
  }
  for (const [first, last] of worker?.slow_steps ?? []) {
    events.push({ step: first, words: first === last ? "slow in this step alone" : `slow in passing until step ${integer(last)}`, kind: "warn" });
  }
  for (const { effective_step: step, policy, version } of switches) {
    if (step !== null && version > 0) events.push({ step, words: `${policy} in force`, kind: "switch" });
  }
  return events.sort((x, y) => y.step - x.step);
}

/** @param {{step: number, words: string, kind: string}[]} events */
export function drawHistory(events) {
  byId("rank-history").replaceChildren(...events.map(({ step, words, kind }) =>
    make("li", {}, make("span", { className: "muted" }, integer(step)), make("i", { className: `dot ${kind}` }), make("span", {}, words))));
}
