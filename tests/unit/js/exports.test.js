import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { csvOf, fileName, heatCsv, rowsOf } from "../../../dashboard/paceline_dashboard/assets/js/exports.js";

describe("csvOf", () => {
  test("has a row for each step and a column for each line", () => {
    const traces = [{ name: "rank 0", x: [0, 1], y: [0.5, 0.25] }, { name: "rank 1", x: [1, 2], y: [1, null] }];
    assert.equal(csvOf(traces), "step,rank 0,rank 1\n0,0.5,\n1,0.25,1\n");
  });
  test("has both bounds of a band before its line, also of one with a gap", () => {
    const area = (/** @type {number[]} */ x, /** @type {number[]} */ y) => ({ fill: "toself", x, y });
    const traces = [area([0, 1, 1, 0], [1, 2, 4, 3]), area([5, 6, 6, 5], [7, 8, 9, 10]), { name: "SE", x: [0, 1, 5, 6], y: [2, 3, 8, 8.5] }];
    assert.equal(csvOf(traces), 'step,"SE, lower bound","SE, upper bound",SE\n0,1,3,2\n1,2,4,3\n5,7,10,8\n6,8,9,8.5\n');
  });
  test("has the bounds of an area between two lines", () => {
    const edge = { line: { width: 0 }, x: [0] };
    const traces = [{ ...edge, y: [1] }, { ...edge, y: [3], fill: "tonexty" }, { name: "A", line: { width: 2 }, x: [0], y: [2] }];
    assert.equal(csvOf(traces), 'step,"A, lower bound","A, upper bound",A\n0,1,3,2\n');
  });
  test("sorts times, and quotes what needs it", () => {
    const traces = [{ name: 'say "x", y', x: ["2026-01-02 00:00", "2026-01-01 00:00"], y: [2, 1] }];
    assert.equal(csvOf(traces), 'time,"say ""x"", y"\n2026-01-01 00:00,1\n2026-01-02 00:00,2\n');
  });
  test("says what is across, where it is not steps", () => {
    const traces = [{ name: "A", x: ["0", "1"], y: [2, 3] }];
    assert.equal(csvOf(traces, "rank"), "rank,A\n0,2\n1,3\n");
  });
  test("of nothing is a head", () => assert.equal(csvOf([]), "step\n"));
});

test("no text is a formula of a spreadsheet; numbers stay as they are", () => {
  assert.equal(rowsOf([["=1+1", "+1", "-a", "@b", "\tc", "\rd", "e\rf", "a=b"], [-1.5, 2, null]]), `'=1+1,'+1,'-a,'@b,'\tc,"'\rd","e\rf",a=b\n-1.5,2,\n`);
});

test("a heat map's rows are ranks, or ranges of them", () => {
  const heat = /** @type {any} */ ({ world: 3, together: 2, rows: 2, step: [0, 10], values: Float32Array.from([0.1, NaN, 0.25, 1]) });
  assert.equal(heatCsv(heat), "rank,step 0,step 10\n0–1,0.1,\n2,0.25,1\n");
});

test("files are named by page and chart", () => {
  assert.equal(fileName("/runs/3f9a", "chart-compute"), "paceline-3f9a-compute");
  assert.equal(fileName("/under/proxy/runs/3f9a/ranks/5", "chart-times"), "paceline-under-proxy-3f9a-ranks-5-times");
  assert.equal(fileName("/compare", "compare-step_s"), "paceline-compare-step_s");
  assert.equal(fileName("/fleet", "fleet-cost"), "paceline-fleet-cost");
});
