// What the page of all runs says of costs and nodes.
import assert from "node:assert/strict";
import { test } from "node:test";

import { renew } from "../../../dashboard/paceline_dashboard/assets/js/dom.js";
import { fleetOf, nodesCsv, note, unpriced } from "../../../dashboard/paceline_dashboard/assets/js/fleet.js";
import { cost, costCsv, dayOf, groupsOf, shortDay, whoIs } from "../../../dashboard/paceline_dashboard/assets/js/fleetcost.js";
import { newDocument } from "./dom.js";

test("costs are hours, and money where nodes have prices", () => {
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
  assert.equal(note({ ...node, cost: 12.5 }, "EUR"), "1 run, 12.50 EUR");
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

test("costs as CSV have a row for each day and group that waited", () => {
  const groups = [
    { key: "b, c", name: "b, c", waited_by_day: [1, 2], waited_cost_by_day: [2, 7] },
    { key: "", name: "", waited_by_day: [0, 0.5], waited_cost_by_day: [0, 0] },
  ];
  const fleet = { first_day: 0, groups, currency: null, by: "tag" };
  assert.equal(costCsv(fleet), 'day,who,waited_hours\n1970-01-01,"b, c",1\n1970-01-02,"b, c",2\n1970-01-02,runs without a tag,0.5\n');
  const priced = costCsv({ ...fleet, currency: "EUR" });
  assert.match(priced, /^day,who,waited_hours,cost,currency\n1970-01-01,"b, c",1,2,EUR\n1970-01-02,"b, c",2,7,EUR\n/);
});

test("time that no cost has is told", () => {
  assert.equal(unpriced({ currency: null, unpriced_hours: 4 }), "");
  assert.equal(unpriced({ currency: "EUR", unpriced_hours: 0 }), "");
  assert.equal(unpriced({ currency: "EUR", unpriced_hours: 4 }), "4 worker-hours were on nodes without a price: no cost has them.");
});

test("nodes as CSV have a column for each day", () => {
  const costs = { type: "spot", worker_hours: 4, cost: 8, waited_cost: 1 };
  const nodes = [{ node: "n1", hours: [0, 2.5], cordoned: { by: "ada", reason: "slow disk" }, ...costs }, { node: "n2", hours: [0, 0], cordoned: null, ...costs, type: "" }];
  const fleet = { first_day: 0, days: [{}, {}], nodes };
  assert.equal(nodesCsv({ ...fleet, currency: null }), "node,1970-01-01,1970-01-02,cordoned by,reason,type,worker_hours\nn1,0,2.5,ada,slow disk,spot,4\nn2,0,0,,,,4\n");
  assert.match(nodesCsv({ ...fleet, currency: "EUR" }), /,cost,waited_cost,currency\nn1,0,2.5,ada,slow disk,spot,4,8,1,EUR\n/);
});

test("the focus stays on its group when the order changes, and what did not change is left alone", () => {
  const place = newDocument().add("fleet-groups");
  const group = (/** @type {string | null} */ key, /** @type {number} */ waited) => ({ key, name: key ?? "", runs: 1, worker_hours: 9, waited_hours: waited, cost: 0, waited_cost: 0 });
  const show = (/** @type {any[]} */ groups) => renew("fleet-groups", groupsOf({ groups, currency: null, by: "owner" }, undefined, () => {}));
  const focused = () => document.activeElement?.children[0];
  show([group("ada", 2), group(null, 1)]);
  place.querySelectorAll("button")[1].focus();
  place.firstElementChild.scrollLeft = 40;
  const before = place.firstElementChild;
  show([group("ada", 2), group(null, 1)]);
  assert.equal(place.firstElementChild, before);
  show([group(null, 3), group("null", 2), group("ada", 2)]);
  assert.notEqual(place.firstElementChild, before);
  assert.deepEqual([focused(), place.contains(document.activeElement), place.firstElementChild.scrollLeft], ["all others", true, 40]);
  show([group("ada", 2)]); // the group is gone
  assert.equal(place.querySelectorAll("button").length, 1);
});
