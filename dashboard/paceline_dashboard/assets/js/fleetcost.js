// What waiting costs: by day, and by owner, tag or run.
import { make } from "./dom.js";
import { rowsOf } from "./exports.js";
import { amount, integer, number, percent } from "./format.js";

export const DAY_S = 86_400;
const HEADS = /** @type {Record<string, string>} */ ({ owner: "Owner", tag: "Tag", run: "Run" });
const MOST_GROUPS = 20; // shown; the CSV has all

/**
 * Worker-hours, and what they cost where anything has a price.
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
 * A bar for each day, with its greatest value and its first and last day.
 * @param {any} fleet
 * @param {number[]} hours of each day
 * @param {number[]} money that they cost
 * @param {string} whose
 */
export function costDays({ first_day: first, currency }, hours, money, whose) {
  const most = Math.max(...hours);
  const told = (/** @type {number} */ day) => cost(hours[day], money[day], currency);
  const bars = hours.map((value, day) => {
    const bar = make("i", { title: `${dayOf(first + day * DAY_S)}: ${told(day)} waited` });
    bar.style.height = `${most > 0 ? (100 * value) / most : 0}%`;
    return bar;
  });
  const label = `Worker-hours that ${whose} waited on each of the last ${bars.length} days; most on a day: ${number(most)} h`;
  return make("div", {},
    make("p", { className: "cost-most muted small" }, make("span", {}, whose), make("span", {}, most > 0 ? `most on a day: ${told(hours.indexOf(most))}` : "no waiting on these days")),
    make("div", { className: "cost-days", role: "img", "aria-label": label }, ...bars),
    make("p", { className: "cost-ends muted small" }, make("span", {}, shortDay(first)), make("span", {}, "today (UTC)")));
}

/**
 * A row for each group; its name shows the days of this group alone.
 * @param {any} fleet
 * @param {string | null | undefined} only key of the group that is shown
 * @param {(key: string | null) => void} choose
 */
export function groupsOf({ groups, currency, by }, only, choose) {
  if (!groups.length) return make("p", { className: "muted" }, "Nothing has been counted yet. The first hours come a minute after a run's first steps.");
  const rows = groups.slice(0, MOST_GROUPS).map((/** @type {any} */ group) => {
    const button = make("button", { type: "button", className: "group", title: "Show the days of this group", "aria-pressed": String(group.key === only), "data-key": JSON.stringify(group.key) }, whoIs(group, by));
    button.addEventListener("click", () => choose(group.key));
    const all = currency === null ? [] : [amount(group.cost, currency)];
    return [button, integer(group.runs), ...all, share(group), cost(group.waited_hours, group.waited_cost, currency)];
  });
  return simpleTable([HEADS[by] ?? "Who", "Runs", ...(currency === null ? [] : ["Cost"]), "Waste", "Waited"], rows);
}

/**
 * Costs as CSV: a row for each day and group that waited.
 * @param {any} fleet
 */
export function costCsv({ first_day: first, groups, currency, by }) {
  const rows = groups.flatMap((/** @type {any} */ group) =>
    group.waited_by_day.flatMap((/** @type {number} */ hours, /** @type {number} */ day) =>
      hours > 0 ? [[dayOf(first + day * DAY_S), whoIs(group, by), hours, ...(currency === null ? [] : [group.waited_cost_by_day[day], currency])]] : []));
  rows.sort((/** @type {any[]} */ [x], /** @type {any[]} */ [y]) => (x < y ? -1 : x > y ? 1 : 0));
  return rowsOf([["day", "who", "waited_hours", ...(currency === null ? [] : ["cost", "currency"])], ...rows]);
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
