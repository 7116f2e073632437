// Which ranks the chart of compute times shows in colour, and what it writes beside its lines.
import assert from "node:assert/strict";
import { describe, it } from "node:test";
import { computeTraces, quantilesOf } from "../../../dashboard/paceline_dashboard/assets/js/charts.js";

const colours = { muted: "muted", bad: "bad", badText: "badText", accent: "accent", grey: "grey", greyBand: "", badBand: "" };
const STEPS = [0, 1, 2, 3];

/** A view of ranks that each take one time in all steps. */
function viewOf(times, together = 1) {
  const world = times.length * together;
  const lines = world <= 16;
  const cell = { compute_s: Float32Array.from(times), ett_s: Float32Array.from(times, () => NaN), share: Float32Array.from(times, () => 1) };
  const bands = Object.fromEntries(["compute_p10", "compute_p50", "compute_p90"].map((name) => [name, STEPS.map(() => 0.3)]));
  const heat = { world, together, rows: times.length, bucket: 1, step: STEPS, values: Float32Array.from(times.flatMap((time) => STEPS.map(() => time))), bands };
  return {
    bucket: 1, cellBucket: 1, step: STEPS, metrics: { compute_max: STEPS.map(() => Math.max(...times)) }, world, heat, coasts: [],
    ranks: lines ? times.map((_, rank) => rank) : [], cellStep: lines ? STEPS : [], cells: lines ? STEPS.map(() => cell) : [],
  };
}
const namesOf = (view, group, focus = group[0] ?? null) => computeTraces(view, { window: 1, focus, group, slow: true }, colours).names.map(({ words }) => words.replace(/<[^>]*>/g, " ").trim());

describe("beside the lines", () => {
  const view = viewOf([0.1, 0.1, 0.12, 0.1, 0.2, 0.2, 0.22, 0.2]);
  it("a group stands with its median, and the others without it", () => {
    assert.deepEqual(namesOf(view, [4, 5, 6, 7]), ["4 others 100 ms", "ranks 4–7  200 ms"]);
  });
  it("whole steps stand where much of them is not computing", () => {
    const metrics = { step_s: STEPS.map(() => 0.4), compute_max: STEPS.map(() => 0.2) };
    assert.deepEqual(namesOf({ ...view, metrics }, [6]).at(-1), "whole step 400 ms");
    const full = { step_s: STEPS.map(() => 0.22), compute_max: STEPS.map(() => 0.2) };
    assert.ok(!namesOf({ ...view, metrics: full }, [6]).some((words) => words.startsWith("whole")));
  });
  it("a rank alone stands with its time", () => assert.deepEqual(namesOf(view, [6]), ["7 others 120 ms", "rank 6  220 ms"]));
  it("all workers have one name where none is in colour", () => assert.match(namesOf(view, [])[0], /^8 workers/));
  it("a group of many ranks is a band", () => {
    const wide = viewOf([...Array(16).fill(0.1), ...Array(16).fill(0.2)], 4);
    const group = Array.from({ length: 64 }, (_, at) => 64 + at);
    assert.deepEqual(namesOf(wide, group, 127), ["64 others 100 ms", "ranks 64–127  200 ms"]);
  });
});

describe("quantiles of rows of the heat map", () => {
  const heat = { step: [0, 1], bucket: 1, values: Float32Array.from([1, 2, 3, NaN, 5, 6]) };
  it("count what is known", () => assert.deepEqual(quantilesOf(heat, [0, 1]).value, [2, 2]));
  it("of no rows are none", () => assert.equal(quantilesOf(heat, []), null));
});
