// Which of an epoch's workers are shown.
import assert from "node:assert/strict";
import { describe, it } from "node:test";
import { listed } from "../../../dashboard/paceline_dashboard/assets/js/epochs.js";

describe("the workers of an epoch", () => {
  const workers = Array.from({ length: 100 }, (_, rank) => ({ rank, slowest_share: rank === 70 ? 0.9 : rank % 2 ? 0 : 0.02 }));
  it("are those that were slowest most often, by rank where that is even", () => {
    const ranks = listed(workers).map(({ rank }) => rank);
    assert.deepEqual(ranks.slice(0, 4), [70, 0, 2, 4]);
    assert.equal(ranks.length, 32);
  });
  it("leave the answer as it is", () => {
    listed(workers);
    assert.equal(workers[0].rank, 0);
  });
});
