// The page of one run: gives its parts data and draws them.
import { chosenOf, queryOf } from "./address.js";
import { newestSteps } from "./ahead.js";
import { change, get } from "./api.js";
import { AttributionChart } from "./attribution.js";
import { Auto } from "./auto.js";
import { Banner, silence } from "./banner.js";
import { Changes, overtakenWords } from "./changes.js";
import { Charts } from "./charts.js";
import { ChartControls } from "./controls.js";
import { costOf } from "./costs.js";
import { RunData } from "./data.js";
import { byId, connection, crumbs, go, poll, problem, show, text, whenThere } from "./dom.js";
import { Effects } from "./effect.js";
import { Epochs } from "./epochs.js";
import { HeatMap } from "./heatmap.js";
import { History } from "./history.js";
import { Live } from "./live.js";
import { Metrics } from "./metrics.js";
import { Painter } from "./painter.js";
import { PolicyPanel } from "./policy.js";
import { Replacing } from "./replacing.js";
import { Resuming } from "./resuming.js";
import { Rounds } from "./rounds.js";
import { drawFacts, drawHeader, ENDED, simulated } from "./summary.js";
import { mean } from "./format.js";
import { plotly } from "./loading.js";
import { TargetPanel } from "./target.js";
import { onTheme, theme } from "./theme.js";
import { drawSpeedup, drawTiles, RECENT } from "./tiles.js";
import { WhatIf } from "./whatif.js";
import { WorkersTable } from "./workers.js";

const POLL_S = 2; // for data without events, such as workers' fits
const LEASE_S = 10; // for the controller's lease; the stream tells all else about a run that goes on
const WHY_S = 5; // for the attribution and the decisions of `auto`
const MANY = 1024; // from this many workers on, tables have megabytes and are requested less often
const MANY_S = 15;
const POINTS = 1000; // most points of rounds over time
const PAUSE_PER_MS = 4; // pause between two requests for rounds, or for metrics, per ms that the answer took
const TREND_S = 15; // for the small charts of the whole run
const TREND_POINTS = 120;
const STALE_S = 10; // without a step for so long, and for STALE_STEPS steps' time, figures are old
const STALE_STEPS = 10;
const HANG_S = 30; // without a step for so long, the server is asked whether the run hangs
const OVERLAP = 20; // steps: they need not come in their order
const LEAST_SPAN = 20; // least number of steps on the axis, so that it does not jump at the start

/**
 * Opens the page; returns a function that closes it.
 * @param {Pick<PageData, "run" | "palette">} page id, colours
 */
export function openRun({ run, palette }) {
  const page = new RunPage(run, palette);
  page.open();
  return () => page.close();
}

class RunPage {
  /**
   * @param {string} id
   * @param {string[]} palette
   */
  constructor(id, palette) {
    this.id = id;
    this.path = `runs/${encodeURIComponent(id)}`;
    this.palette = palette;
    this.closed = false;
    /** @type {any} */
    this.run = null; // the newest state, a `Run`
    /** @type {ViewAnswer | null} */
    this.ahead = null; // the first answer, until it is shown
    /** @type {[number, number] | null} */
    this.zoom = null; // [from, to] that the user chose
    this.pathname = ""; // of this page
    this.usual = "300"; // value of `chart-window` unless the reader chose another
    this.data = new RunData();
    this.effects = new Effects();
    this.painter = new Painter(() => this.#draw());
    this.history = new History(this.path, () => this.painter.request());
    this.charts = new Charts({
      zoomed: (from, to) => this.#zoom([Math.max(0, from), Math.max(from + 1, to)]),
      reset: () => this.#zoom(null),
      seen: () => this.painter.request(),
      pinned: (rank) => this.controls.pin(rank),
      pointed: (step) => this.heatmap.point(step),
    });
    this.controls = new ChartControls(() => this.painter.request());
    this.heatmap = new HeatMap((first, last) => this.#openRank(first, last), () => this.painter.request());
    this.attribution = new AttributionChart();
    this.rounds = new Rounds();
    this.metrics = new Metrics();
    this.workers = new WorkersTable();
    this.epochs = new Epochs(this.path);
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
    this.target = null;
    /** @type {any} */
    this.live = null;
    /** @type {any} */
    this.banner = null;
    /** @type {any} */
    this.trend = null; // columns of the whole run, for the small charts
    this.arrived = 0; // when the newest step came, by the page's clock; 0: none has
    /** @type {any} */
    this.colours = null; // the theme's `Colours`
    /** @type {Record<string, string>} */
    this.requested = {}; // table → key of its last request: step and state of the run
    this.waits = false; // for earlier steps, which the server is asked for
    this.starts = 0; // how often the page took a view: each has evaluations of its own
    this.asked = 0; // number of requests for rounds
    this.lookAfter = 0; // time of the next request for the run's state
    this.meetAfter = 0; // time of the next request: rounds of a long run are an expensive answer
    this.measured = 0; // number of requests for metrics
    this.measureAfter = 0; // time of the next request, as for rounds
    /** @type {(() => void)[]} */
    this.endings = []; // functions that end what the page started
  }

  async open() {
    crumbs(this.id);
    connection("connecting");
    // It comes while the page's elements and Plotly are on their way.
    const ahead = this.#insist(() => newestSteps(this.path));
    const presets = this.#insist(() => get("policies"));
    await whenThere("stop-dialog");
    await this.#insist(() => plotly());
    if (this.closed) return;
    this.workers.open();
    this.epochs.open();
    const changed = () => this.#bearing(() => this.#look());
    /** @type {OpenSwitchDialog} */
    const openDialog = (policy, parameters) => this.policy.openDialog(policy, parameters);
    this.whatif = new WhatIf(this.path, openDialog);
    const switched = (/** @type {number} */ revision) => {
      this.auto.follow(revision);
      this.#take({ ...this.run, revision });
      this.painter.request();
      changed();
    };
    this.policy = new PolicyPanel(this.id, this.data, this.effects, this.whatif, switched);
    this.auto = new Auto(this.path, openDialog, changed);
    this.banner = new Banner(this.path, this.whatif, openDialog);
    this.whatif.onAnswer(() => this.painter.request());
    new Replacing(this.path, () => this.run.revision, changed);
    const resuming = new Resuming(this.path, () => this.run, (run) => {
      this.#take(run);
      this.live.reopen(); // the stream ended with the run
      this.painter.request();
    });
    this.#bearing(() => resuming.askWho());
    this.target = new TargetPanel(this.path, () => this.run, (run) => {
      this.#take(run);
      this.painter.request();
      changed();
    });
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
    this.ahead = (await ahead) ?? null;
    this.policy.take((await presets) ?? []);
    if (this.closed || !this.ahead) return;
    const first = (this.run = this.ahead.run);
    this.#takeAddress(first);
    this.#drawHead();
    this.live = new Live(this.id, (current) => this.#load(current), {
      news: (step, opened) => this.#new(step, opened),
      ended: () => ENDED.includes(this.run.state),
      problem: (/** @type {any} */ error) => {
        if (error.status === 404) connection("unknown"); // deleted meanwhile
        problem("run-problem", error.message);
      },
    });
    this.live.open();
    const many = (first.world ?? first.nproc) > MANY;
    this.endings.push(
      poll(() => this.#overdue && this.#bearing(() => this.#look()), POLL_S),
      poll(() => this.#bearing(() => this.#compare()), many ? MANY_S : POLL_S),
      poll(() => this.#bearing(() => this.#explain()), many ? MANY_S : WHY_S),
      poll(() => this.#bearing(() => this.#judge()), many ? MANY_S : WHY_S),
      poll(() => performance.now() > this.meetAfter && this.#bearing(() => this.#meet()), POLL_S),
      poll(() => performance.now() > this.measureAfter && this.#bearing(() => this.#measure()), many ? MANY_S : WHY_S),
      poll(() => this.#bearing(() => this.auto.refresh(this.run)), WHY_S),
      poll(() => this.#bearing(() => this.#judgeRun()), many ? MANY_S : WHY_S),
      poll(() => this.#bearing(() => this.#follow()), TREND_S),
      poll(() => this.#bearing(() => this.banner.forecast(this.run)), WHY_S),
      poll(() => this.#bearing(() => this.banner.hang(this.#silentS() > HANG_S ? this.#silentS() : null)), WHY_S),
      poll(() => this.epochs.refresh(`${this.run.state} ${this.data.steps.get(this.data.latest)?.epoch}`), many ? MANY_S : WHY_S),
      poll(() => this.#age(), 1),
    );
  }

  /**
   * Shows what the address says was chosen; the whole of a run that has ended, if it says nothing.
   * @param {Run} run
   */
  #takeAddress(run) {
    const chosen = chosenOf(location.search);
    this.pathname = location.pathname;
    this.usual = ENDED.includes(run.state) ? "all" : "300";
    byId("chart-window").value = chosen.window ?? this.usual;
    this.zoom = chosen.zoom;
    this.heatmap.order = chosen.order;
    this.controls.take(chosen);
  }

  /** Puts what is chosen into the address, so that a link to it shows the same. */
  #remember() {
    if (location.pathname !== this.pathname) return; // another page is about to be shown
    const shown = byId("chart-window").value;
    const { window: smoothing, kind: axis, pinned: rank } = this.controls;
    const chosen = { window: shown === this.usual ? null : shown, zoom: this.zoom, smoothing, axis, rank, order: this.heatmap.order };
    const query = queryOf(chosen);
    const address = query ? `?${query}` : location.pathname;
    if (location.search !== (query ? address : "")) window.history.replaceState(window.history.state, "", address);
  }

  close() {
    this.closed = true;
    this.live?.close();
    this.painter.close();
    this.charts.close();
    this.attribution.close();
    this.rounds.close();
    this.metrics.close();
    for (const end of this.endings) end();
    text("connection-age", "");
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
        if (error.status === 404) {
          await whenThere("run-body");
          show("run-missing", true);
          show("run-body", false);
          connection("unknown");
          return undefined;
        }
        if (error.status === 0) connection("lost");
        else problem("run-problem", error.message);
        await new Promise((resolve) => setTimeout(resolve, 1000));
      }
    }
    return undefined;
  }

  /**
   * Loads the page's first data.
   * @param {() => boolean} current
   */
  async #load(current) {
    const answer = this.ahead ?? (await newestSteps(this.path));
    this.ahead = null;
    if (current()) this.#start(answer);
  }

  /** @param {any} answer */
  #start(answer) {
    this.history.clear();
    this.data.start(answer);
    this.#take(answer.run);
    this.#bearing(() => this.#meet());
    this.#bearing(() => this.#evaluations());
    this.#bearing(() => this.#measure());
    this.painter.request();
  }

  /** Requests all evaluations, until the server answers: nothing else asks for them, but for the newest ones. */
  async #evaluations() {
    const start = ++this.starts;
    while (!this.closed && start === this.starts) {
      try {
        const answer = await get(`${this.path}/evaluations?limit=10000`);
        if (this.closed || start !== this.starts) return;
        this.metrics.add(answer);
        this.painter.request();
        return;
      } catch (error) {
        if (error.status !== 0 && !(error.status >= 500)) throw error;
        await new Promise((resolve) => setTimeout(resolve, 1000 * POLL_S));
      }
    }
  }

  /** Requests the training metrics of the steps shown. */
  async #measure() {
    if (this.data.latest < 0) return;
    const [from, to] = this.#range();
    const asked = ++this.measured;
    const began = performance.now();
    const answer = await this.#news("metrics", { from, to: this.zoom ? to : undefined, points: POINTS });
    if (!answer || this.closed || asked !== this.measured) return;
    this.measureAfter = performance.now() + PAUSE_PER_MS * (performance.now() - began);
    this.metrics.update(answer);
    this.painter.request();
  }

  /**
   * Requests what is new.
   * @param {number | null} step the earliest new one, if any
   * @param {boolean} opened other steps may have come while the stream was being opened
   */
  async #new(step, opened) {
    const { attempt, step: before } = this.run;
    const known = Math.min(before ?? -1, this.data.latest) - (opened ? OVERLAP : 0);
    const since = (/** @type {number} */ last) => get(`${this.path}/view`, { since: Math.max(-1, last) });
    let answer = await since(Math.min(known, (step ?? Infinity) - 1));
    if (answer.run.attempt !== attempt) answer = await since(-1); // earlier steps are trained again
    if (this.closed) return;
    this.data.add(answer);
    this.metrics.add(answer.evaluations);
    if (answer.run.step !== before) this.arrived = performance.now();
    this.#take({ ...this.run, ...answer.run });
    if (answer.run.revision !== this.listed) this.#bearing(() => this.#look()); // somebody has changed something
    this.painter.request();
  }

  /** @param {Run} run */
  #take(run) {
    // An answer on its way from before a change must not bring the old revision back.
    this.run = { ...run, revision: Math.max(run.revision, this.run?.revision ?? 0) };
    this.data.going = !ENDED.includes(run.state);
    this.policy.update(this.run);
    this.whatif.update(run);
    this.#tellFailure(run);
  }

  /**
   * Shows the end of a failed rank's log; the banner has the reason.
   * @param {Run} run
   */
  #tellFailure({ state, message }) {
    const log = state === "failed" ? (message ?? "").trim().split("\n").slice(1) : [];
    text("run-log", log.join("\n"));
    show("run-failure", log.length > 0);
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

  /** Whether the run's state must be asked for: more may come of a run that has ended, and its stream has ended, too. */
  get #overdue() {
    return ENDED.includes(this.run.state) || performance.now() > this.lookAfter;
  }

  async #look() {
    this.lookAfter = performance.now() + 1000 * LEASE_S;
    const run = await get(this.path);
    if (this.closed) return;
    this.#take(run);
    // Telemetry arrived after the end, or somebody lets the run go on.
    if (run.step > this.data.latest || !ENDED.includes(run.state)) this.live.reopen();
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
    this.controls.explain(answer.workers);
  }

  async #judge() {
    const effects = await this.#news("effects");
    if (!effects || this.closed) return;
    this.effects.update(effects);
    if (this.data.latest >= 0) this.painter.request(); // else nothing is shown yet
  }

  async #judgeRun() {
    const verdict = await this.#news("verdict");
    if (!verdict || this.closed) return;
    this.banner.verdict = verdict;
    this.controls.judge(verdict, ENDED.includes(this.run.state));
    this.painter.request();
    this.#drawHead();
  }

  async #follow() {
    const trend = await this.#news("steps", { points: TREND_POINTS });
    if (!trend || this.closed) return;
    this.trend = trend;
    this.painter.request();
  }

  /** For how long no step has come, in seconds; 0 where none is due. */
  #silentS() {
    if (this.run.state !== "running" || simulated(this.run) || this.data.latest < 0) return 0;
    if (this.arrived) return (performance.now() - this.arrived) / 1000;
    return Math.max(0, Date.now() / 1000 - (this.data.steps.get(this.data.latest)?.ended_at ?? Infinity));
  }

  /** Tells how old the figures are, where a step is overdue. */
  #age() {
    const silentS = this.#silentS();
    const old = silentS > Math.max(STALE_S, STALE_STEPS * (this.#stepS() ?? 0));
    text("connection-age", old ? silence(silentS) : "");
    byId("run-body")?.classList.toggle("stale", old);
  }

  /** Mean time of the newest steps; null before the first. */
  #stepS() {
    return mean(this.data.rowsBetween(this.data.latest - RECENT + 1, this.data.latest).map((row) => row.step_s));
  }

  /** Seconds until the run's end; null: unknown. */
  #leftS() {
    const { eta_at: etaAt } = this.run;
    return etaAt === null ? null : Math.max(0, etaAt - Date.now() / 1000);
  }

  /** The step since which the leader plans by itself, for no controller does; null: one does. */
  #coastsSince() {
    const { run, data } = this;
    if (run.state !== "running" || simulated(run) || run.controller?.alive) return null;
    const [first, end] = data.coasts.at(-1) ?? [0, -1];
    return end > data.latest && first <= data.latest ? first : null;
  }

  /** Draws title, banner and tiles: what needs no chart. */
  #drawHead() {
    if (!byId("run-name") || !this.run) return;
    const leftS = this.#leftS();
    const { verdict } = this.banner;
    const { data, trend } = this;
    const cost = costOf({ rows: data.rowsBetween(0, data.latest), trend, world: this.run.world ?? this.run.nproc, begins: data.begins, verdict });
    const hung = this.run.state === "running" ? this.banner.hung : null;
    const nodeOf = (/** @type {number} */ rank) => this.workers.causes.get(rank)?.on_node ?? "";
    drawHeader(this.run, data.steps.get(data.latest), leftS, hung !== null);
    this.banner.draw(this.run, { cost, leftS, coastsSince: this.#coastsSince(), local: this.data.segment?.source === "local", nodeOf });
    drawTiles({ run: this.run, data, verdict, trend, workers: this.workers.workers, causes: this.workers.causes, cost, hung });
    drawSpeedup(this.data, this.effects);
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
    this.controls.open();
    const select = byId("chart-window");
    select.value = "300";
    select.addEventListener("change", () => this.#zoom(null));
    byId("chart-live").addEventListener("click", () => {
      if (select.value === "all" && this.data.going) select.value = "300";
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
    if (Object.keys(this.metrics.training).length) this.#bearing(() => this.#measure());
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
   * The steps to draw, [from, to], and the view that holds them. While earlier steps are on their way, the axis begins
   * with the steps that are here: a chart that is mostly blank looks like lost data.
   * @returns {[number, number, View]}
   */
  #shown() {
    const { latest } = this.data;
    const world = this.run.world ?? this.run.nproc;
    const choice = byId("chart-window").value;
    const [from, to] = this.#range();
    const here = latest < 0 || this.data.reachesBackTo(from);
    const key = this.zoom?.join("–") ?? choice;
    const older = here ? null : this.history.view(key, from, to, this.data, world);
    this.waits = !here && older === null;
    const view = older ?? this.data.view(from, to, world);
    const first = view.heat?.step[0] ?? from;
    return [this.waits && this.zoom === null ? Math.min(first, to - LEAST_SPAN + 1) : from, to, view];
  }

  /**
   * Opens the page of the slowest of some ranks.
   * @param {number} first
   * @param {number} last
   */
  #openRank(first, last) {
    go(`runs/${encodeURIComponent(this.id)}/ranks/${this.workers.slowest(first, last)}`);
  }

  #draw() {
    if (!byId("chart-compute") || !this.run) return;
    this.#drawHead();
    if (!this.policy.run) return; // the snapshot is on its way
    const [from, to, view] = this.#shown();
    const reading = this.controls.reading(view, from, to);
    const others = [...this.rounds.charts(this.colours), ...this.metrics.charts(this.colours, reading.window)];
    this.charts.draw(this.data, view, reading, this.colours, others);
    this.metrics.draw(this.data, this.run, this.colours);
    this.heatmap.draw(view.heat, reading.axis, this.controls.causes, reading.focus, this.colours);
    this.#remember();
    drawFacts(this.run);
    this.target.draw(this.metrics.names);
    this.policy.draw();
    const { going } = this.data;
    show("chart-live", this.zoom !== null || (going && byId("chart-window").value === "all"));
    text("chart-live", going ? "Back to live" : "Back to the whole run");
    text("chart-note", note(view, this.zoom, this.waits));
    byId("page").dataset.drawn = this.data.latest; // how far the page shows the run
  }
}

/**
 * @param {View} view
 * @param {[number, number] | null} zoom
 * @param {boolean} waits for earlier steps
 */
function note(view, zoom, waits) {
  const parts = waits ? ["earlier steps are loading…"] : [];
  if (view.bucket > 1) parts.push(`each point stands for ${view.bucket} steps; least and greatest kept`);
  parts.push(zoom ? "double-click a chart to go back" : "drag across a chart to zoom");
  return parts.join(" · ");
}
