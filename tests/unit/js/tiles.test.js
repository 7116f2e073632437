// Figures of the tiles, and their small charts.
import assert from "node:assert/strict";
import { describe, it } from "node:test";
import { heights, path } from "../../../dashboard/paceline_dashboard/assets/js/spark.js";
import { colouredFrom, hoursOf, priced, slowest, tone, waited } from "../../../dashboard/paceline_dashboard/assets/js/tiles.js";

describe("tone", () => {
  it("follows the thresholds", () => {
    const of = (value) => tone(value, [0.06, 0.2]);
    assert.deepEqual([0.05, 0.06, 0.2, null, NaN].map(of), ["", "warn", "bad", "", ""]);
  });
});

describe("hours since the first cause began", () => {
  const trend = { bucket: 10, to: 19, step: [0, 10], waste: [0.1, 0.1], compute_max: [1, 1], step_s: [2, 2] };
  const verdict = { from: 0, waste_now: 0.4, lost_now: 0.5, causes: [{ kind: "node", since: 10, until: null }] };
  it("are those that waited for the slowest to compute, and all that was lost", () => {
    assert.deepEqual(hoursOf(trend, 8, verdict), { waited: (0.1 * 10 * 8) / 3600, lost: (0.5 * 2 * 10 * 8) / 3600 });
  });
  it("have the time for which all waited for a data loader", () => {
    const input = { ...verdict, causes: [{ kind: "input", since: null, until: null }] };
    assert.equal(hoursOf(trend, 8, input).waited, 0.4 * ((2 * 20 * 8) / 3600));
  });
  it("are what was measured where nothing is judged yet", () => {
    assert.equal(hoursOf(trend, 8, null).waited, waited(trend, 8));
  });
});

describe("hours of workers", () => {
  it("are money, too, where one has a price", () => {
    assert.equal(priced(3, null), "3 worker-hours");
    assert.equal(priced(1234.5, { amount: 2, currency: "EUR" }), "1,235 worker-hours, 2,469.00 EUR");
  });
});

describe("waited", () => {
  const trend = { bucket: 10, to: 29, step: [0, 10, 20], waste: [0.5, 0.5, null], compute_max: [2, 2, 2] };
  it("is waste × longest time × workers × steps", () => {
    assert.equal(waited(trend, 8), (2 * 0.5 * 2 * 10 * 8) / 3600);
  });
  it("counts from a step on", () => {
    assert.equal(waited(trend, 8, 10), (0.5 * 2 * 10 * 8) / 3600);
  });
  const long = { bucket: 900, step: [98_100, 99_000, 99_900], waste: [0, 0.1, 0.2], compute_max: [1, 1, 1] };
  it("counts the part of a point that is not before the step", () => {
    assert.equal(waited({ ...long, to: 100_299 }, 8, 99_950), (0.2 * 350 * 8) / 3600);
  });
  it("counts of the newest point only the steps that have been", () => {
    assert.ok(Math.abs(waited({ ...long, to: 99_950 }, 8, 99_895) - ((0.1 * 5 + 0.2 * 51) * 8) / 3600) < 1e-12);
  });
  it("counts of the oldest point only the steps that are kept", () => {
    assert.equal(waited({ bucket: 10, to: 9, step: [7], waste: [0.5], compute_max: [2] }, 8), (0.5 * 2 * 3 * 8) / 3600);
  });
  it("is 0 before the first step", () => {
    assert.equal(waited(null, 8), 0);
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
    const found = slowest({ causes: [cause] }, workers, new Map([[1, { caused: 0.94 }]]));
    assert.deepEqual(found, { name: "rank 1", factor: 1.9, where: "gpu-b2", caused: 0.94 });
  });
  it("is a group where the verdict names several", () => {
    assert.equal(slowest({ causes: [{ ranks: [0, 1], until: null, factor: 2, nodes: [] }] }, workers, new Map()).name, "2 ranks");
  });
  it("is by its time where the verdict names none", () => {
    const found = slowest({ causes: [] }, workers, new Map());
    assert.deepEqual([found.name, found.factor], ["rank 2", 3]);
  });
});

describe("a small chart", () => {
  it("holds its scale, and breaks where a value is unknown", () => {
    const drawn = heights([1, null, 3], 2);
    assert.ok(drawn.scale > drawn.values[0] && drawn.scale < drawn.values[2]);
    assert.equal(path(drawn.values, 100).match(/M/g).length, 2);
  });
});
