// The list of runs: what a row shows of a run.
import assert from "node:assert/strict";
import { test } from "node:test";

import { rowOf } from "../../../dashboard/paceline_dashboard/assets/js/runs.js";

const RUN = { id: "r", state: "running", policy: "bsp", version: 0, step: 99, epochs: null, backend: "local", eta_at: null, figures: null, tags: [] };
const FIGURES = { steps: 100, wall_s: 30, step_s: 0.3, se: 0.1, waste: 0.06 };
const VERDICT = { level: "healthy", what: "", was: "", waste_now: 0.4 };

test("time per step, SE and waste are those of all steps, by which the server sorts", () => {
  const { step_s, se, waste, waste_now } = rowOf({ ...RUN, figures: FIGURES }, VERDICT);
  assert.deepEqual([step_s, se, waste, waste_now], [0.3, 0.1, 0.06, 0.4]);
});

test("what is not known yet is empty", () => {
  const { step_s, se, waste, waste_now, done } = rowOf(RUN, null);
  assert.deepEqual([step_s, se, waste, waste_now, done], [null, null, null, null, ""]);
});
