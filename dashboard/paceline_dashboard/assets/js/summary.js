// The run page's header and facts.
import { BASE } from "./api.js";
import { byId, make, show, text } from "./dom.js";
import { resumable } from "./resuming.js";
import { clock, integer, moment, number, plural, seconds } from "./format.js";
import { termed } from "./terms.js";

export const ENDED = ["finished", "failed", "stopped"];
const MOST_NAMED = 16; // with more workers, only the range is shown

/**
 * Whether the run is simulated: its workers and its clock are virtual.
 * @type {(run: Run) => boolean}
 */
export const simulated = (run) => run.backend === "simulated";

/**
 * Whether a run's script divides its batches itself, so that no policy can be in force.
 * @type {(run: Run) => boolean}
 */
export const observed = (run) => run.policy === "observed";

/**
 * All steps of a run; null: unknown.
 * @param {Run} run
 */
export function stepsOf({ epochs, steps_per_epoch: steps }) {
  return epochs && steps ? epochs * steps : null;
}

/**
 * @param {Run} run
 * @param {Row | undefined} row
 * @param {number | null} leftS time until the run's end; null: unknown
 * @param {boolean} hung whether no step ends
 */
export function drawHeader(run, row, leftS, hung) {
  text("run-name", run.name || run.id);
  document.title = `${run.name || run.id} · Paceline`;
  const state = hung ? "hung" : run.state;
  text("run-state", state);
  byId("run-state").className = `state badge ${state}`;
  text("run-policy", run.policy);
  const [epoch, step] = [row?.epoch ?? run.epoch, row?.step ?? run.step];
  const ofEpochs = run.epochs ? ` of ${run.epochs}` : "";
  const total = stepsOf(run);
  const began = step !== null && step !== undefined;
  text("run-progress", began ? `step ${integer(step)}${total ? ` of ${integer(total)}` : ""} · epoch ${epoch}${ofEpochs}` : "no step yet");
  show("run-bar", began && total !== null);
  if (began && total) {
    byId("run-bar").className = ENDED.includes(run.state) ? "progress ended" : "progress";
    byId("run-bar").firstChild.style.width = `${Math.min(100, (100 * (step + 1)) / total)}%`;
  }
  const going = leftS !== null && run.state === "running" && !hung && !simulated(run);
  show("run-eta", going);
  if (going) text("run-eta", `done about ${clock(Date.now() / 1000 + leftS)}`);
  text("run-device", `${plural(run.world ?? run.nproc, "worker")}${run.device ? ` · ${run.device}` : ""}`);
  show("run-emulated", simulated(run) || Boolean(run.emulated));
  text("run-emulated", simulated(run) ? "simulated" : "device speeds are emulated");
  byId("run-emulated").title = emulation(run.emulated);
  drawController(run);
  text("run-notice", run.notice ?? "");
  show("run-notice", Boolean(run.notice));
  byId("stop-open").disabled = ENDED.includes(run.state);
  show("resume-open", resumable(run));
  show("stop-open", !resumable(run));
  byId("run-again").href = new URL(`launch?from=${encodeURIComponent(run.id)}`, BASE).href;
  show("run-again", ENDED.includes(run.state) && !simulated(run));
}

/** @param {Run} run */
function drawController(run) {
  const ended = ENDED.includes(run.state);
  show("run-controller", !ended && !["pending", "queued"].includes(run.state) && !simulated(run) && !observed(run)); // a simulated run plans by itself
  const alive = Boolean(run.controller?.alive);
  text("run-controller", alive ? "controller planning" : "no controller: coasting");
  byId("run-controller").className = alive ? "badge" : "badge warn";
  byId("run-controller").title = alive
    ? `Planned by ${run.controller?.owner}`
    : "The leader plans by itself in the last known proportions. A policy switch waits for a controller.";
}

/**
 * Emulated devices in words: the time per unit of each, relative to the fastest.
 * @param {Run["emulated"]} emulated
 */
function emulation(emulated) {
  if (!emulated?.a_s?.length) return "";
  const least = Math.min(...emulated.a_s);
  const most = Math.max(...emulated.a_s);
  if (emulated.a_s.length > MOST_NAMED) return `Ranks' times per unit: 1.0× to ${(most / least).toFixed(1)}×`;
  return `Ranks' times per unit: ${emulated.a_s.map((a) => `${(a / least).toFixed(1)}×`).join(", ")}`;
}

/** @param {Run} run */
export function drawFacts(run) {
  const facts = [
    ["Script", [run.script, ...(run.args ?? [])].join(" ")],
    ["Samples", integer(run.samples)],
    ...(run.token_budget === null || run.token_budget === undefined
      ? [["Global batch", integer(run.global_batch)]]
      : [["Token budget", `${integer(run.token_budget)}, about ${plural(run.global_batch ?? 0, "sample")} a step`]]),
    ["Dataset DIF", number(run.dif)],
    ["Seed", run.seed === null || run.seed === undefined ? "–" : String(run.seed)],
    ["Node", run.node ?? "–"],
    ["Started", moment(run.started_at)],
    ["Ended", moment(run.ended_at)],
    ...(run.jct_s === null ? [] : [["JCT", seconds(run.jct_s)]]),
    ...(run.queued_s === null ? [] : [["Queued", seconds(run.queued_s)]]),
    ["Id", run.id],
  ];
  if (run.exit_code !== null && run.exit_code !== undefined) facts.push(["Exit code", String(run.exit_code)]);
  if (run.dropped) facts.push(["Lost records", integer(run.dropped)]);
  const shown = JSON.stringify(facts);
  const list = byId("run-facts");
  if (list.dataset.shown === shown) return;
  list.dataset.shown = shown;
  list.replaceChildren(...facts.flatMap(([name, value]) => [make("dt", {}, ...termed(name)), make("dd", {}, value)]));
}
