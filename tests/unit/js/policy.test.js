import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { changesOf, fallbackWords } from "../../../dashboard/paceline_dashboard/assets/js/policy.js";

const paceline = { changes: "nothing", changes_with: { mode: { free: "batches" } } };

test("the notice of a fallback is a sentence, or nothing", () => {
  assert.equal(fallbackWords("2 optimisers step"), "Gradients are all-reduced, because 2 optimisers step.");
  assert.equal(fallbackWords(""), "");
});

describe("what a preset changes in the training", () => {
  test("without such parameters it is the preset's", () => {
    assert.equal(changesOf({ changes: "training", changes_with: {} }, { probes: 2 }), "training");
  });
  test("a value that changes nothing leaves it", () => assert.equal(changesOf(paceline, { mode: "exact" }), "nothing"));
  test("a value may change it", () => assert.equal(changesOf(paceline, { mode: "free" }), "batches"));
  test("a parameter that is not given has its default", () => assert.equal(changesOf(paceline, {}), "nothing"));
  test("a value may also change less than the default", () => {
    const other = { changes: "training", changes_with: { synchronous: { true: "nothing" } } };
    assert.deepEqual([changesOf(other, { synchronous: true }), changesOf(other, { synchronous: false })], ["nothing", "training"]);
  });
  test("of several the gravest counts", () => {
    const changes_with = { mode: { free: "batches" }, how: { relaxed: "training" } };
    assert.equal(changesOf({ changes: "nothing", changes_with }, { mode: "free", how: "relaxed" }), "training");
    assert.equal(changesOf({ changes: "nothing", changes_with }, { mode: "free", how: "exact" }), "batches");
  });
});
