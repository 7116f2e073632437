// The run page's header, key figures and facts.
import { byId, make, show, text } from "./dom.js";
import { factor, integer, mean, moment, number, percent, plural, ratio, seconds } from "./format.js";

const RECENT = 20; // steps that the tiles cover

export const ENDED = ["finished", "failed", "stopped"];
const MOST_NAMED = 16; // with more workers, only the range is shown

/**
 * Whether the run is simulated: its workers and its clock are virtual.
 * @type {(run: Run) => boolean}
 */
export const simulated = (run) => run.backend === "simulated";

/**
 * @param {Run} run
 * @param {Row | undefined} row
 */
export function drawHeader(run, row) {
  text("run-name", run.name || run.id);
  document.title = `${run.name || run.id} · Paceline`;
  text("run-state", run.state);
  byId("run-state").className = `state ${run.state}`;
  text("run-policy", run.policy);
  const [epoch, step] = [row?.epoch ?? run.epoch, row?.step ?? run.step];
  const ofEpochs = run.epochs ? ` of ${run.epochs}` : "";
  text("run-progress", step === null || step === undefined ? "no step yet" : `epoch ${epoch}${ofEpochs} · step ${integer(step)}`);
  text("run-device", `${plural(run.world ?? run.nproc, "worker")}${run.device ? ` · ${run.device}` : ""}`);
  show("run-emulated", simulated(run) || Boolean(run.emulated));
  text("run-emulated", simulated(run) ? "simulated" : "device speeds are emulated");
  byId("run-emulated").title = emulation(run.emulated);
  drawController(run);
  byId("stop-open").disabled = ENDED.includes(run.state);
}

/** @param {Run} run */
function drawController(run) {
  const ended = ENDED.includes(run.state);
  show("run-controller", !ended && !["pending", "queued"].includes(run.state) && !simulated(run)); // a simulated run plans by itself
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

/**
 * @param {import("./data.js").RunData} data
 * @param {import("./effect.js").Effects} effects
 */
export function drawKpis(data, effects) {
  const recent = data.rowsBetween(data.latest - RECENT + 1, data.latest);
  const of = (/** @type {string} */ name) => mean(recent.map((row) => row[name]));
  const over = recent.length ? `mean of ${plural(recent.length, "step")}` : "no step yet";
  tile("kpi-step-time", seconds(of("step_s")), over);
  tile("kpi-se", ratio(of("se")), over);
  tile("kpi-waste", percent(of("waste")), over);
  tile("kpi-dif", number(of("dif")), over);
  tile("kpi-ett-error", percent(of("ett_error")), of("ett_error") === null && recent.length ? "no estimate yet" : over);
  const change = data.switches.filter((known) => known.version > 0 && known.effective_step !== null).at(-1);
  const effect = change ? effects.of(change) : undefined;
  const gain = effect?.known ? 1 / (1 - effect.saving) : null;
  const since = change ? `${change.policy}, since step ${integer(change.effective_step)}` : "no switch yet";
  tile("kpi-speedup", factor(gain), change && !effect?.known ? `${since}: not known yet` : since);
}

/**
 * @param {string} id
 * @param {string} value
 * @param {string} note
 */
function tile(id, value, note) {
  text(id, value);
  text(`${id}-note`, note);
}

/** @param {Run} run */
export function drawFacts(run) {
  const facts = [
    ["Script", [run.script, ...(run.args ?? [])].join(" ")],
    ["Samples", integer(run.samples)],
    ["Global batch", integer(run.global_batch)],
    ["Dataset DIF", number(run.dif)],
    ["Seed", run.seed === null || run.seed === undefined ? "–" : String(run.seed)],
    ["Node", run.node ?? "–"],
    ["Started", moment(run.started_at)],
    ["Ended", moment(run.ended_at)],
    ["Id", run.id],
  ];
  if (run.exit_code !== null && run.exit_code !== undefined) facts.push(["Exit code", String(run.exit_code)]);
  if (run.dropped) facts.push(["Lost records", integer(run.dropped)]);
  const shown = JSON.stringify(facts);
  const list = byId("run-facts");
  if (list.dataset.shown === shown) return;
  list.dataset.shown = shown;
  list.replaceChildren(...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}
