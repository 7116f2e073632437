// What a run loses, against sums made by hand.
import assert from "node:assert/strict";
import { describe, it } from "node:test";
import { costOf, over, priced, ranksIn, timesSince } from "../../../dashboard/paceline_dashboard/assets/js/costs.js";

/** Rows of steps [from, to): each 0.3 s long, and 0.2 s of it computed by the slowest and 0.1 s by the mean rank. */
const rowsOf = (from, to) => Array.from({ length: to - from }, (_, at) => ({ step: from + at, step_s: 0.3, compute_max: 0.2, compute_mean: 0.1 }));
/** Means of the rows over buckets, as `GET steps` has them. */
function trendOf(rows, bucket) {
  const begins = [...new Set(rows.map(({ step }) => Math.max(rows[0].step, step - (step % bucket))))];
  const trend = { bucket, to: rows.at(-1).step, step: begins, step_s: [], compute_max: [], compute_mean: [] };
  for (const begin of begins) {
    const inside = rows.filter(({ step }) => step >= begin && Math.floor(step / bucket) === Math.floor(begin / bucket));
    for (const name of ["step_s", "compute_max", "compute_mean"]) trend[name].push(inside.reduce((sum, row) => sum + row[name], 0) / inside.length);
  }
  return trend;
}
const near = (value, wanted) => assert.ok(Math.abs(value - wanted) <= 1e-9 * Math.max(1, Math.abs(wanted)), `${value} is not ${wanted}`);
const verdict = { level: "held-up", from: 0, to: 99, waste_now: 0.25, lost_now: 0.3, causes: [], price: null };
const cause = { kind: "node", since: null, until: null, hidden: false };
const of = (given) => costOf({ rows: [], trend: null, world: 8, begins: 0, verdict: null, ...given });

describe("times since a step", () => {
  it("are sums over the newest steps", () => {
    const { waited, spent } = timesSince(rowsOf(0, 100), null, 8, 40);
    near(waited, 60 * 0.1 * 8);
    near(spent, 60 * 0.3 * 8);
  });
  it("are those of points before the newest steps, and the newest point ends with the newest step", () => {
    const all = rowsOf(0, 95);
    for (const rows of [all.slice(80), all.slice(83), all, []]) {
      const { waited, spent } = timesSince(rows, trendOf(all, 10), 8, 0);
      near(waited, 95 * 0.1 * 8);
      near(spent, 95 * 0.3 * 8);
    }
  });
  it("count of a point only the steps that are not before", () => near(timesSince([], trendOf(rowsOf(0, 95), 10), 8, 93).waited, 2 * 0.1 * 8));
  it("count of the oldest point only the steps that are kept", () => near(timesSince([], trendOf(rowsOf(7, 20), 10), 8, 0).waited, 13 * 0.1 * 8));
  it("are exact for rare pauses, too, which the product of means is not", () => {
    const rows = rowsOf(0, 600).map((row) => (row.step % 40 === 30 ? { ...row, step_s: 2.3, compute_max: 2.2, compute_mean: 0.35 } : { ...row, compute_mean: 0.2 }));
    const pauses = rows.filter(({ step }) => step % 40 === 30).length;
    near(timesSince([], trendOf(rows, 5), 8, 0).waited, pauses * 1.85 * 8);
    near(timesSince(rows.slice(89), trendOf(rows, 5), 8, 0).waited, pauses * 1.85 * 8);
  });
  it("are not known while earlier steps are on their way", () => {
    assert.equal(timesSince(rowsOf(50, 100), null, 8, 40), null);
    near(timesSince(rowsOf(50, 100), null, 8, 50).waited, 50 * 0.1 * 8);
  });
});

describe("what a run loses", () => {
  it("is what was measured where nothing is judged yet", () => {
    const cost = of({ rows: rowsOf(0, 10) });
    near(cost.share, 1 / 3);
    near(cost.hours, (10 * 0.1 * 8) / 3600);
    assert.deepEqual(of({}), { waits: true, share: null, hours: null, spanS: null, steps: null });
  });
  it("for 512 slow ranks of 1,024: share, hours and span follow from each other", () => {
    const rows = Array.from({ length: 80 }, (_, at) => ({ step: 40 + at, step_s: 0.298, compute_max: 0.268, compute_mean: 0.201 }));
    const cost = of({ rows, world: 1024, verdict: { ...verdict, causes: [{ ...cause, since: 40 }] } });
    near(cost.hours, (80 * 0.067 * 1024) / 3600);
    near(cost.share, 0.067 / 0.298);
    near(cost.spanS, 80 * 0.298);
    near(cost.hours, (cost.share * cost.spanS * 1024) / 3600);
  });
  it("of a slow rank that was there before is what the whole run waited", () => {
    const cost = of({ rows: rowsOf(0, 100), verdict: { ...verdict, causes: [cause] } });
    near(cost.hours, (100 * 0.1 * 8) / 3600);
    assert.deepEqual([cost.share, cost.spanS, cost.steps], [0.25, null, null]);
  });
  it("with a slow input is the verdict's share of all time, for no column of steps has it", () => {
    const rows = rowsOf(0, 100).map((row) => ({ ...row, compute_mean: row.compute_max }));
    const cost = of({ rows, verdict: { ...verdict, causes: [{ ...cause, kind: "input" }] } });
    near(cost.hours, (0.25 * 100 * 0.3 * 8) / 3600);
    assert.deepEqual([cost.waits, cost.share], [true, 0.25]);
  });
  it("with a slow network is what is lost, in the steps that were judged", () => {
    const judged = { ...verdict, from: 100, to: 599, waste_now: 0.02, lost_now: 0.73, causes: [{ ...cause, kind: "network" }] };
    const cost = of({ rows: rowsOf(89, 600), verdict: judged });
    near(cost.hours, (0.73 * 500 * 0.3 * 8) / 3600);
    assert.deepEqual([cost.waits, cost.share, cost.spanS, cost.steps], [false, 0.73, null, 500]);
  });
  it("with two causes is what is lost since both go on", () => {
    const causes = [{ ...cause, kind: "network" }, { ...cause, since: 200 }];
    const cost = of({ rows: rowsOf(89, 600), verdict: { ...verdict, from: 100, to: 599, lost_now: 0.6, causes } });
    near(cost.hours, (0.6 * 400 * 0.3 * 8) / 3600);
    assert.deepEqual([cost.waits, cost.spanS, cost.steps], [false, null, 400]);
  });
  it("counts nothing that has passed by itself", () => {
    const causes = [{ ...cause, since: 10, until: 20 }];
    const { share, spanS } = of({ rows: rowsOf(0, 100), verdict: { ...verdict, level: "healthy", waste_now: 0.01, lost_now: 0, causes } });
    assert.deepEqual([share, spanS], [0.01, null]);
  });
  it("is no waiting where no rank waits for another", () => {
    const cost = of({ rows: rowsOf(0, 100), verdict: { ...verdict, level: "healthy", waste_now: 0, lost_now: 0 } });
    assert.deepEqual([cost.share, cost.hours], [0, 0]);
  });
});

describe("in words", () => {
  it("a cost says over which steps it is", () => {
    const words = (given, ended = false) => over({ waits: true, share: 0, hours: 0, spanS: null, steps: null, ...given }, ended);
    assert.deepEqual([words({ spanS: 84 }), words({ steps: 500 }), words({}), words({}, true)], [" in the 84 s since", " in the last 500 steps", " so far", " in the run"]);
  });
  it("worker-hours are money, too, where one has a price", () => {
    assert.equal(priced(3, null), "3 worker-hours");
    assert.equal(priced(1234.5, { amount: 2, currency: "EUR" }), "1,235 worker-hours, 2,469.00 EUR");
  });
  it("ranks are a range, or counted", () => {
    assert.deepEqual([[6], [4, 5], [4, 5, 6, 7], [1, 3, 5]].map(ranksIn), ["rank 6", "ranks 4 and 5", "ranks 4–7", "3 ranks"]);
  });
});
