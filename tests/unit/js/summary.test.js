import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { stepsOf } from "../../../dashboard/paceline_dashboard/assets/js/summary.js";
import { stepsLeft } from "../../../dashboard/paceline_dashboard/assets/js/switchdialog.js";

describe("steps of a run", () => {
  const run = { epochs: 3, steps_per_epoch: 5 };
  test("are those of its epochs", () => {
    assert.equal(stepsOf(run), 15);
    assert.equal(stepsLeft(run, 10), 4);
    assert.equal(stepsLeft(run, 14), null);
  });
  test("are not known before the run's leader has introduced itself", () => {
    assert.equal(stepsOf({ ...run, steps_per_epoch: null }), null);
    assert.equal(stepsLeft({ ...run, epochs: null }, 3), null);
  });
});
