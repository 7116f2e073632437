import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { bars } from "../../../dashboard/paceline_dashboard/assets/js/gantt.js";
import { shown } from "../../../dashboard/paceline_dashboard/assets/js/log.js";
import { beside, deviceFacts, historyOf } from "../../../dashboard/paceline_dashboard/assets/js/rankfacts.js";

const worker = (rank, more = {}) => [rank, { rank, cause: "none", caused: 0, factor: 1, words: "", on_node: null, ...more }];

describe("a timeline's bars", () => {
  const answer = {
    from: 7, to: 7, ranks: [0, 1], step: [7], began_at: [[100.5], [100]],
    data_s: [[0.5], [0]], compute_s: [[1], [2]], wait_s: [[0.5], [0]], reduce_s: [[0.25], [0.25]], rest_s: [[0], [0.5]],
  };
  test("begin when the first rank begins, and follow each other", () => {
    assert.deepEqual(bars(answer).map(({ rank, phase, from, to }) => [rank, phase, from, to]), [
      [0, "data", 0.5, 1], [0, "compute", 1, 2], [0, "wait", 2, 2.5], [0, "reduce", 2.5, 2.75],
      [1, "compute", 0, 2], [1, "reduce", 2, 2.25], [1, "rest", 2.25, 2.75],
    ]);
  });
  test("leave out steps without a record", () => {
    const lost = { ...answer, began_at: [[null], [100]] };
    assert.deepEqual([...new Set(bars(lost).map(({ rank }) => rank))], [1]);
  });
});

describe("ranks beside one", () => {
  test("are all of a few", () => assert.deepEqual(beside(1, 3, new Map()), [0, 1, 2]));
  test("are those of its node, and the worst", () => {
    const causes = new Map(Array.from({ length: 64 }, (_, rank) => worker(rank, { on_node: `n${Math.floor(rank / 4)}` })));
    causes.set(60, { ...causes.get(60), cause: "node", caused: 0.9 });
    assert.deepEqual(beside(9, 64, causes), [8, 9, 10, 11, 60]);
  });
  test("are neighbours where nodes are unknown", () => {
    const ranks = beside(5000, 10_000, new Map());
    assert.ok(ranks.length <= 9 && ranks.includes(5000) && ranks.includes(5001), String(ranks));
  });
});

test("a rank's history has its verdicts, slow steps and switches, newest first", () => {
  const verdict = { from: 0, causes: [{ ranks: [3], since: 120, words: "Rank 3 computes 2 × slower." }, { ranks: [1], since: 90, words: "Rank 1 …" }] };
  const switches = [{ version: 0, effective_step: 0, policy: "bsp" }, { version: 1, effective_step: 60, policy: "chronica" }, { version: 2, effective_step: null, policy: "boa" }];
  const events = historyOf(3, verdict, { slow_steps: [[20, 22]] }, switches, 5);
  assert.deepEqual(events.map(({ step }) => step), [120, 60, 20, 5]);
  assert.equal(events[2].words, "slow in passing until step 22");
});

describe("lines of a log", () => {
  const lines = ["step 1", "WARNING: hot", "Traceback (most recent call last):", "Step 2"];
  test("are all shown, and what is searched for is marked", () => {
    assert.deepEqual(shown(lines, "step", false).map(({ hit }) => hit), [true, false, false, true]);
  });
  test("are only warnings and hits, if asked", () => {
    assert.deepEqual(shown(lines, "2", true).map(({ line }) => line), ["WARNING: hot", "Traceback (most recent call last):", "Step 2"]);
  });
});

describe("a rank's device", () => {
  const gpu = { kind: "cuda", name: "Tesla T4", cores: 8, threads: 2, memory_bytes: 2 ** 34, flops: 4e13, emulated: false };
  test("is told with its cores, memory and trial", () => {
    assert.deepEqual(deviceFacts(gpu), [
      ["Device", "Tesla T4", "cuda"], ["Cores it may use", "8", "2 threads in use"], ["Memory of its device", "16 GiB", ""], ["In a trial", "40,000 GFLOP/s", ""],
    ]);
  });
  test("says that it is emulated", () => assert.deepEqual(deviceFacts({ ...gpu, kind: "cpu", emulated: true })[0], ["Device", "CPU", "emulated"]));
  test("may be unknown", () => assert.deepEqual(deviceFacts(null), []));
});
