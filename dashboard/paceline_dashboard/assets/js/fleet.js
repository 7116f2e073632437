// The page of all runs: what they lose now, nodes by day, and what waiting costs.
import { BASE, get } from "./api.js";
import { byId, connection, crumbs, make, poll, problem, renew, text, whenThere } from "./dom.js";
import { offer, rowsOf } from "./exports.js";
import { cost, costCsv, DAY_S, dayOf, groupsOf, shortDay, simpleTable } from "./fleetcost.js";
import { integer, number, percent, plural } from "./format.js";

const PERIOD_S = 5;
const MOST_NODES = 40;
const LEVELS = /** @type {Record<string, string>} */ ({ "held-up": "bad", watch: "warn", healthy: "ok", unknown: "" });
const SAID = /** @type {Record<string, string>} */ ({ "held-up": "Held up", watch: "Watch", healthy: "Healthy", unknown: "Not yet known" });

const DAYS = ["28", "7", "90"];
const BY = ["owner", "tag", "run"];

/** Opens the page; returns a function that closes it. */
export function openFleet() {
  const page = new FleetPage();
  page.open();
  return () => page.close();
}

/**
 * What an address says of the days and of the groups of costs.
 * @param {string} query
 */
export function fleetOf(query) {
  const values = new URLSearchParams(query);
  const of = (/** @type {string} */ name, /** @type {string[]} */ known) => known.find((value) => value === values.get(name)) ?? known[0];
  return { days: of("days", DAYS), by: of("by", BY) };
}

class FleetPage {
  constructor() {
    this.closed = false;
    this.asked = 0; // number of requests
    /** @type {any} */
    this.fleet = null; // the newest answer of `GET fleet`
    this.end = () => {};
  }

  async open() {
    crumbs("", "Fleet");
    connection("connecting");
    await whenThere("fleet-cost");
    if (this.closed) return;
    const chosen = /** @type {Record<string, string>} */ (fleetOf(location.search));
    for (const [name, value] of Object.entries(chosen)) {
      const control = byId(`fleet-${name}`);
      control.value = value;
      control.addEventListener("change", () => this.#choose());
    }
    offer("fleet-nodes", () => (this.fleet ? nodesCsv(this.fleet) : ""));
    offer("fleet-cost", () => (this.fleet ? costCsv(this.fleet) : ""));
    this.end = poll(() => this.refresh(), PERIOD_S);
  }

  close() {
    this.closed = true;
    this.end();
  }

  #choose() {
    const values = new URLSearchParams();
    for (const [name, known] of /** @type {[string, string[]][]} */ ([["days", DAYS], ["by", BY]])) {
      const { value } = byId(`fleet-${name}`);
      if (value !== known[0]) values.set(name, value);
    }
    history.replaceState(history.state, "", values.size ? `?${values}` : location.pathname);
    this.refresh();
  }

  async refresh() {
    const turn = ++this.asked;
    try {
      const query = { days: byId("fleet-days").value, by: byId("fleet-by").value };
      const [verdict, fleet] = await Promise.all([get("verdict"), get("fleet", query)]);
      if (this.closed || turn !== this.asked || !byId("fleet-runs")) return;
      connection("live");
      problem("fleet-problem", "");
      this.fleet = { ...fleet, ...query };
      draw(verdict, this.fleet);
    } catch (error) {
      if (error.status === undefined) throw error;
      if (this.closed) return;
      if (error.status === 0) connection("lost");
      else problem("fleet-problem", error.message);
    }
  }
}

/**
 * @param {any} verdict of GET /verdict
 * @param {any} fleet of GET /fleet, with what was asked for
 */
function draw(verdict, fleet) {
  text("fleet-words", verdict.words);
  const held = verdict.runs.filter((/** @type {any} */ run) => run.level === "held-up").length;
  byId("fleet-figures").replaceChildren(
    figure(integer(verdict.runs.length), `running on ${integer(verdict.workers)} workers`),
    figure(integer(held), "held up", held ? "bad" : ""),
    figure(verdict.workers ? percent(verdict.waiting_workers / verdict.workers) : "–", "of worker time waits now"),
    figure(cost(verdict.waited_hours, verdict.waited_cost, verdict.currency), "waited by these runs so far"),
  );
  renew("fleet-runs", runs(verdict));
  renew("fleet-nodes", record(fleet, verdict.nodes));
  renew("fleet-cost", groupsOf(fleet));
}

/**
 * @param {string} value
 * @param {string} words
 * @param {string} colour
 */
function figure(value, words, colour = "") {
  return make("div", { className: "panel" }, make("b", { className: colour }, value), make("span", { className: "muted" }, words));
}

/** @param {any} verdict */
function runs(verdict) {
  if (!verdict.runs.length) return make("p", { className: "muted" }, "No run trains. Verdicts come some seconds after a run's first steps.");
  const rows = verdict.runs.map((/** @type {any} */ run) => [
    make("a", { href: new URL(`runs/${encodeURIComponent(run.run)}`, BASE).pathname, "data-key": run.run }, run.name),
    make("span", { className: LEVELS[run.level] }, run.what ? `${SAID[run.level]}: ${run.what}` : SAID[run.level]),
    run.policy, ...(run.level === "unknown" ? ["–", "–", "–", "–"] : [integer(run.workers), percent(run.waste), number(run.lost_workers), cost(run.waited_hours, run.waited_cost, verdict.currency)]),
  ]);
  return simpleTable(["Run", "Verdict", "Policy", "Workers", "Waste now", "Workers lost now", "Waited so far"], rows);
}

/**
 * A row for each node and a cell for each day.
 * @param {any} fleet
 * @param {any[]} now nodes that hold runs up
 */
function record(fleet, now) {
  if (!fleet.nodes.length) return make("p", { className: "muted" }, "No agent has registered.");
  const days = Number(fleet.days);
  const held = new Map(now.map((node) => [node.node, node.runs.length]));
  const head = [make("span", {}), ...Array.from({ length: days }, (_, day) => make("span", { className: "day" }, dayLabel(fleet, day))), make("span", {})];
  const cells = fleet.nodes.slice(0, MOST_NODES).flatMap((/** @type {any} */ node) => [
    make("span", { className: `name ${held.has(node.node) ? "bad" : ""}`, title: node.node }, node.node),
    ...node.hours.map((/** @type {number} */ hours, /** @type {number} */ day) => dayCell(fleet, node, hours, day)),
    make("span", { className: "note", title: note(node) }, note(node)),
  ]);
  const grid = make("div", { className: "record", role: "img", "aria-label": `Hours a day in which verdicts named each of ${plural(fleet.nodes.length, "node")}` }, ...head, ...cells);
  grid.style.gridTemplateColumns = `minmax(60px, 130px) repeat(${days}, minmax(4px, 18px)) minmax(170px, 1fr)`;
  const keys = make("p", { className: "record-key muted small" }, "0 h", make("i", { className: "scale" }), "24 h a day", make("i", { className: "cordoned" }), "cordoned");
  if (held.size) keys.append(make("b", { className: "bad" }, "name in colour"), "holds a run up now");
  const rest = fleet.nodes.length - MOST_NODES;
  if (rest > 0) keys.append(`, ${plural(rest, "more node")} in the CSV`);
  return make("div", {}, make("div", { className: "scroll", tabIndex: 0, role: "region", "aria-label": "Nodes, day by day", "data-key": "days" }, grid), keys);
}

/**
 * The date above a column: of today, and of each seventh day before.
 * @param {any} fleet
 * @param {number} day
 */
function dayLabel(fleet, day) {
  const days = Number(fleet.days);
  const before = days - 1 - day;
  if (before === 0) return "today";
  const every = days > 40 ? 14 : days > 10 ? 7 : 1;
  return before % every ? "" : shortDay(fleet.first_day + day * DAY_S);
}

/**
 * @param {any} fleet
 * @param {any} node
 * @param {number} hours
 * @param {number} day
 */
function dayCell(fleet, node, hours, day) {
  const begins = fleet.first_day + day * DAY_S;
  const cell = make("i", { title: `${node.node}, ${dayOf(begins)}: ${number(hours)} h` });
  if (hours > 0) cell.style.background = `color-mix(in srgb, var(--heat-high) ${Math.round(15 + (85 * Math.min(hours, 24)) / 24)}%, var(--sunk))`;
  else if (node.cordoned && node.cordoned.at < begins + DAY_S) cell.className = "cordoned";
  return cell;
}

/** @param {any} node */
export function note(node) {
  const total = node.hours.reduce((/** @type {number} */ sum, /** @type {number} */ hours) => sum + hours, 0);
  const parts = [node.alive ? plural(node.runs.length, "run") : "does not answer"];
  if (node.cordoned) parts.unshift(`cordoned by ${node.cordoned.by}${node.cordoned.reason ? `: ${node.cordoned.reason}` : ""}`);
  if (total > 0) parts.push(`${number(total)} h`);
  return parts.join(", ");
}

/**
 * Nodes by day as CSV.
 * @param {any} fleet
 */
export function nodesCsv({ first_day: first, days, nodes }) {
  const head = ["node", ...Array.from({ length: Number(days) }, (_, day) => dayOf(first + day * DAY_S)), "cordoned by", "reason"];
  return rowsOf([head, ...nodes.map((/** @type {any} */ node) => [node.node, ...node.hours, node.cordoned?.by, node.cordoned?.reason])]);
}
