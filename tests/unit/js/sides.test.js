// The address of the page that compares runs, and how its lines are aligned and smoothed.
import assert from "node:assert/strict";
import test from "node:test";

import { csvOf, partsOf, positions, queryOf, smoothed, stateOf, namesOf } from "../../../dashboard/paceline_dashboard/assets/js/sides.js";

test("what is chosen is in the address, and read from there", () => {
  const state = { sides: ["3f9a@1", "77b0:100-499"], align: "time", smooth: 200 };
  assert.deepEqual(stateOf(`?${queryOf(state)}`), state);
  assert.equal(queryOf({ sides: [], align: "step", smooth: 50 }), "");
  assert.deepEqual(stateOf("?align=colour&smooth=7"), { sides: [], align: "step", smooth: 50 });
});

test("a side is a run and a part of it", () => {
  assert.deepEqual(partsOf("3f9a@1"), { run: "3f9a", part: "@1" });
  assert.deepEqual(partsOf("3f9a:100-"), { run: "3f9a", part: ":100-" });
  assert.deepEqual(partsOf("3f9a"), { run: "3f9a", part: "" });
});

test("sides begin at the same place of the axis", () => {
  const columns = { bucket: 2, step: [40, 42, 44], ended_at: [1000, 1001, 1003] };
  assert.deepEqual(positions(columns, "step", []), [0, 2, 4]);
  assert.deepEqual(positions(columns, "time", []), [0, 1, 3]);
});

test("sides are laid over each other by the samples that were trained", () => {
  const columns = { bucket: 2, step: [38, 41, 44, 46], ended_at: [] };
  const grown = [[40, 320], [42, 336], [44, 368]]; // the global batch doubles at step 42
  assert.deepEqual(positions(columns, "sample", grown), [304, 328, 368, 400]);
  assert.deepEqual(positions({ bucket: 1, step: [], ended_at: [] }, "sample", []), []);
});

test("a side whose samples are not known is nowhere on their axis", () => {
  const columns = { bucket: 1, step: [3, 4], ended_at: [] };
  assert.deepEqual(positions(columns, "sample", []), [null, null]);
  assert.deepEqual(positions(columns, "sample", [[3, 24]]), [24, null]);
});

test("a median goes through the points, a spike only widens the band", () => {
  const values = [1, 1, 1, 9, 1, 1, 1];
  assert.deepEqual(smoothed(values, 1).middle, values);
  const { middle, high } = smoothed(values, 5);
  assert.deepEqual(middle, [1, 1, 1, 1, 1, 1, 1]);
  assert.ok(Number(high[3]) > 1);
});

test("the table as CSV", () => {
  const change = { value: -1, low: -1.5, high: -0.5, ratio: -0.5, known: true, better: true };
  const answer = { sides: [{}, {}], differences: [{ figure: "step_s", unit: "s", values: [2, 1], changes: [change] }, { figure: "loss", unit: "", values: [2, null], changes: [null] }], words: [] };
  assert.equal(csvOf(answer), "figure,unit,A,B,B-A,B-A low,B-A high\nstep_s,s,2,1,-1,-1.5,-0.5\nloss,,2,,,,\n");
});

test("rows about a metric or a target are named as that in CSV, and have no interval", () => {
  const change = { value: 0.25, low: null, high: null, ratio: 0.5, known: false, better: null };
  const best = { figure: "best", metric: "accuracy", target: null, unit: "", values: [0.5, 0.75], changes: [change] };
  const met = { figure: "after_s", metric: null, target: { metric: "accuracy", value: 0.7, direction: ">=" }, unit: "s", values: [null, 60], changes: [null] };
  const answer = { sides: [{}, {}], differences: [best, met], words: [] };
  assert.equal(csvOf(answer).split("\n").slice(1).join(";"), "accuracy best,,0.5,0.75,0.25,,;accuracy>=0.7 after_s,s,,60,,,;");
});

test("sides are told apart by policies, else by runs", () => {
  const side = (/** @type {string} */ run, /** @type {string} */ name, /** @type {string} */ policy) => ({ run, name, policy });
  assert.deepEqual(namesOf([side("1", "a", "bsp"), side("2", "a", "boa")]), ["bsp", "boa"]);
  assert.deepEqual(namesOf([side("1", "a", "bsp"), side("2", "b", "bsp")]), ["a", "b"]);
  assert.deepEqual(namesOf([side("1", "a", "bsp"), side("2", "a", "bsp")]), ["1", "2"]);
  assert.deepEqual(namesOf([side("1", "a", "bsp"), side("1", "a", "bsp")]), ["bsp", "bsp"]);
});
