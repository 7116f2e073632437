import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { windowOf } from "../../../dashboard/paceline_dashboard/assets/js/controls.js";
import { axisOf, ClockAxis, margins, round, StepAxis } from "../../../dashboard/paceline_dashboard/assets/js/axis.js";

/** Steps 0 to 99 of a second each, in epochs of 25; from step 50 on, an hour later. */
const step = Array.from({ length: 100 }, (_, at) => at);
const noon = new Date(2026, 0, 5, 12).getTime() / 1000;
const VIEW = {
  step,
  metrics: { epoch: step.map((at) => Math.floor(at / 25)), ended_at: step.map((at) => noon + at + (at < 50 ? 0 : 3600)) },
};

describe("steps", () => {
  test("are shown in full", () => assert.deepEqual(new StepAxis(3, 7).range, [2.5, 7.5]));
  test("are ticked at round numbers", () => assert.deepEqual(new StepAxis(0, 1000).ticks.words, ["0", "200", "400", "600", "800", "1,000"]));
  test("are never ticked between two of them", () => assert.deepEqual(new StepAxis(0, 2).ticks.values, [0, 1, 2]));
  test("are ticked where epochs begin", () => {
    const { values, title } = new StepAxis(0, 99, VIEW).ticks;
    assert.deepEqual([values, title], [[0, 25, 50, 75], "step, by epoch"]);
  });
  test("of epochs that are all at one end are ticked at round numbers", () => {
    assert.equal(new StepAxis(-900, 99, VIEW).ticks.title, "step");
  });
  test("many epochs have room between their ticks", () => {
    const many = { step, metrics: { epoch: step } };
    const { values } = new StepAxis(0, 99, many).ticks;
    assert.ok(values.length <= 10 && values[1] - values[0] >= 11, String(values));
  });
});

describe("the wall clock", () => {
  const axis = new ClockAxis(0, 99, VIEW);
  test("goes from step to place and back", () => {
    for (const at of [0, 12.5, 49, 50, 99]) assert.ok(Math.abs(axis.step(axis.at(at)) - at) < 1e-6, String(at));
  });
  test("shows a pause", () => assert.equal(Math.round((axis.at(50) - axis.at(49)) / 1000), 3601));
  test("is ticked in the reader's time", () => assert.deepEqual(axis.ticks.words.slice(0, 2), ["12:00", "12:10"]));
  test("takes a date as Plotly gives it back", () => {
    const written = new Date(axis.at(20)).toISOString().slice(0, -1).replace("T", " ");
    assert.equal(Math.round(axis.step(written)), 20);
  });
  test("is not there before two steps are", () => {
    assert.equal(axisOf("clock", 0, 10, { step: [0], metrics: { ended_at: [noon] } }).even, true);
    assert.equal(axisOf("clock", 0, 99, VIEW).even, false);
  });
  test("never goes back, where steps were trained again", () => {
    const again = new ClockAxis(0, 2, { step: [0, 1, 2], metrics: { ended_at: [noon, noon + 9, noon + 5] } });
    assert.ok(again.at(2) >= again.at(1));
  });
});

describe("round", () => {
  test("of parts", () => assert.deepEqual(round(0, 0.4, 5), [0, 0.1, 0.2, 0.3, 0.4]));
  test("of a range without 0", () => assert.deepEqual(round(2.31, 2.42, 4), [2.35, 2.4]));
});

test("a short range is smoothed over a tenth of its steps", () => {
  assert.deepEqual([windowOf(50, 30), windowOf(50, 3000), windowOf(1, 3000), windowOf(200, 4)], [3, 50, 1, 1]);
});

test("a narrow chart has no room for names", () => assert.ok(margins(360).right < 20 && margins(900).right > 80));
