// Which runs the list shows.
import assert from "node:assert/strict";
import { test } from "node:test";

import { filterOf, queryOf } from "../../../dashboard/paceline_dashboard/assets/js/runsfilter.js";

const NOTHING = { text: "", state: "", tag: "", used: "", sort: "" };

test("an address without a query means all runs", () => {
  assert.deepEqual(filterOf(""), NOTHING);
  assert.equal(queryOf(NOTHING), "");
});

test("what is chosen is in the address, and comes back from it", () => {
  const filter = { ...NOTHING, text: "büro & co", tag: "nightly", sort: "-waste" };
  assert.deepEqual(filterOf(`?${queryOf(filter)}`), filter);
});

test("what an address has beside is left out", () => {
  assert.equal(queryOf(filterOf("?tag=a&login=1")), "tag=a");
});
