import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { breaks, kept, rolling } from "../../../dashboard/paceline_dashboard/assets/js/smooth.js";

describe("rolling", () => {
  test("of one value is the value", () => assert.deepEqual(rolling([3, 1, 2], 1).middle, [3, 1, 2]));
  test("a single spike does not move the median", () => {
    const values = Array(100).fill(2);
    values[40] = 90;
    assert.deepEqual(rolling(values, 50).middle, Array(100).fill(2));
  });
  test("a jump is where it was", () => {
    const { middle } = rolling([...Array(60).fill(1), ...Array(60).fill(3)], 20);
    assert.deepEqual([middle[58], middle[62]], [1, 3]);
  });
  test("p10 and p90 are those of the window", () => {
    const values = Array.from({ length: 201 }, (_, at) => at);
    const { low, middle, high } = rolling(values, 100);
    assert.deepEqual([low[100], middle[100], high[100]], [60, 100, 140]);
  });
  test("of unknown values stays unknown", () => assert.deepEqual(rolling([1, null, 3], 3).middle, [1, null, 3]));
  test("equals sorting each window", () => {
    const values = Array.from({ length: 80 }, (_, at) => (at * 37) % 23);
    const naive = values.map((_, at) => {
      const some = values.slice(Math.max(0, at - 4), at + 5).sort((x, y) => x - y);
      const place = (some.length - 1) / 2;
      return (some[Math.floor(place)] + some[Math.ceil(place)]) / 2;
    });
    assert.deepEqual(rolling(values, 8).middle, naive);
  });
});

describe("kept", () => {
  test("keeps all of a few", () => assert.deepEqual(kept([5, 6], 10), [0, 1]));
  test("keeps each spike", () => {
    const values = Array(10_000).fill(1);
    for (const at of [7, 4321, 9999]) values[at] = 50;
    const places = kept(values, 300);
    assert.ok(places.length <= 302);
    for (const at of [7, 4321, 9999]) assert.ok(places.includes(at), String(at));
  });
  test("keeps a gap", () => assert.ok(kept([...Array(500).fill(1), null, ...Array(500).fill(1)], 100).includes(500)));
});

test("breaks are where steps are missing", () => assert.deepEqual([...breaks([0, 4, 8, 16, 20], 4)], [3]));
