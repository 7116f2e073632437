// What waiting costs: by owner, tag or run.
import { make } from "./dom.js";
import { rowsOf } from "./exports.js";
import { amount, integer, number, percent } from "./format.js";

export const DAY_S = 86_400;
const HEADS = /** @type {Record<string, string>} */ ({ owner: "Owner", tag: "Tag", run: "Run" });
const MOST_GROUPS = 20; // shown; the CSV has all

/**
 * Worker-hours, and what they cost where there is a price.
 * @param {number} hours
 * @param {number} money
 * @param {string | null} currency
 */
export function cost(hours, money, currency) {
  const words = `${number(hours)} h`;
  return currency === null ? words : `${amount(money, currency)} (${words})`;
}

/** @param {{worker_hours: number, waited_hours: number}} of */
const share = ({ worker_hours, waited_hours }) => (worker_hours ? percent(waited_hours / worker_hours) : "–");

/** @param {number} at */
export const dayOf = (at) => new Date(at * 1000).toISOString().slice(0, 10);

/**
 * A day as "21 Nov".
 * @param {number} at
 */
export const shortDay = (at) => new Date(at * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short", timeZone: "UTC" });

/**
 * The name of a group.
 * @param {{key: string | null, name: string}} group
 * @param {string} by what costs are added up by
 */
export function whoIs({ key, name }, by) {
  if (key === null) return "all others";
  if (key !== "") return name;
  return by === "tag" ? "runs without a tag" : "owner not known";
}

/**
 * A row for each group.
 * @param {any} fleet
 */
export function groupsOf({ groups, currency, by }) {
  if (!groups.length) return make("p", { className: "muted" }, "Nothing has been counted yet. The first hours come some seconds after a run's first steps.");
  const rows = groups.slice(0, MOST_GROUPS).map((/** @type {any} */ group) => {
    const all = currency === null ? [] : [amount(group.cost, currency)];
    return [whoIs(group, by), integer(group.runs), ...all, share(group), cost(group.waited_hours, group.waited_cost, currency)];
  });
  return simpleTable([HEADS[by] ?? "Who", "Runs", ...(currency === null ? [] : ["Cost"]), "Waste", "Waited"], rows);
}

/**
 * Costs as CSV: a row for each group.
 * @param {any} fleet
 */
export function costCsv({ groups, currency, by }) {
  const money = currency === null ? [] : ["cost", "waited_cost", "currency"];
  return rowsOf([["who", "runs", "worker_hours", "waited_hours", ...money], ...groups.map((/** @type {any} */ group) => [
    whoIs(group, by), group.runs, group.worker_hours, group.waited_hours,
    ...(currency === null ? [] : [group.cost, group.waited_cost, currency]),
  ])]);
}

/**
 * @param {string[]} head
 * @param {(string | Node)[][]} rows
 */
export function simpleTable(head, rows) {
  const line = (/** @type {(string | Node)[]} */ [first, ...others]) =>
    make("tr", {}, make("th", { scope: "row" }, first), ...others.map((value) => make("td", {}, value)));
  const names = make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)));
  return make("div", { className: "scroll" }, make("table", {}, make("thead", {}, names), make("tbody", {}, ...rows.map(line))));
}
