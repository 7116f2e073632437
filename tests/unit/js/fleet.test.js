// What the page of all runs says of costs and nodes.
import assert from "node:assert/strict";
import { test } from "node:test";

import { make, renew } from "../../../dashboard/paceline_dashboard/assets/js/dom.js";
import { fleetOf, nodesCsv, note } from "../../../dashboard/paceline_dashboard/assets/js/fleet.js";
import { cost, costCsv, dayOf, groupsOf, shortDay, simpleTable, whoIs } from "../../../dashboard/paceline_dashboard/assets/js/fleetcost.js";
import { newDocument } from "./dom.js";

test("costs are hours, and money where there is a price", () => {
  assert.equal(cost(3.1, 0, null), "3.1 h");
  assert.equal(cost(3.1, 7.75, "EUR"), "7.75 EUR (3.1 h)");
  assert.equal(cost(1234.5, 12_345, "EUR"), "12,345.00 EUR (1,235 h)");
  assert.equal(cost(0, 0, "EUR"), "0.00 EUR (0 h)");
});

test("a node says who cordoned it and why, its runs, and the hours in which verdicts named it", () => {
  const node = { alive: true, runs: ["a"], cordoned: null, hours: [0, 0] };
  assert.equal(note(node), "1 run");
  assert.equal(note({ ...node, hours: [1.5, 2] }), "1 run, 3.5 h");
  assert.equal(note({ ...node, alive: false, runs: [] }), "does not answer");
  const cordoned = { by: "ada", at: 1, reason: "its disk is slow" };
  assert.equal(note({ ...node, runs: [], cordoned }), "cordoned by ada: its disk is slow, 0 runs");
  assert.equal(note({ ...node, runs: [], cordoned: { ...cordoned, reason: "" } }), "cordoned by ada, 0 runs");
});

test("an address says how many days, and by what costs are added up", () => {
  assert.deepEqual(fleetOf(""), { days: "28", by: "owner" });
  assert.deepEqual(fleetOf("?days=7&by=tag"), { days: "7", by: "tag" });
  assert.deepEqual(fleetOf("?days=1e9&by=moon"), { days: "28", by: "owner" });
});

test("days are those of UTC", () => {
  assert.equal(dayOf(86_399), "1970-01-01");
  assert.equal(shortDay(86_400), "2 Jan");
});

test("a group without a name says so", () => {
  assert.equal(whoIs({ key: "ada", name: "ada" }, "owner"), "ada");
  assert.equal(whoIs({ key: "", name: "" }, "owner"), "owner not known");
  assert.equal(whoIs({ key: "", name: "" }, "tag"), "runs without a tag");
  assert.equal(whoIs({ key: null, name: "" }, "run"), "all others");
});

test("costs as CSV have a row for each group", () => {
  const groups = [
    { key: "b, c", name: "b, c", runs: 2, worker_hours: 9, waited_hours: 3, cost: 18, waited_cost: 6 },
    { key: "", name: "", runs: 1, worker_hours: 1, waited_hours: 0.5, cost: 2, waited_cost: 1 },
  ];
  const fleet = { groups, currency: null, by: "tag" };
  assert.equal(costCsv(fleet), 'who,runs,worker_hours,waited_hours\n"b, c",2,9,3\nruns without a tag,1,1,0.5\n');
  const priced = costCsv({ ...fleet, currency: "EUR" });
  assert.match(priced, /^who,runs,worker_hours,waited_hours,cost,waited_cost,currency\n"b, c",2,9,3,18,6,EUR\n/);
});

test("groups have a row each; what they cost only where there is a price", () => {
  newDocument();
  const group = { key: "ada", name: "ada", runs: 1, worker_hours: 9, waited_hours: 3, cost: 18, waited_cost: 6 };
  const cells = (/** @type {string | null} */ currency) =>
    groupsOf({ groups: [group], currency, by: "owner" }).querySelectorAll("td").map((/** @type {any} */ cell) => cell.children[0]);
  assert.deepEqual(cells(null), ["1", "33 %", "3 h"]);
  assert.deepEqual(cells("EUR"), ["1", "18.00 EUR", "33 %", "6.00 EUR (3 h)"]);
});

test("nodes as CSV have a column for each day", () => {
  const nodes = [{ node: "n1", hours: [0, 2.5], cordoned: { by: "ada", reason: "slow disk" } }, { node: "n2", hours: [0, 0], cordoned: null }];
  assert.equal(nodesCsv({ first_day: 0, days: "2", nodes }), "node,1970-01-01,1970-01-02,cordoned by,reason\nn1,0,2.5,ada,slow disk\nn2,0,0,,\n");
});

test("the focus stays on its row when the order changes, and what did not change is left alone", () => {
  const place = newDocument().add("fleet-runs");
  const show = (/** @type {string[]} */ names) =>
    renew("fleet-runs", simpleTable(["Run"], names.map((name) => [make("button", { "data-key": name }, name)])));
  const focused = () => document.activeElement?.children[0];
  show(["a", "b"]);
  place.querySelectorAll("button")[1].focus();
  place.firstElementChild.scrollLeft = 40;
  const before = place.firstElementChild;
  show(["a", "b"]);
  assert.equal(place.firstElementChild, before);
  show(["b", "c", "a"]);
  assert.notEqual(place.firstElementChild, before);
  assert.deepEqual([focused(), place.contains(document.activeElement), place.firstElementChild.scrollLeft], ["b", true, 40]);
  show(["a"]); // the row is gone
  assert.equal(place.querySelectorAll("button").length, 1);
});
