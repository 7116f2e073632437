// The list of runs and the nodes.
import { get } from "./api.js";
import { byId, connection, make, poll, problem, show, text, whenThere } from "./dom.js";
import { bytes, integer, mean, moment, plural } from "./format.js";
import { ENDED } from "./summary.js";

const PERIOD_S = 2;
const PAGE = 50;
const RECENT = 20; // steps of which step time, SE and waste are means

/** Opens the page; returns a function that closes it. */
export function openRuns() {
  const page = new RunsPage();
  page.open();
  return () => page.close();
}

class RunsPage {
  constructor() {
    this.closed = false;
    this.pages = 1;
    /** @type {any} */
    this.grid = null;
    /** @type {Map<string, Record<string, number | null>>} */
    this.figures = new Map(); // run → figures of its last steps; kept once the run has ended
    this.end = () => {};
  }

  async open() {
    connection("connecting");
    await whenThere("nodes");
    this.grid = await window.dash_ag_grid.getApiAsync("runs-grid");
    if (this.closed) return;
    this.grid.setGridOption("overlayNoRowsTemplate", "No run in this state");
    byId("state-filter").addEventListener("change", () => {
      this.pages = 1;
      this.#refresh();
    });
    byId("runs-more").addEventListener("click", () => {
      this.pages += 1;
      this.#refresh();
    });
    this.end = poll(() => this.#refresh(), PERIOD_S);
  }

  close() {
    this.closed = true;
    this.end();
  }

  /** Whether another page is there: its elements come a little before this one is closed. */
  get #gone() {
    return this.closed || !byId("runs-grid");
  }

  async #refresh() {
    try {
      const state = byId("state-filter").value;
      const [answer, nodes] = await Promise.all([this.#runs(state), get("nodes")]);
      if (this.#gone) return;
      connection("live");
      problem("runs-problem", "");
      this.#show(answer, state);
      drawNodes(nodes);
      // Show the list first: figures take one more request per active run.
      await Promise.all(answer.runs.map((run) => this.#figure(run)));
      if (!this.#gone) this.#show(answer, state);
    } catch (error) {
      if (error.status === undefined) throw error;
      if (this.closed) return;
      if (error.status === 0) connection("lost");
      else problem("runs-problem", error.message);
    }
  }

  /**
   * @param {string} state
   * @returns {Promise<{runs: Run[], more: boolean}>}
   */
  async #runs(state) {
    /** @type {Run[]} */
    const runs = [];
    let cursor = null;
    for (let page = 0; page < this.pages; page++) {
      const answer = await get("runs", { state, limit: PAGE, cursor });
      runs.push(...answer.items);
      cursor = answer.next_cursor;
      if (cursor === null) break;
    }
    return { runs, more: cursor !== null };
  }

  /** @param {Run} run */
  async #figure(run) {
    const known = this.figures.get(run.id);
    if (run.step === null || run.step === undefined || known?.step === run.step) return;
    const columns = await get(`runs/${encodeURIComponent(run.id)}/steps`, { from: Math.max(0, run.step - RECENT + 1), points: RECENT });
    const of = (/** @type {string} */ name) => mean(columns[name] ?? []);
    this.figures.set(run.id, { step: run.step, step_s: of("step_s"), se: of("se"), waste: of("waste") });
  }

  /**
   * @param {{runs: Run[], more: boolean}} answer
   * @param {string} state
   */
  #show({ runs, more }, state) {
    const rows = runs.map((run) => {
      const { step_s, se, waste } = this.figures.get(run.id) ?? {};
      return { ...run, step_s, se, waste };
    });
    this.grid.setGridOption("rowData", rows);
    const nothing = rows.length === 0 && state === "";
    show("runs-empty", nothing);
    byId("runs-grid").hidden = nothing;
    show("runs-more", more);
    const going = runs.filter((run) => !ENDED.includes(run.state)).length;
    text("runs-count", rows.length ? `${plural(rows.length, "run")}${more ? " and older ones" : ""}, ${integer(going)} going on` : "");
  }
}

/** @param {any[]} nodes */
function drawNodes(nodes) {
  if (!nodes.length) {
    byId("nodes").replaceChildren(
      make("p", { className: "muted" }, "No agent has registered. Start one on each machine: ", make("code", {}, "paceline agent")),
    );
    return;
  }
  const head = ["Node", "State", "Cores", "Memory", "GPUs", "Runs", "Last heard", "Version"];
  const lines = nodes.map((node) =>
    make(
      "tr",
      {},
      make("th", { scope: "row" }, node.hostname || node.id),
      make("td", {}, make("span", { className: `state ${node.alive ? "running" : "failed"}` }, node.alive ? "alive" : "dead")),
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
