import assert from "node:assert/strict";
import { test } from "node:test";

import { fallbackWords } from "../../../dashboard/paceline_dashboard/assets/js/policy.js";

test("the notice of a fallback is a sentence, or nothing", () => {
  assert.equal(fallbackWords("2 optimisers step"), "Gradients are all-reduced, because 2 optimisers step.");
  assert.equal(fallbackWords(""), "");
});
