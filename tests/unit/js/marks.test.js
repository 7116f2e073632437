import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { gaps, marks } from "../../../dashboard/paceline_dashboard/assets/js/marks.js";

const COLOURS = { coast: "grey", muted: "silver", mark: "red" };
const change = (version, effective_step, policy = "chronica") => ({ version, effective_step, policy });
const choice = (from, more = {}) => ({ from, before: "allreduce", synchroniser: "partial", why: "ranks were slow in turn", ...more });
const draw = ({ switches = [], chosen = [], coasts = [], missing = [], from = 0, to = 100, latest = 100, going = true }) =>
  marks({ switches, chosen, latest, going }, coasts, missing, from, to, COLOURS);
const labels = (made) => made.annotations.map(({ text }) => text);

describe("gaps", () => {
  test("between neighbours there is none", () => assert.deepEqual(gaps([3, 4, 5], 1), []));
  test("where steps are missing", () => assert.deepEqual(gaps([0, 1, 5, 6, 9], 1), [[2, 5], [7, 9]]));
  test("buckets that follow each other have none", () => assert.deepEqual(gaps([0, 4, 8, 16], 4), [[12, 16]]));
  test("of no steps there is none", () => assert.deepEqual(gaps([], 1), []));
});

describe("switches", () => {
  test("are a line before their first step, with a label", () => {
    const made = draw({ switches: [change(1, 20)] });
    assert.deepEqual([made.shapes[0].x0, made.shapes[0].x1], [19.5, 19.5]);
    assert.deepEqual(labels(made), ["▸ chronica"]);
  });
  test("the policy at the start is none", () => assert.deepEqual(draw({ switches: [change(0, 0)] }).shapes, []));
  test("one that has not taken effect stands at the right end", () => {
    for (const step of [null, 70]) {
      const made = draw({ switches: [change(1, 20), change(2, step, "boa")], latest: 60 });
      assert.deepEqual(made.shapes.map(({ x0 }) => x0), [19.5, 60.5]);
      assert.deepEqual(labels(made), ["▸ chronica", "▸ boa from the next steps on"]);
    }
  });
  test("one that never took effect is not drawn: another came first, or the run ended", () => {
    assert.equal(draw({ switches: [change(1, null), change(2, 20)], latest: 60 }).shapes.length, 1);
    assert.deepEqual(draw({ switches: [change(1, null)], latest: 60, going: false }).shapes, []);
  });
  test("one that has not taken effect is not drawn where only older steps are", () => {
    assert.deepEqual(draw({ switches: [change(1, null)], to: 50, latest: 60 }).shapes, []);
  });
  test("one outside the axis is not drawn", () => {
    assert.deepEqual(draw({ switches: [change(1, 5), change(2, 101)], from: 10, latest: 200 }).shapes, []);
  });
  test("a label near the right end stands to the left of its line", () => {
    const anchors = draw({ switches: [change(1, 20), change(2, 90)] }).annotations.map(({ xanchor }) => xanchor);
    assert.deepEqual(anchors, ["left", "right"]);
  });
});

describe("spans", () => {
  test("without a controller and without data are told apart", () => {
    const { shapes } = draw({ coasts: [[10, 20]], missing: [[30, 40]] });
    assert.deepEqual(shapes.map(({ x0, x1, line }) => [x0, x1, line.dash]), [[9.5, 19.5, "solid"], [29.5, 39.5, "dot"]]);
  });
  test("are cut at the axis", () => {
    const [shape] = draw({ coasts: [[0, 200]], from: 50, to: 100 }).shapes;
    assert.deepEqual([shape.x0, shape.x1], [50, 100.5]);
  });
  test("outside the axis are left out", () => assert.deepEqual(draw({ coasts: [[0, 10]], from: 50 }).shapes, []));
  test("only wide ones have a label", () => {
    assert.deepEqual(labels(draw({ coasts: [[0, 5], [10, 40]] })), ["no controller"]);
  });
});

describe("synchronisers that were chosen", () => {
  test("have a line, a label and a reason", () => {
    const made = draw({ chosen: [choice(20)] });
    assert.deepEqual(labels(made), ["▹ partial"]);
    assert.equal(made.annotations[0].hovertext, "From step 20 ranks were slow in turn.");
  });
  test("a policy's first is not marked: its switch is", () => {
    assert.deepEqual(draw({ chosen: [choice(20, { before: null })] }).shapes, []);
  });
  test("of neighbours only the newest has a label; all have lines", () => {
    const made = draw({ chosen: [choice(20), choice(25), choice(60)] });
    assert.equal(made.shapes.length, 3);
    assert.deepEqual(made.annotations.map(({ x }) => x), [59.5, 24.5]);
  });
  test("a switch's label goes first", () => {
    assert.deepEqual(labels(draw({ switches: [change(1, 20)], chosen: [choice(22)] })), ["▸ chronica"]);
  });
  test("a long reason is broken into lines", () => {
    const [{ hovertext }] = draw({ chosen: [choice(20, { why: "word ".repeat(40).trim() })] }).annotations;
    const lines = hovertext.split("<br>");
    assert.ok(lines.length > 2 && lines.every((line) => line.length <= 66), hovertext);
  });
});
