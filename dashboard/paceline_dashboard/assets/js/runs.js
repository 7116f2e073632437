// The list of runs and the nodes.
import { get } from "./api.js";
import { byId, connection, make, poll, problem, show, text, whenThere } from "./dom.js";
import { amount, bytes, clock, integer, moment, percent, plural } from "./format.js";
import { RunsFilter } from "./runsfilter.js";
import { ENDED, stepsOf } from "./summary.js";
import { standing } from "./verdict.js";

const PERIOD_S = 2;
const PAGE = 50;
const LOOK_S = 5; // between two looks at the verdicts that the server keeps
const JUDGE_S = 15; // between two verdicts on the same run that it has to make
const TONES = ["bad", "warn", "ok", "grey"]; // in this order: who needs a person comes first

/** Opens the page; returns a function that closes it. */
export function openRuns() {
  const page = new RunsPage();
  page.open();
  return () => page.close();
}

/** @typedef {Pick<Verdict, "level" | "what" | "was"> & {waste_now: number | null, hung_s?: number, coasting?: boolean}} Told */

class RunsPage {
  constructor() {
    this.closed = false;
    this.pages = 1;
    this.asked = 0; // number of requests for the list
    this.filter = new RunsFilter(() => {
      this.pages = 1;
      this.#refresh();
    });
    /** @type {any} */
    this.grid = null;
    /** @type {Map<string, {verdict: Told, step: number, at: number}>} */
    this.verdicts = new Map(); // run → its newest verdict
    this.end = () => {};
    this.endJudging = () => {};
    /** @type {Run[]} */
    this.runs = [];
  }

  async open() {
    connection("connecting");
    await whenThere("nodes");
    this.grid = await window.dash_ag_grid.getApiAsync("runs-grid");
    if (this.closed) return;
    this.grid.setGridOption("overlayNoRowsTemplate", "No run matches. “Show all” shows every run again.");
    if (matchMedia("(max-width: 760px)").matches) this.grid.setGridOption("rowHeight", 54); // verdicts take two lines
    this.filter.open().catch((error) => {
      if (error.status === undefined) throw error; // else the list tells what is wrong
    });
    byId("runs-more").addEventListener("click", () => {
      this.pages += 1;
      this.#refresh();
    });
    this.end = poll(() => this.#refresh(), PERIOD_S);
    this.endJudging = poll(() => this.#judge(), LOOK_S);
  }

  close() {
    this.closed = true;
    this.filter.close();
    this.end();
    this.endJudging();
  }

  /** Whether another page is there: its elements come a little before this one is closed. */
  get #gone() {
    return this.closed || !byId("runs-grid");
  }

  async #refresh() {
    const turn = ++this.asked;
    try {
      const [answer, nodes] = await Promise.all([this.#runs(), get("nodes")]);
      if (this.#gone || turn !== this.asked) return;
      connection("live");
      problem("runs-problem", "");
      this.#show(answer);
      drawNodes(nodes);
    } catch (error) {
      if (error.status === undefined) throw error;
      if (this.closed) return;
      if (error.status === 0) connection("lost");
      else problem("runs-problem", error.message);
    }
  }

  /** @returns {Promise<{runs: Run[], more: boolean}>} */
  async #runs() {
    /** @type {Run[]} */
    const runs = [];
    let cursor = null;
    for (let page = 0; page < this.pages; page++) {
      const answer = await get("runs", { ...this.filter.value, limit: PAGE, cursor });
      runs.push(...answer.items);
      cursor = answer.next_cursor;
      if (cursor === null) break;
    }
    return { runs, more: cursor !== null };
  }

  /** Asks for verdicts: at once for those that the server keeps of runs that train, then one run after the other. */
  async #judge() {
    try {
      const kept = await this.#kept();
      for (const run of this.runs) {
        if (this.#gone) return;
        const { step } = run;
        if (step === null || step === undefined) continue;
        const told = kept.get(run.id);
        if (told) this.verdicts.set(run.id, { verdict: told, step: -1, at: -Infinity }); // once the run has ended, it is asked for
        else await this.#ask(run.id, step);
      }
    } catch (error) {
      if (error.status === undefined) throw error; // else the list tells that the server is away
    }
  }

  /** @returns {Promise<Map<string, Told>>} by run */
  async #kept() {
    if (!this.runs.some(({ state }) => state === "running")) return new Map();
    const { runs } = await get("verdict");
    const known = runs.filter((/** @type {any} */ { at, hung_s: hung, coasting }) => at !== null || hung || coasting);
    return new Map(known.map((/** @type {any} */ { run, at, waste, level, what, hung_s, coasting }) => [run, { level, what, was: "", waste_now: at === null ? null : waste, hung_s, coasting }]));
  }

  /**
   * Has the server make a verdict, which may cost it a second.
   * @param {string} run
   * @param {number} step the run's newest
   */
  async #ask(run, step) {
    const known = this.verdicts.get(run);
    if (known?.step === step || (known && performance.now() - known.at < 1000 * JUDGE_S)) return;
    const verdict = await get(`runs/${encodeURIComponent(run)}/verdict`);
    this.verdicts.set(run, { verdict, step, at: performance.now() });
  }

  /** @param {{runs: Run[], more: boolean}} answer */
  #show({ runs, more }) {
    this.runs = runs;
    const rows = runs.map((run) => rowOf(run, this.verdicts.get(run.id)?.verdict ?? null));
    if (!this.filter.value.sort) rows.sort((x, y) => Number(x.ended) - Number(y.ended) || (x.ended ? 0 : TONES.indexOf(x.tone) - TONES.indexOf(y.tone)));
    this.grid.setGridOption("rowData", rows);
    this.grid.setColumnsVisible(["tags"], rows.some(({ tags }) => tags?.length));
    this.grid.setColumnsVisible(["cost"], rows.some(({ cost }) => cost));
    const nothing = rows.length === 0 && !this.filter.narrow;
    show("runs-empty", nothing);
    byId("runs-grid").hidden = nothing;
    show("runs-more", more);
    const going = runs.filter((run) => !ENDED.includes(run.state)).length;
    text("runs-count", rows.length ? `${plural(rows.length, "run")}${more ? " and more" : ""}, ${integer(going)} active` : "");
    drawStandings(rows);
  }
}

/**
 * A row of the list. Time per step, SE and waste are means over all complete steps, by which the server sorts.
 * @param {Run} run
 * @param {Told | null} verdict
 */
export function rowOf(run, verdict) {
  const { step_s = null, se = null, waste = null } = run.figures ?? {};
  const ended = ENDED.includes(run.state);
  const { tone, icon, title } = standing(run, verdict);
  const total = stepsOf(run);
  const done = run.step === null || run.step === undefined ? 0 : run.step + 1;
  const eta = run.eta_at === null ? "" : clock(run.eta_at);
  return {
    ...run, step_s, se, waste, waste_now: verdict?.waste_now ?? null, ended, tone, icon, verdict: title,
    cost: run.cost ? amount(run.cost.amount, run.cost.currency) : "",
    progress: total === null ? null : Math.min(1, done / total),
    done: ended ? moment(run.ended_at) : eta,
    live: run.state === "running",
  };
}

/**
 * How many runs train, how many are held up, and how much of the workers' time waits.
 * @param {ReturnType<typeof rowOf>[]} rows
 */
function drawStandings(rows) {
  const live = rows.filter((row) => row.live);
  show("runs-standings", live.length > 0);
  const workers = (/** @type {any} */ row) => row.world ?? row.nproc;
  const all = live.reduce((sum, row) => sum + workers(row), 0);
  text("standing-running", integer(live.length));
  text("standing-workers", `running on ${plural(all, "worker")}`);
  const count = (/** @type {string} */ tone) => live.filter((row) => row.tone === tone).length;
  text("standing-held-up", integer(count("bad")));
  byId("standing-held-up").className = count("bad") ? "bad" : "";
  text("standing-watch", `held up, ${integer(count("warn"))} to watch`);
  const known = live.filter((row) => row.waste_now !== null);
  const weight = known.reduce((sum, row) => sum + workers(row), 0);
  const waste = weight ? known.reduce((sum, row) => sum + workers(row) * (row.waste_now ?? 0), 0) / weight : null;
  text("standing-waste", percent(waste));
}

/** @param {any[]} nodes */
function drawNodes(nodes) {
  if (!nodes.length) {
    byId("nodes").replaceChildren(
      make("p", { className: "muted" }, "No agent has registered. Start one on each machine: ", make("code", {}, "paceline agent")),
    );
    return;
  }
  const head = ["Node", "State", "Type", "Cores", "Memory", "GPUs", "Runs", "Last heard", "Version"];
  const lines = nodes.map((node) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, node.hostname || node.id),
      make("td", {}, make("span", { className: `state ${node.alive ? "running" : "failed"}` }, node.alive ? "alive" : "dead")),
      make("td", {}, node.type || "–"),
      make("td", {}, integer(node.cores)),
      make("td", {}, bytes(node.memory_bytes)),
      make("td", {}, node.gpus.length ? node.gpus.join(", ") : "none"),
      make("td", {}, integer(node.runs.length)),
      make("td", {}, moment(node.heartbeat_at)),
      make("td", {}, node.paceline),
    ),
  );
  byId("nodes").replaceChildren(
    make(
      "div",
      { className: "scroll" },
      make("table", {}, make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, ...lines)),
    ),
  );
}
