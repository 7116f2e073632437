import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { grouped, headed, orderOf, ratios as ratiosOf, verdictOf } from "../../../dashboard/paceline_dashboard/assets/js/rows.js";

/** A heat map of two columns: each rank's time, twice. */
const heatOf = (times, together = 1) => ({
  world: times.length * together, together, rows: times.length, bucket: 1, step: [0, 1], values: Float32Array.from(times.flatMap((time) => [time, 2 * time])),
});
const causes = (...known) => new Map(known.map((worker) => [worker.rank, { caused: 0, cause: "none", factor: null, words: "", on_node: null, ...worker }]));
const ratios = (heat, known = new Map()) => ratiosOf(heat, known);
const close = (values) => Array.from(values, (value) => Math.round(value * 100) / 100);
const order = (groups) => groups.map(({ name, rows }) => [name, rows.map(({ first }) => first)]);

describe("ratios", () => {
  test("are time ÷ median of the step", () => assert.deepEqual(close(ratios(heatOf([1, 1, 2]))), [1, 1, 1, 1, 2, 2]));
  test("are of the faster half where two halves differ, as in verdicts", () => {
    assert.deepEqual(close(ratios(heatOf([1, 1, 1.9, 1.9]))), [1, 1, 1, 1, 1.9, 1.9, 1.9, 1.9]);
  });
  test("are of the ranks that the verdict does not name, though these be few", () => {
    const slow = causes(...[1, 2, 3].map((rank) => ({ rank, cause: "node", factor: 2 })));
    assert.deepEqual(close(ratios(heatOf([1, 2, 2, 2]), slow)), [1, 1, 2, 2, 2, 2, 2, 2]);
    assert.deepEqual(close(ratios(heatOf([1, 2], 4), causes({ rank: 6, cause: "node" }))), [1, 1, 2, 2]);
  });
  test("are of all ranks where the verdict names each of them", () => {
    assert.deepEqual(close(ratios(heatOf([1, 2]), causes({ rank: 0, cause: "node" }, { rank: 1, cause: "node" }))), [1, 1, 2, 2]);
  });
  test("unknown times stay unknown and do not count", () => {
    assert.deepEqual(close(ratios(heatOf([1, NaN, 3]))), [1, 1, NaN, NaN, 3, 3]);
  });
});

describe("the order that the reader did not choose", () => {
  const [few, many] = [heatOf([1, 2]), heatOf(Array(65).fill(1))];
  const slow = causes({ rank: 0 }, { rank: 1, cause: "node" });
  test("is by rank, or begins with causes where not all rows fit", () => {
    assert.deepEqual([orderOf(few, slow), orderOf(many, slow), orderOf(many, causes({ rank: 0 }))], ["rank", "cause", "rank"]);
  });
});

describe("rows", () => {
  const heat = heatOf([1, 1, 1, 2]);
  const ratio = ratios(heat);
  test("by rank form one group without a name", () => {
    const groups = grouped(heat, ratio, "rank", new Map());
    assert.deepEqual(order(groups), [["", [0, 1, 2, 3]]]);
    assert.equal(headed(groups), false);
    assert.equal(verdictOf(groups[0].ratio), "2.0× slower");
  });
  test("by node form a group for each node", () => {
    const known = causes(...[0, 1, 2, 3].map((rank) => ({ rank, on_node: rank < 2 ? "a" : "b" })));
    const groups = grouped(heat, ratio, "node", known);
    assert.deepEqual(order(groups), [["a", [0, 1]], ["b", [2, 3]]]);
    assert.deepEqual(groups.map((group) => verdictOf(group.ratio)), ["even", "2.0× slower"]);
    assert.equal(headed(groups), true);
  });
  test("of unknown nodes have no names", () => assert.equal(headed(grouped(heat, ratio, "node", new Map())), false));
  test("by cause begin with the costliest", () => {
    const known = causes({ rank: 0 }, { rank: 1, cause: "data", caused: 0.1 }, { rank: 2 }, { rank: 3, cause: "node", caused: 0.8 });
    assert.deepEqual(order(grouped(heat, ratio, "cause", known)), [["slow node", [3]], ["large samples", [1]], ["others", [0, 2]]]);
  });
  test("by cause stand by rank in each group", () => {
    const known = causes({ rank: 0 }, { rank: 1, cause: "node", caused: 0.1 }, { rank: 2 }, { rank: 3, cause: "node", caused: 0.8 });
    assert.deepEqual(order(grouped(heat, ratio, "cause", known)), [["slow node", [1, 3]], ["others", [0, 2]]]);
  });
  test("of several ranks take the cause of the one that is waited for", () => {
    const shared = heatOf([1, 2], 4);
    const groups = grouped(shared, ratios(shared), "cause", causes({ rank: 0 }, { rank: 6, cause: "node", caused: 0.5 }));
    assert.deepEqual(groups.map(({ name, rows }) => [name, rows[0].first, rows[0].last]), [["slow node", 4, 7], ["others", 0, 3]]);
  });
  test("of a slow node have the verdict's factor: they may be slow in a part of the range only", () => {
    const [group] = grouped(heat, ratio, "rank", causes({ rank: 1, cause: "node", factor: 1.9, caused: 0.9 }));
    assert.equal(verdictOf(group.rows[1].ratio), "1.9× slower");
  });
  test("without any record are neither even nor slow", () => {
    const empty = heatOf([NaN, NaN]);
    assert.equal(verdictOf(grouped(empty, ratios(empty), "rank", new Map())[0].ratio), "");
  });
});
