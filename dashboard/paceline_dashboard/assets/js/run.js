// The page of one run: gives its parts data and draws them.
import { change, get } from "./api.js";
import { AttributionChart } from "./attribution.js";
import { Auto } from "./auto.js";
import { Changes, overtakenWords } from "./changes.js";
import { Charts, MOST_LINES } from "./charts.js";
import { MOST_STEPS, RunData } from "./data.js";
import { byId, connection, crumbs, poll, problem, show, text, whenThere } from "./dom.js";
import { Effects } from "./effect.js";
import { HeatMap } from "./heatmap.js";
import { History } from "./history.js";
import { Live } from "./live.js";
import { Painter } from "./painter.js";
import { PolicyPanel } from "./policy.js";
import { Rounds } from "./rounds.js";
import { drawFacts, drawHeader, drawKpis, ENDED } from "./summary.js";
import { plotly } from "./loading.js";
import { onTheme, theme } from "./theme.js";
import { WhatIf } from "./whatif.js";
import { WorkersTable } from "./workers.js";

const LOADED_CELLS = 60_000; // workers × steps per request, which take the server a second
const POLL_S = 2; // for data without events: workers' fits, the controller's lease
const WHY_S = 5; // for the attribution and the decisions of `auto`
const MANY = 1024; // from this many workers on, tables have megabytes and are requested less often
const MANY_S = 15;
const POINTS = 1000; // most points of rounds over time
const PAUSE_PER_MS = 4; // pause between two requests for rounds, per ms that the answer took
const LEAST_SPAN = 20; // least number of steps on the axis, so that it does not jump at the start

/**
 * Opens the page; returns a function that closes it.
 * @param {Pick<PageData, "run" | "palette" | "plotly">} page id, colours, where Plotly is
 */
export function openRun({ run, palette, plotly }) {
  const page = new RunPage(run, palette, plotly);
  page.open();
  return () => page.close();
}

class RunPage {
  /**
   * @param {string} id
   * @param {string[]} palette
   * @param {string} plotlyUrl
   */
  constructor(id, palette, plotlyUrl) {
    this.id = id;
    this.plotlyUrl = plotlyUrl;
    this.path = `runs/${encodeURIComponent(id)}`;
    this.palette = palette;
    this.closed = false;
    /** @type {any} */
    this.run = null; // the newest state, a `Run`
    /** @type {[number, number] | null} */
    this.zoom = null; // [from, to] that the user chose
    this.data = new RunData();
    this.effects = new Effects();
    this.painter = new Painter(() => this.#draw());
    this.history = new History(this.path, () => this.painter.request());
    this.charts = new Charts({
      zoomed: (from, to) => this.#zoom([Math.max(0, from), Math.max(from + 1, to)]),
      reset: () => this.#zoom(null),
      seen: () => this.painter.request(),
    });
    this.heatmap = new HeatMap();
    this.attribution = new AttributionChart();
    this.rounds = new Rounds();
    this.workers = new WorkersTable();
    this.changes = new Changes(this.path);
    this.listed = -1; // revision of the run that the list of changes shows
    this.seen = 0; // revision that the dialog to stop was opened with
    // Made by `open`, when the page's elements are there.
    /** @type {any} */
    this.policy = null;
    /** @type {any} */
    this.whatif = null;
    /** @type {any} */
    this.auto = null;
    /** @type {any} */
    this.live = null;
    /** @type {any} */
    this.colours = null; // the theme's `Colours`
    /** @type {Record<string, string>} */
    this.requested = {}; // table → key of its last request: step and state of the run
    this.asked = 0; // number of requests for rounds
    this.meetAfter = 0; // time of the next request: rounds of a long run are an expensive answer
    /** @type {(() => void)[]} */
    this.endings = []; // functions that end what the page started
  }

  async open() {
    crumbs(this.id);
    connection("connecting");
    await whenThere("stop-dialog");
    await this.#insist(() => plotly(this.plotlyUrl));
    if (this.closed) return;
    this.workers.open();
    const changed = () => this.#bearing(() => this.#look());
    this.policy = new PolicyPanel(this.id, this.data, this.effects, changed);
    /** @type {OpenSwitchDialog} */
    const openDialog = (policy, parameters) => this.policy.openDialog(policy, parameters);
    this.whatif = new WhatIf(this.path, this.data, openDialog);
    this.auto = new Auto(this.path, openDialog, changed);
    this.#controls();
    this.colours = theme(this.palette);
    this.endings.push(
      onTheme(() => {
        this.colours = theme(this.palette);
        this.attribution.draw(this.colours);
        this.rounds.draw(this.colours);
        this.painter.request();
      }),
    );
    const first = await this.#insist(() => get(this.path));
    if (this.closed || !first) return;
    this.run = first;
    this.live = new Live(this.id, (current) => this.#load(current), {
      event: (event) => this.#event(event),
      problem: (error) => problem("run-problem", error.message),
      ended: () => ENDED.includes(this.run.state),
    });
    this.live.open();
    const many = (first.world ?? first.nproc) > MANY;
    this.endings.push(
      poll(() => this.#bearing(() => this.#look()), POLL_S),
      poll(() => this.#bearing(() => this.#compare()), many ? MANY_S : POLL_S),
      poll(() => this.#bearing(() => this.#explain()), many ? MANY_S : WHY_S),
      poll(() => this.#bearing(() => this.#judge()), many ? MANY_S : WHY_S),
      poll(() => performance.now() > this.meetAfter && this.#bearing(() => this.#meet()), POLL_S),
      poll(() => this.#bearing(() => this.auto.refresh(this.run)), WHY_S),
    );
  }

  close() {
    this.closed = true;
    this.live?.close();
    this.painter.close();
    this.charts.close();
    this.attribution.close();
    this.rounds.close();
    for (const end of this.endings) end();
    document.title = "Paceline";
  }

  /**
   * Repeats `ask` until the server answers; undefined if the server has no answer (404).
   * @param {() => Promise<any>} ask
   */
  async #insist(ask) {
    while (!this.closed) {
      try {
        const answer = await ask();
        problem("run-problem", "");
        return answer;
      } catch (error) {
        problem("run-problem", error.message);
        if (error.status === 404) return undefined;
        await new Promise((resolve) => setTimeout(resolve, 1000));
      }
    }
    return undefined;
  }

  /**
   * Loads the page's first data; returns the position from which events go on.
   * @param {() => boolean} current
   */
  async #load(current) {
    const world = this.run.world ?? this.run.nproc;
    const most = Math.max(50, Math.min(MOST_STEPS, Math.floor(LOADED_CELLS / world)));
    const answer = await get(`${this.path}/snapshot`, { last: MOST_STEPS, worker_last: most });
    if (!this.policy.presets.length) await this.policy.load();
    if (current()) this.#start(answer);
    return answer.since;
  }

  /** @param {any} answer */
  #start(answer) {
    this.data.clear();
    this.data.begins = answer.begins ?? 0;
    this.history.clear();
    this.data.addSteps(answer.steps);
    this.data.addTable(answer.worker_steps);
    answer.segments.forEach((/** @type {Segment} */ segment) => this.data.addSegment(segment));
    answer.switches.forEach((/** @type {Switch} */ change) => this.data.addSwitch(change));
    this.#take(answer.run);
    this.#bearing(() => this.#meet());
    this.painter.request();
  }

  /** @param {any} event */
  #event(event) {
    const { type, ...body } = event;
    if (type === "steps") this.data.addSteps(body);
    else if (type === "worker_steps") this.data.addFlat(body);
    else if (type === "segment") this.data.addSegment(body);
    else if (type === "switch") this.data.addSwitch(body);
    else if (type === "run") this.#take({ ...this.run, ...body });
    this.painter.request();
  }

  /** @param {Run} run */
  #take(run) {
    // An answer on its way from before a change must not bring the old revision back.
    this.run = { ...run, revision: Math.max(run.revision, this.run?.revision ?? 0) };
    this.policy.update(run);
    this.whatif.update(run);
    this.#tellFailure(run);
  }

  /**
   * Shows why the run failed: the first line of the message is the reason, the rest is the end of a rank's log.
   * @param {Run} run
   */
  #tellFailure({ state, message, exit_code: exitCode }) {
    const [words, ...log] = state === "failed" ? (message ?? `exit code ${exitCode}`).trim().split("\n") : [];
    problem("run-problem", words === undefined ? "" : `The run failed: ${words}`);
    text("run-log", log.join("\n"));
    show("run-log", log.length > 0);
  }

  /**
   * Ignores that the server is away: the stream notices and reports it.
   * @param {() => unknown} task
   */
  async #bearing(task) {
    try {
      await task();
    } catch (error) {
      if (error.status === undefined) throw error;
    }
  }

  async #look() {
    const run = await get(this.path);
    if (this.closed) return;
    this.#take(run);
    if (run.step > this.data.latest && ENDED.includes(run.state)) this.live.reopen(); // telemetry arrived after the end
    this.painter.request();
    if (run.revision === this.listed) return;
    await Promise.all([this.auto.refresh(run), this.changes.refresh()]);
    this.listed = run.revision;
  }

  async #compare() {
    const workers = await this.#news("workers", { last: 50 });
    if (workers && !this.closed) this.workers.update(workers);
  }

  async #explain() {
    const answer = await this.#news("attribution");
    if (!answer || this.closed) return;
    this.attribution.update(answer, this.colours);
    this.workers.explain(answer.workers);
  }

  async #judge() {
    const effects = await this.#news("effects");
    if (!effects || this.closed) return;
    this.effects.update(effects);
    if (this.data.latest >= 0) this.painter.request(); // else nothing is shown yet
  }

  /** Requests the rounds of the steps shown; in a live window, also those of incomplete steps. */
  async #meet() {
    if (this.data.latest < 0) return; // no steps are shown yet
    const [from, to] = this.#range();
    const asked = ++this.asked;
    const began = performance.now();
    const answer = await this.#news("synchronisation", { from, to: this.zoom ? to : undefined, points: POINTS });
    if (!answer || this.closed || asked !== this.asked) return;
    this.meetAfter = performance.now() + PAUSE_PER_MS * (performance.now() - began);
    this.data.chosen = answer.chosen;
    this.rounds.update(answer, this.colours);
    this.painter.request();
  }

  /**
   * The server's answer on the newest steps; null if the run has ended and the answer is known.
   * @param {string} name
   * @param {Record<string, any>} parameters
   */
  async #news(name, parameters = {}) {
    const { state, step } = this.run;
    const key = `${state} ${step} ${JSON.stringify(parameters)}`;
    if (ENDED.includes(state) && this.requested[name] === key) return null;
    const answer = await get(`${this.path}/${name}`, parameters);
    this.requested[name] = key;
    return answer;
  }

  #controls() {
    const select = byId("chart-window");
    select.value = "300";
    select.addEventListener("change", () => this.#zoom(null));
    byId("chart-live").addEventListener("click", () => {
      if (select.value === "all") select.value = "300";
      this.#zoom(null);
    });
    byId("stop-open").addEventListener("click", () => {
      problem("stop-problem", "");
      this.seen = this.run.revision;
      byId("stop-why").value = "";
      byId("stop-dialog").showModal();
    });
    byId("stop-confirm").addEventListener("click", () => this.#stop());
  }

  async #stop() {
    try {
      const body = { force: byId("stop-force").checked, by: "dashboard", why: byId("stop-why").value };
      this.#take(await change("POST", `${this.path}/stop`, body, this.seen));
      byId("stop-dialog").close();
      this.painter.request();
    } catch (error) {
      if (error.status === undefined) throw error;
      const overtaken = error.status === 412;
      if (overtaken) this.seen = error.problem.revision; // the operator knows now
      problem("stop-problem", overtaken ? `${overtakenWords(error)} The run was not stopped. Confirm again to stop it all the same.` : error.message);
    }
  }

  /** @param {[number, number] | null} range */
  #zoom(range) {
    this.zoom = range;
    this.history.clear();
    if (this.rounds.any) this.#bearing(() => this.#meet());
    this.painter.request();
  }

  /**
   * The steps on the axis, [from, to].
   * @returns {[number, number]}
   */
  #range() {
    const { latest, begins } = this.data;
    const choice = byId("chart-window").value;
    const first = choice === "all" ? begins : Math.max(begins, latest - Number(choice) + 1);
    return this.zoom ?? [first, Math.max(latest, first + LEAST_SPAN - 1)];
  }

  /**
   * The steps to draw, [from, to], and the view that holds them.
   * @returns {[number, number, View]}
   */
  #shown() {
    const { latest } = this.data;
    const world = this.run.world ?? this.run.nproc;
    const choice = byId("chart-window").value;
    const [from, to] = this.#range();
    // A live window does not wait for history: with many workers, the lines of workers begin later.
    const live = this.zoom === null && choice !== "all";
    const here = live || latest < 0 || this.data.reachesBackTo(from, true);
    const key = this.zoom?.join("–") ?? choice;
    const older = here ? null : this.history.view(key, from, to, latest, world);
    return [from, to, older ?? this.data.view(from, to, world)];
  }

  #draw() {
    if (!byId("chart-compute") || !this.run) return;
    const [from, to, view] = this.#shown();
    const many = view.ranks.length > MOST_LINES;
    show("heatmap-card", many);
    this.charts.draw(this.data, view, from, to, this.colours, this.rounds.charts(this.colours));
    if (many) this.heatmap.draw(view, from, to);
    drawHeader(this.run, this.data.steps.get(this.data.latest));
    drawKpis(this.data, this.effects);
    drawFacts(this.run);
    this.policy.draw();
    show("chart-live", this.zoom !== null || byId("chart-window").value === "all");
    text("chart-note", note(view, this.zoom));
  }
}

/**
 * @param {View} view
 * @param {[number, number] | null} zoom
 */
function note(view, zoom) {
  const parts = [];
  const [first, firstCell] = [view.step[0], view.cellStep[0]];
  if (view.bucket === 1 && firstCell > first) parts.push(`single workers from step ${firstCell} on`);
  if (view.bucket > 1) parts.push(`each point stands for ${view.bucket} steps; extremes kept`);
  parts.push(zoom ? "double-click a chart to go back" : "drag across a chart to zoom");
  return parts.join(" · ");
}
