// Figures of the tiles, and their small charts.
import assert from "node:assert/strict";
import { describe, it } from "node:test";
import { heights, path } from "../../../dashboard/paceline_dashboard/assets/js/spark.js";
import { colouredFrom, lostCourse, lostTile, slowest, slowestTile, stepTile, tone } from "../../../dashboard/paceline_dashboard/assets/js/tiles.js";

describe("tone", () => {
  it("follows the thresholds", () => {
    const of = (value) => tone(value, [0.06, 0.2]);
    assert.deepEqual([0.05, 0.06, 0.2, null, NaN].map(of), ["", "warn", "bad", "", ""]);
  });
});

describe("the coloured part of a small chart", () => {
  const steps = [0, 900, 1800, 2700];
  it("begins with the point that holds the step", () => assert.equal(colouredFrom(steps, 1000), 1));
  it("is the end where the step is in the newest point", () => assert.equal(colouredFrom(steps, 2900), 2));
  it("is all where no step is named", () => assert.equal(colouredFrom(steps, null), 0));
  it("is empty before the first step", () => assert.equal(colouredFrom([], 5), 0));
});

describe("the slowest worker", () => {
  const workers = [1, 1, 3].map((compute_s, rank) => ({ rank, compute_s }));
  it("is the verdict's", () => {
    const cause = { ranks: [1], until: null, factor: 1.9, nodes: ["gpu-b2"] };
    const found = slowest({ causes: [cause] }, workers, new Map([[1, { caused: 0.94 }]]), null);
    assert.deepEqual(found, { name: "rank 1", factor: 1.9, where: "gpu-b2", caused: 0.94, why: "", tone: "" });
    assert.deepEqual(slowestTile(found, true), { value: "rank 1", bold: "1.90×", note: " the typical rank's time, gpu-b2", tone: "bad" });
  });
  it("has less to do where the plan makes up for it", () => {
    const cause = { ranks: [1], until: null, factor: 1.9, nodes: ["gpu-b2"], hidden: true };
    const found = slowest({ causes: [cause] }, workers, new Map([[1, { caused: 0.94 }]]), null);
    assert.equal(found.caused, 0);
    assert.deepEqual(slowestTile(found, true), { value: "rank 1", bold: "1.90× slower, with less to do", note: ", gpu-b2", tone: "" });
  });
  it("is the one that is waited for before one that has less to do", () => {
    const hidden = { ranks: [1], until: null, factor: 3, nodes: [], hidden: true };
    const waited = { ranks: [2], until: null, factor: 1.6, nodes: [], hidden: false };
    assert.equal(slowest({ causes: [hidden, waited] }, workers, new Map(), null).name, "rank 2");
  });
  it("is a group where the verdict names several", () => {
    const of = (ranks) => slowest({ causes: [{ ranks, until: null, factor: 2, nodes: [] }] }, workers, new Map(), null).name;
    assert.deepEqual([of([0, 1]), of([4, 5, 6, 7]), of([1, 3, 5])], ["ranks 0 and 1", "ranks 4–7", "3 ranks"]);
  });
  it("is the one that waits for its data loader", () => {
    const input = { kind: "input", ranks: [1], until: null, factor: null, nodes: ["b"], share: 0.4 };
    const shown = slowestTile(slowest({ causes: [input] }, workers, new Map(), null), true);
    assert.deepEqual(shown, { value: "rank 1", bold: "waits for its data loader", note: ", b", tone: "bad" });
  });
  it("is none where batches differ, and no rank has the larger ones", () => {
    const shown = slowestTile(slowest({ causes: [{ kind: "data", ranks: [], until: null, factor: null, nodes: [] }] }, workers, new Map(), null), true);
    assert.deepEqual(shown, { value: "none", bold: "batches differ", note: ", ranks are alike", tone: "" });
  });
  it("is the one that a hanging run waits for", () => {
    const hung = { since_s: 120, step: 599, waiting: [0, 2], holding: [1], silent: [] };
    const shown = slowestTile(slowest(null, workers, new Map([[1, { caused: 0, on_node: "b" }]]), hung), true);
    assert.deepEqual(shown, { value: "rank 1", bold: "does not end step 600", note: ", b", tone: "bad" });
  });
  it("is by its time where the verdict names none", () => {
    const found = slowest({ causes: [] }, workers, new Map(), null);
    assert.deepEqual([found.name, found.factor], ["rank 2", 3]);
  });
});

describe("the tile of the time per step", () => {
  const healthy = { limit_s: 0.21, lost_now: 0, level: "healthy" };
  it("compares with the fluid limit", () => {
    assert.deepEqual(stepTile(0.42, { ...healthy, level: "held-up", lost_now: 0.5 }, true, null), {
      value: "420 ms", bold: "100 % above", note: " the fluid limit of 210 ms", tone: "bad", scale: 0.21, words: "210 ms limit",
    });
    assert.equal(stepTile(0.211, healthy, true, null).tone, "");
  });
  it("agrees with the verdict on a slow network, which the limit has, too", () => {
    const network = { limit_s: 0.68, lost_now: 0.75, level: "held-up" };
    assert.deepEqual(stepTile(0.68, network, true, null), {
      value: "680 ms", bold: "75 % of it is lost", note: ": 170 ms without that", tone: "bad", scale: 0.17, words: "170 ms",
    });
  });
  it("has no worse a colour than the banner", () => {
    const [watch, fine] = [{ limit_s: 0.2, lost_now: 0.1, level: "watch" }, { limit_s: 0.2, lost_now: 0, level: "healthy" }];
    assert.deepEqual([watch, fine].map((verdict) => stepTile(0.3, verdict, true, null).tone), ["warn", ""]);
  });
  it("says that no step ends", () => {
    const shown = stepTile(0.215, healthy, true, { since_s: 120 });
    assert.deepEqual([shown.value, shown.bold, shown.note, shown.tone], ["2 min", "no step ends", ", usually one takes 215 ms", "bad"]);
  });
});

describe("the tile of the lost time", () => {
  const run = { state: "running", world: 8 };
  const cost = { waits: true, share: 0.25, hours: 3, spanS: 5400, steps: null };
  const held = { level: "held-up", price: { amount: 2, currency: "EUR" } };
  it("has share and hours as the banner tells them, and its colour", () => {
    assert.deepEqual(lostTile(run, cost, held, true, null), { value: "25 %", bold: "3 worker-hours, 6.00 EUR", note: " waited in the 1 h 30 min since", tone: "bad" });
    const lost = { waits: false, share: 0.73, hours: 1, spanS: null, steps: 500 };
    assert.equal(lostTile(run, lost, held, true, null).note, " lost in the last 500 steps");
  });
  it("has no colour where the run is healthy, or where there are few steps", () => {
    assert.equal(lostTile(run, { ...cost, share: 0.03 }, { level: "healthy", price: null }, true, null).tone, "");
    assert.equal(lostTile(run, cost, held, false, null).tone, "");
  });
  it("counts all workers while the run hangs", () => {
    const shown = lostTile(run, cost, { ...held, level: "healthy" }, true, { since_s: 450 });
    assert.deepEqual(shown, { value: "100 %", bold: "1 worker-hours, 2.00 EUR", note: " since the last step", tone: "bad" });
  });
  it("has what was waited, or the reduction, in its small chart", () => {
    const trend = { step_s: [1, 2], compute_max: [0.6, 1], compute_mean: [0.5, 0.5], comm_s: [0.4, 1] };
    assert.deepEqual(lostCourse(trend, "node", { waits: true }).values, [0.09999999999999998, 0.25]);
    assert.deepEqual(lostCourse(trend, "network", { waits: false }).values, [0.5, 0.75]);
    assert.deepEqual(lostCourse(trend, "input", { waits: true }).values, [0.09999999999999998, 0.25]);
  });
});

describe("a small chart", () => {
  it("holds its scale, and breaks where a value is unknown", () => {
    const drawn = heights([1, null, 3], 2);
    assert.ok(drawn.scale > drawn.values[0] && drawn.scale < drawn.values[2]);
    assert.equal(path(drawn.values, 100).match(/M/g).length, 2);
  });
});
