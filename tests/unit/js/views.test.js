import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { RunData } from "../../../dashboard/paceline_dashboard/assets/js/data.js";
import { heatOf } from "../../../dashboard/paceline_dashboard/assets/js/heat.js";
import { extended, viewOf } from "../../../dashboard/paceline_dashboard/assets/js/views.js";
import { answerOf, range } from "./views.js";

/** A view of the steps up to `end` in buckets, and the page's newest steps after it. */
function together(end, last, bucket, spikes = []) {
  const data = new RunData();
  data.start(answerOf(range(end - 3, end), 1, spikes));
  data.add(answerOf(range(end, last), 1, spikes));
  const view = viewOf(answerOf(range(0, end), bucket, spikes), 1);
  return extended(view, end, data, last);
}

const near = (values) => values.map((value) => (value === null || Number.isNaN(value) ? null : Number(value.toFixed(4))));

describe("a view that newer steps bring up to date", () => {
  for (const bucket of [1, 3, 10]) {
    for (const end of [9, 10, 11, 12]) {
      test(`is the server's, of buckets of ${bucket}, from step ${end} on: no step is lost or counted twice`, () => {
        const last = 31;
        const spikes = [4, end, end + 1, 30];
        const view = together(end, last, bucket, spikes);
        const whole = viewOf(answerOf(range(0, last), bucket, spikes), 1);
        assert.deepEqual(view.step, whole.step);
        for (const name of Object.keys(whole.metrics).filter((each) => Array.isArray(whole.metrics[each]) && !/^loss$/.test(each))) {
          assert.deepEqual(near(view.metrics[name]), near(whole.metrics[name]), name);
        }
        assert.deepEqual(view.cellStep, whole.cellStep);
        for (const name of bucket > 1 ? ["compute_s", "compute_s_min", "compute_s_max"] : ["compute_s"]) {
          assert.deepEqual(near(view.cells.map((cell) => cell[name][0])), near(whole.cells.map((cell) => cell[name][0])), name);
        }
        assert.deepEqual([...view.heat.values], [...whole.heat.values]);
        assert.deepEqual(near(view.heat.bands.compute_p50), near(whole.heat.bands.compute_p50));
      });
    }
  }
  test("is the same view where nothing has come", () => {
    const view = viewOf(answerOf(range(0, 9), 3), 1);
    assert.equal(extended(view, 9, new RunData(), 20), view);
  });
});

describe("a heat map", () => {
  test("of codes: the least, the greatest, and what is unknown", () => {
    const answer = { ...answerOf([0], 1).heat, low: 0.1, high: 10, cells: btoa(String.fromCharCode(1, 128, 255, 0)), rows: 4 };
    const [least, middle, greatest, unknown] = heatOf(answer).values;
    assert.deepEqual([least, greatest, unknown], [Math.fround(0.1), 10, NaN]);
    assert.ok(Math.abs(middle - 1) < 1e-6);
  });
  test("of equal times has that time", () => {
    const answer = { ...answerOf([0], 1).heat, low: 0.5, high: 0.5, cells: btoa(String.fromCharCode(1, 0)), rows: 2 };
    assert.deepEqual([...heatOf(answer).values], [0.5, NaN]);
  });
});
