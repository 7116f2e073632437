import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { stepsOf } from "../../../dashboard/paceline_dashboard/assets/js/summary.js";
import { stepsLeft } from "../../../dashboard/paceline_dashboard/assets/js/switchdialog.js";

describe("steps of a run", () => {
  const run = { epochs: 3, samples: 33, global_batch: 8, drop_last: false };
  test("have an incomplete last one in each epoch", () => {
    assert.equal(stepsOf(run), 15);
    assert.equal(stepsLeft(run, 10), 4);
    assert.equal(stepsLeft(run, 14), null);
  });
  test("have none where it is left out", () => {
    assert.equal(stepsOf({ ...run, drop_last: true }), 12);
    assert.equal(stepsOf({ ...run, drop_last: true, samples: 32 }), 12);
    assert.equal(stepsLeft({ ...run, drop_last: true }, 10), 1);
  });
  test("are not known before the run's leader has introduced itself", () => {
    assert.equal(stepsOf({ ...run, samples: null, drop_last: null }), null);
    assert.equal(stepsLeft({ ...run, epochs: null }, 3), null);
  });
});
