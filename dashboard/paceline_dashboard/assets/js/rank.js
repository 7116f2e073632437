// The page of one rank: gives its parts data and draws them.
import { get, url } from "./api.js";
import { axisOf } from "./axis.js";
import { CONFIG, layout } from "./charts.js";
import { byId, connection, crumbs, go, make, poll, problem, show, text, whenThere } from "./dom.js";
import { drawGantt } from "./gantt.js";
import { device as formatted, integer } from "./format.js";
import { FORMATS, line } from "./lines.js";
import { Live } from "./live.js";
import { plotly } from "./loading.js";
import { Log } from "./log.js";
import { beside, drawFacts, drawHistory, drawNode, drawVerdict, historyOf } from "./rankfacts.js";
import { typicalOf } from "./rows.js";
import { ENDED, simulated } from "./summary.js";
import { onTheme, theme } from "./theme.js";
import { viewOf } from "./views.js";

// Least time between two requests, while the stream brings steps. A run that has ended is asked about once.
const STEPS_S = 1;
const FACTS_S = 5;
const MANY_S = 15; // with more than a thousand workers, whose tables have megabytes
const LOOK_S = 10; // between two looks whether more has come of a run that has ended
const HANG_POLL_S = 10;
const SHOWN = 3; // steps of the timeline
const WINDOW = 50; // steps of the rolling median
const MOST_LINKED = 16; // ranks that have a link each

/**
 * Opens the page; returns a function that closes it.
 * @param {Pick<PageData, "run" | "rank" | "palette">} page
 */
export function openRank(page) {
  const opened = new RankPage(page.run, Number(page.rank), page.palette);
  opened.open();
  return () => opened.close();
}

class RankPage {
  /**
   * @param {string} run
   * @param {number} rank
   * @param {string[]} palette
   */
  constructor(run, rank, palette) {
    this.palette = palette;
    this.id = run;
    this.rank = rank;
    this.path = `runs/${encodeURIComponent(run)}`;
    this.closed = false;
    /** @type {any} */
    this.run = null;
    /** @type {any} */
    this.colours = null;
    /** @type {Map<number, any>} */
    this.causes = new Map(); // rank → worker of `GET attribution`
    /** @type {any[]} */
    this.workers = [];
    /** @type {any} */
    this.view = null; // the newest answer of `GET view`
    /** @type {any} */
    this.own = null; // the rank's columns over the run
    /** @type {any} */
    this.timeline = null;
    /** @type {number | null} */
    this.last = null; // the timeline's last step, where the reader chose one; null: the newest
    /** @type {Log | null} */
    this.log = null;
    this.asked = false; // for stacks, since the run has hung
    this.arrived = 0; // when the newest step came, by performance.now(); 0: none has
    /** @type {Record<string, string>} */
    this.known = {}; // part of the page → the state of the run that it shows
    /** @type {Live | null} */
    this.live = null;
    /** @type {(() => void)[]} */
    this.endings = [];
  }

  async open() {
    crumbs(`${this.id} / rank ${this.rank}`);
    connection("connecting");
    await whenThere("rank-history");
    if (!(await this.#first())) return;
    await this.#bearing(() => plotly());
    if (this.closed) return;
    this.live = new Live(this.id, (current) => this.#load(current), {
      news: () => this.#new(),
      ended: () => this.#ended,
      problem: (error) => problem("rank-problem", error.message),
    });
    this.live.open();
    this.colours = theme(this.palette);
    this.#controls();
    this.log = this.run.driver ? new Log(this.path, 0, "the script's, with what it prints of its ranks") : new Log(this.path, this.rank);
    this.log.open();
    const slow = (this.run.world ?? this.run.nproc) > 1024;
    this.endings.push(
      onTheme(() => {
        this.colours = theme(this.palette);
        this.#drawCharts();
      }),
      poll(() => this.#news("steps", () => this.#steps()), STEPS_S),
      // While no step comes, a node may leave: of a run that goes on, facts are asked for all the same.
      poll(() => (this.#ended ? this.#news("facts", () => this.#facts()) : this.#bearing(() => this.#facts())), slow ? MANY_S : FACTS_S),
      poll(() => this.#bearing(() => this.#look()), LOOK_S),
      poll(() => this.#news("past", () => this.#past()), slow ? MANY_S : FACTS_S),
      poll(() => this.#bearing(() => this.#hang()), HANG_POLL_S),
    );
    const resized = new ResizeObserver(() => this.#drawTimeline());
    resized.observe(byId("gantt"));
    this.endings.push(() => resized.disconnect());
  }

  get #ended() {
    return ENDED.includes(this.run.state);
  }

  /** More may come of a run that has ended, whose stream has ended, too; and somebody may let it go on. */
  async #look() {
    if (!this.#ended) return;
    const run = await get(this.path);
    if (this.closed || (run.step === this.run.step && ENDED.includes(run.state))) return;
    this.live?.reopen();
  }

  close() {
    this.closed = true;
    this.live?.close();
    this.log?.close();
    for (const end of this.endings) end();
    for (const id of ["chart-ratio", "chart-times"]) if (byId(id)?.data) window.Plotly.purge(id);
    document.title = "Paceline";
  }

  /**
   * Loads what the charts show.
   * @param {() => boolean} current
   */
  async #load(current) {
    const view = await get(`${this.path}/view`);
    if (!current() || this.closed) return;
    this.view = view;
    this.run = view.run;
    const ended = view.steps.ended_at.at(-1);
    this.arrived = ended === undefined ? 0 : performance.now() - Math.max(0, Date.now() - 1000 * ended);
  }

  async #new() {
    const run = await get(this.path);
    if (this.closed) return;
    if (run.step !== this.run.step) this.arrived = performance.now();
    this.run = run;
  }

  /**
   * Asks for a part of the page, if the run has changed since the part was asked for.
   * @param {string} part
   * @param {() => Promise<void>} ask
   */
  async #news(part, ask) {
    const { state, step, revision } = this.run;
    const now = `${state} ${step} ${revision}`;
    if (this.known[part] === now) return;
    await this.#bearing(async () => {
      await ask();
      this.known[part] = now;
    });
  }

  /** Waits for the run itself; false: there is no such run or rank, or the page was closed. */
  async #first() {
    while (!this.closed) {
      try {
        this.run = await get(this.path);
        break;
      } catch (error) {
        if (error.status === undefined) throw error;
        problem("rank-problem", error.message);
        if (error.status === 404) {
          connection("unknown");
          return false;
        }
        if (error.status === 0) connection("lost");
        await new Promise((resolve) => setTimeout(resolve, 1000));
      }
    }
    if (this.closed) return false;
    const world = this.run.world ?? this.run.nproc;
    const there = this.rank < world;
    problem("rank-problem", there ? "" : `Run ${this.id} has ${integer(world)} ranks: 0 to ${integer(world - 1)}.`);
    if (!there) connection("missing");
    byId("rank-run").textContent = this.run.name || this.id;
    document.title = `rank ${this.rank} · ${this.run.name || this.id} · Paceline`;
    this.#pick(world);
    return there;
  }

  /**
   * Other ranks: a link for each of a few, else a field.
   * @param {number} world
   */
  #pick(world) {
    const to = (/** @type {number} */ rank) => `${this.path}/ranks/${rank}`;
    const place = byId("rank-pick-place");
    if (world <= MOST_LINKED) {
      place.replaceChildren(...Array.from({ length: world }, (_, rank) => {
        const link = make("a", { href: new URL(to(rank), new URL("../../", import.meta.url)).pathname, className: rank === this.rank ? "pick on" : "pick" }, String(rank));
        if (rank === this.rank) link.setAttribute("aria-current", "page");
        link.addEventListener("click", (/** @type {MouseEvent} */ event) => {
          if (event.ctrlKey || event.metaKey || event.shiftKey) return;
          event.preventDefault();
          go(to(rank));
        });
        return link;
      }));
      return;
    }
    const input = make("input", { id: "rank-pick", type: "number", min: "0", max: String(world - 1), value: String(this.rank) });
    input.addEventListener("change", () => go(to(Math.min(world - 1, Math.max(0, Math.round(Number(input.value)))))));
    place.replaceChildren(input);
  }

  #controls() {
    byId("gantt-back").addEventListener("click", () => this.#move(-SHOWN));
    byId("gantt-on").addEventListener("click", () => this.#move(SHOWN));
    byId("gantt-follow").addEventListener("click", () => this.#move(null));
    byId("stacks-ask").addEventListener("click", () => this.#stacks());
  }

  /** @param {number | null} by steps; null: to the newest */
  #move(by) {
    const last = this.timeline?.to ?? 0;
    this.last = by === null ? null : Math.max(SHOWN - 1, last + by);
    byId("gantt-follow").setAttribute("aria-pressed", String(this.last === null));
    this.#bearing(() => this.#steps(true));
  }

  /** @param {boolean} anew even where the reader has chosen steps that are shown */
  async #steps(anew = false) {
    if (this.timeline && this.last !== null && !anew) return;
    const ranks = beside(this.rank, this.run.world ?? this.run.nproc, this.causes);
    const span = this.last === null ? {} : { from: this.last - SHOWN + 1, to: this.last };
    const answer = await get(`${this.path}/timeline`, { ranks: ranks.join(","), ...span });
    if (this.closed) return;
    this.timeline = answer;
    this.#drawTimeline();
  }

  #drawTimeline() {
    if (!this.timeline || !byId("gantt")) return;
    const { from, to } = this.timeline;
    text("gantt-steps", `steps ${integer(from)} to ${integer(to)}`);
    byId("gantt-trace").href = Object.assign(url(`${this.path}/trace`), { search: `?from=${from}&to=${to}` }).href;
    drawGantt(this.timeline, this.rank, (rank) => this.causes.get(rank)?.on_node ?? "");
  }

  async #facts() {
    const [workers, attribution] = await Promise.all([get(`${this.path}/workers`, { last: 50 }), get(`${this.path}/attribution`)]);
    if (this.closed) return;
    if (!this.causes.size) delete this.known.steps; // which ranks stand beside this rank depends on them
    Object.assign(this, { workers, causes: new Map(attribution.workers.map((/** @type {any} */ worker) => [worker.rank, worker])) });
    const [run, own] = [this.run, this.causes.get(this.rank)];
    drawFacts(workers, this.rank, own);
    drawVerdict(own);
    const device = workers.find((/** @type {any} */ worker) => worker.rank === this.rank)?.device;
    text("rank-where", [simulated(run) ? "simulated" : "", own?.on_node, device ? formatted(device) : run.device].filter(Boolean).join(", "));
    text("rank-phase", ENDED.includes(run.state) ? run.state : `step ${integer(workers.find((/** @type {any} */ worker) => worker.rank === this.rank)?.last_step)}`);
    await this.#node(own?.on_node ?? null);
  }

  /** @param {string | null} name */
  async #node(name) {
    const [nodes, past] = name === null ? [[], null] : await Promise.all([
      get("nodes"), get(`nodes/${encodeURIComponent(name)}/history`).catch(() => null),
    ]);
    if (this.closed) return;
    const ranks = [...this.causes.values()].filter((worker) => name !== null && worker.on_node === name);
    drawNode(nodes.find((/** @type {any} */ node) => node.id === name), name, past, ranks, this.rank);
  }

  async #past() {
    const [view, own, verdict] = await Promise.all([
      get(`${this.path}/view`), get(`${this.path}/worker-steps`, { ranks: this.rank, points: 512 }), get(`${this.path}/verdict`),
    ]);
    if (this.closed) return;
    Object.assign(this, { view, own });
    drawHistory(historyOf(this.rank, verdict, this.causes.get(this.rank), view.switches, view.begins ?? 0));
    this.#drawCharts();
  }

  #drawCharts() {
    if (!this.view || !this.own || !byId("chart-ratio")) return;
    const view = viewOf(this.view, this.run.world ?? this.run.nproc);
    const { step, bucket, ranks } = this.own;
    const column = (/** @type {string} */ name) => (ranks.length ? (this.own[name]?.[0] ?? undefined) : undefined);
    const base = { step, bucket, value: column("compute_s") ?? [] };
    const extremes = bucket > 1 ? { low: column("compute_s_min"), high: column("compute_s_max") } : {};
    const slow = (this.causes.get(this.rank)?.cause ?? "none") !== "none";
    const [color, band] = slow ? [this.colours.bad, this.colours.badBand] : [this.colours.accent, this.colours.greyBand];
    const typical = typicalAt(view, this.causes);
    const ratio = { step, bucket, value: base.value.map((/** @type {number | null} */ value, /** @type {number} */ at) => (value === null ? null : value / typical(step[at]))) };
    this.#plot("chart-ratio", view, "factor", line(ratio, { color, width: 1.75, name: "", format: FORMATS.factor }, WINDOW, band));
    const ett = { step, bucket, value: column("ett_s") ?? [] };
    this.#plot("chart-times", view, "seconds", [
      ...line(ett, { color: this.colours.muted, width: 1.2, dash: "dash", name: "ETT", format: FORMATS.seconds }, WINDOW, null),
      ...line({ ...base, ...extremes }, { color, width: 1.75, name: "compute", format: FORMATS.seconds }, WINDOW, band),
    ]);
  }

  /**
   * @param {string} id
   * @param {View} view
   * @param {ChartOptions["unit"]} unit
   * @param {any[]} traces
   */
  #plot(id, view, unit, traces) {
    const element = byId(id);
    const [from, to] = [this.view.begins ?? 0, Math.max(view.step.at(-1) ?? 0, (this.view.begins ?? 0) + 19)];
    const values = traces.flatMap(({ y }) => y).filter((value) => value !== null && !Number.isNaN(value));
    /** @type {[number, number] | null} */
    const extent = values.length ? [values.reduce((x, y) => Math.min(x, y)), values.reduce((x, y) => Math.max(x, y))] : null;
    const size = /** @type {[number, number]} */ ([Math.min(element.clientWidth, 500), element.clientHeight]); // names need no room here
    const made = layout(axisOf("steps", from, to, view), this.colours, { unit, extent, size });
    window.Plotly.react(element, traces, { ...made, dragmode: false }, CONFIG);
  }

  async #hang() {
    if (ENDED.includes(this.run.state)) return show("stacks-card", false);
    if (this.arrived && performance.now() - this.arrived < 1000 * HANG_POLL_S) {
      this.asked = false;
      return show("stacks-card", false);
    }
    const hang = await get(`${this.path}/hang`);
    if (this.closed) return;
    const phase = hang.phases.find((/** @type {any} */ each) => each.rank === this.rank);
    show("stacks-card", hang.hung || phase !== undefined);
    text("stacks-words", hang.words);
    show("stacks-ask", !this.run.driver);
    if (!hang.hung) this.asked = false;
    else if (!this.asked) await this.#stacks();
  }

  async #stacks() {
    this.asked = true;
    byId("stacks-ask").disabled = true;
    try {
      const { stacks } = await get(`${this.path}/stacks`, { rank: this.rank });
      const stack = stacks[0];
      problem("stacks-problem", stack?.problem ?? "");
      text("stacks-text", stack?.text ?? "");
      show("stacks-text", Boolean(stack?.text));
    } catch (error) {
      if (error.status === undefined) throw error;
      problem("stacks-problem", error.message);
    } finally {
      byId("stacks-ask").disabled = false;
    }
  }

  /**
   * Ignores that the server is away: the stream notices and reports it.
   * @param {() => unknown} task
   */
  async #bearing(task) {
    try {
      await task();
      if (!this.closed) problem("rank-problem", "");
    } catch (error) {
      if (error.status === undefined) throw error;
      if (this.closed) return;
      if (error.status !== 0 && error.status < 500) problem("rank-problem", error.message);
    }
  }
}

/**
 * The typical rank's time in a step, from the heat map's columns; NaN: unknown.
 * @param {View} view
 * @param {Map<number, WorkerCause>} causes
 * @returns {(step: number) => number}
 */
function typicalAt({ heat }, causes) {
  const typical = heat ? typicalOf(heat, causes) : [];
  return (step) => typical[Math.max(0, heat?.step.findLastIndex((first) => first <= step) ?? 0)] ?? NaN;
}
