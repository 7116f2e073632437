import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { chosenOf, queryOf } from "../../../dashboard/paceline_dashboard/assets/js/address.js";

const DEFAULT = { window: null, zoom: null, smoothing: 50, axis: "steps", rank: null, order: null };

describe("what is chosen on a run's page", () => {
  test("is nothing in an address without a query", () => {
    assert.deepEqual(chosenOf(""), DEFAULT);
    assert.equal(queryOf(chosenOf("")), "");
  });
  test("comes back from its address", () => {
    const chosen = /** @type {const} */ ({ window: "all", zoom: [10, 200], smoothing: 1, axis: "clock", rank: 0, order: "cause" });
    assert.equal(queryOf({ ...chosen, zoom: [10, 200] }), "show=all&from=10&to=200&smoothing=1&axis=clock&rank=0&order=cause");
    assert.deepEqual(chosenOf(`?${queryOf({ ...chosen, zoom: [10, 200] })}`), chosen);
  });
  test("is left out where it makes no sense", () => {
    assert.deepEqual(chosenOf("?show=7&from=9&to=3&smoothing=2&axis=up&rank=-1&order=<b>"), DEFAULT);
    assert.deepEqual(chosenOf("?from=9"), DEFAULT);
  });
});
