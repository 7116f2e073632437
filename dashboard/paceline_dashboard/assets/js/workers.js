// The table of workers, and in words who is slow and why.
import { byId, make, text } from "./dom.js";
import { integer, median, number, percent, seconds } from "./format.js";

const MOST_ROWS = 24; // of many workers, those that were the slowest most often
const NOTABLE = 1.15; // a factor below this is noise

const COLUMNS = [
  ["Rank", (w) => String(w.rank), "", ""],
  ["Slowest in", (w) => percent(w.slowest_share), "of steps", "Share of the last steps in which this rank was the slowest"],
  ["Compute time", (w) => seconds(w.compute_s), "", "Forward + backward of a step, without waiting or communication"],
  ["ETT", (w) => seconds(w.ett_s), "", "Estimated training time of a step: what the plan expected"],
  ["ETT error", (w) => percent(w.ett_error), "", "Mean of |ETT − T| / T"],
  ["Wait", (w) => seconds(w.wait_s), "", "Time spent waiting for the others in a step"],
  ["Samples", (w) => number(w.samples), "per step", "Samples of the local batch"],
  ["Load", (w) => number(w.load), "per step", "Sum of the sizes of these samples, in the data set's unit"],
  ["Share", (w) => percent(w.share), "of the load", "Share of each step's load"],
  ["a", (w) => (w.a === null ? "–" : seconds(w.a)), "per unit", "Fitted time per size unit"],
  ["Missing", (w) => integer(w.missing), "rows", "Records that were sent but never arrived"],
];

export function drawWorkers(workers) {
  text("workers-words", explain(workers));
  const shown = [...workers].sort((x, y) => (y.slowest_share ?? 0) - (x.slowest_share ?? 0)).slice(0, MOST_ROWS);
  if (workers.length <= MOST_ROWS) shown.sort((x, y) => x.rank - y.rank);
  const head = COLUMNS.map(([name, , unit, title]) =>
    make("th", { scope: "col", title }, name, make("span", { className: "unit" }, unit)),
  );
  const lines = shown.map((worker) => {
    const [first, ...rest] = COLUMNS.map(([, value]) => value(worker));
    const mark = worker.missing > 0 ? "missing" : "";
    return make("tr", { className: mark }, make("th", { scope: "row" }, first), ...rest.map((value) => make("td", {}, value)));
  });
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...lines));
  const more = workers.length - shown.length;
  const note = more > 0 ? [make("p", { className: "muted small" }, `and ${integer(more)} more, slowest less often`)] : [];
  byId("workers-table").replaceChildren(table, ...note);
}

/** One or two sentences for the operator. */
export function explain(workers) {
  const active = workers.filter((worker) => worker.compute_s > 0);
  if (active.length < 2) return workers.length ? "Not enough steps yet to compare the workers." : "No worker has reported yet.";
  const slowest = active.reduce((x, y) => ((y.slowest_share ?? 0) > (x.slowest_share ?? 0) ? y : x));
  const others = active.filter((worker) => worker !== slowest);
  const held = slowest.compute_s / median(others.map((worker) => worker.compute_s));
  const outstanding = slowest.slowest_share > Math.min(0.5, 2 / active.length);
  if (!outstanding || held < NOTABLE) return `Balanced: no rank holds the others up.${handicap(active)}`;
  return `Rank ${slowest.rank} is the slowest in ${percent(slowest.slowest_share)} of steps: ${cause(slowest, others)}.`;
}

/** Time per unit: the fitted slope where there is one, else what the step took per unit. */
function pace(worker) {
  return worker.a > 0 ? worker.a : worker.compute_s / worker.load;
}

function cause(slowest, others) {
  const device = pace(slowest) / median(others.map(pace));
  const load = slowest.load / median(others.map((worker) => worker.load));
  const takes = `its device takes ${device.toFixed(1)}× as long per unit`;
  const gets = `it gets ${load.toFixed(1)}× the others' load`;
  if (device >= NOTABLE && load >= NOTABLE) return `${takes}, and ${gets}`;
  if (device >= NOTABLE) return takes;
  if (load >= NOTABLE) return gets;
  return "neither its device nor its load explains it; look for passing delays on its node";
}

/** For balanced runs: whose device is slow all the same. */
function handicap(active) {
  const last = active.reduce((x, y) => (pace(y) > pace(x) ? y : x));
  const factor = pace(last) / median(active.filter((worker) => worker !== last).map(pace));
  if (!(factor >= NOTABLE)) return "";
  return ` Rank ${last.rank}'s device takes ${factor.toFixed(1)}× as long per unit, and it gets ${percent(last.share)} of the load.`;
}
