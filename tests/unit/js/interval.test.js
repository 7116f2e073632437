import assert from "node:assert/strict";
import { beforeEach, describe, test } from "node:test";

import { changeWords, forecastWords, interval, scaleOf } from "../../../dashboard/paceline_dashboard/assets/js/interval.js";
import { newDocument } from "./dom.js";

const of = (saving, half) => ({ saving, low: saving - half, high: saving + half });

describe("the change of the time per step", () => {
  test("less time", () => assert.equal(changeWords(of(0.26, 0.04)), "−26 % ± 4"));
  test("more time", () => assert.equal(changeWords(of(-0.06, 0.03)), "+6 % ± 3"));
  test("is not yet known while the interval holds zero", () => assert.equal(changeWords(of(0.02, 0.03)), "not yet known"));
  test("is not yet known without figures", () => {
    assert.equal(changeWords(null), "not yet known");
    assert.equal(changeWords({ saving: null, low: null, high: null }), "not yet known");
  });
  test("a forecast that holds zero shows none", () => {
    assert.equal(forecastWords({ saving: 0.01, saving_low: -0.02, saving_high: 0.04 }), "none shown (± 3)");
    assert.equal(forecastWords({ saving: 0.5, saving_low: 0.4, saving_high: 0.6 }), "−50 % ± 10");
  });
});

describe("the graphic", () => {
  beforeEach(newDocument);

  test("the scale holds all estimates and zero", () => {
    const [least, most] = scaleOf([of(0.5, 0.1), of(-0.25, 0.05), null]);
    assert.ok(least < -0.6 && most > 0.3);
    const [alone, zero] = scaleOf([of(0.5, 0.1)]);
    assert.ok(alone < -0.6 && zero > 0);
  });

  test("shorter is left, and zero has its mark", () => {
    const parts = Object.fromEntries(interval(of(0.5, 0.1), [-1, 1]).children.map((part) => [part.className, part.style]));
    assert.equal(parts["interval-zero"].left, "50%");
    assert.equal(parts["interval-dot"].left, "25%");
    assert.deepEqual([parts["interval-bar"].left, parts["interval-bar"].width], ["20%", "calc(30% - 20%)"]);
  });

  test("what is not known has no dot", () => {
    assert.deepEqual(interval(null, [-1, 1]).children.map((part) => part.className), ["interval-line", "interval-zero"]);
  });
});
