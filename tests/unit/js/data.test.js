import assert from "node:assert/strict";
import { beforeEach, describe, test } from "node:test";

import { MOST_STEPS, RunData, rows } from "../../../dashboard/paceline_dashboard/assets/js/data.js";
import { answerOf } from "./views.js";

const range = (from, to) => Array.from({ length: to - from + 1 }, (_, i) => from + i);
const steps = (from, to) => ({ step: range(from, to), se: range(from, to).map((step) => step / 10) });
const table = (numbers, ranks) => ({
  bucket: 1, ranks, step: numbers,
  ...Object.fromEntries(["compute_s", "ett_s", "share"].map((name) => [name, ranks.map((rank) => numbers.map(() => rank + 0.5))])),
});
const segment = (first_step, more = {}) => ({ first_step, steps: 2, source: "controller", why: "", fallback: "", ...more });

let data;
beforeEach(() => {
  data = new RunData();
});

describe("rows", () => {
  test("are made of columns; what is no column is left out", () => {
    assert.deepEqual([...rows({ bucket: 1, step: [3, 4], se: [0.1, null] })], [{ step: 3, se: 0.1 }, { step: 4, se: null }]);
  });
  test("of no steps are none", () => assert.deepEqual([...rows({})], []));
});

describe("steps", () => {
  test("at first there is none", () => assert.equal(data.latest, -1));
  test("the latest is the greatest, in whichever order they come", () => {
    data.addSteps(steps(5, 9));
    data.addSteps(steps(2, 3));
    assert.equal(data.latest, 9);
    assert.deepEqual(data.rowsBetween(0, 6).map((row) => row.step), [2, 3, 5, 6]);
  });
  test("one that comes again replaces the earlier", () => {
    data.addSteps({ step: [1], se: [0.1] });
    data.addSteps({ step: [1], se: [0.2] });
    assert.deepEqual(data.rowsBetween(0, 9), [{ step: 1, se: 0.2 }]);
  });
  test("the oldest are forgotten", () => {
    data.addSteps(steps(0, MOST_STEPS + 9));
    assert.equal(data.steps.size, MOST_STEPS);
    assert.equal(data.rowsBetween(0, Infinity)[0].step, 10);
  });
  test("with them, coasts before them", () => {
    data.addSegment(segment(2, { source: "coast" }));
    data.addSegment(segment(20, { source: "coast" }));
    data.addSteps(steps(0, MOST_STEPS + 9));
    assert.deepEqual(data.coasts, [[20, 22]]);
  });
  test("clear forgets all", () => {
    data.addSteps(steps(0, 3));
    data.addSwitch({ version: 1 });
    data.clear();
    assert.deepEqual([data.latest, data.steps.size, data.switches], [-1, 0, []]);
  });
});

describe("how far back steps reach", () => {
  test("to the oldest one here", () => {
    data.addSteps(steps(10, 20));
    data.addHeat(answerOf([10], 1).heat);
    assert.deepEqual([data.reachesBackTo(10), data.reachesBackTo(9)], [true, false]);
  });
  test("a resumed run's first step is enough", () => {
    data.begins = 10;
    data.addSteps(steps(10, 20));
    data.addHeat(answerOf([10], 1).heat);
    assert.equal(data.reachesBackTo(0), true);
  });
  test("the heat map counts, too", () => {
    data.addSteps(steps(10, 20));
    assert.equal(data.reachesBackTo(10), false);
    data.addHeat(answerOf(range(15, 20), 1).heat);
    assert.deepEqual([data.reachesBackTo(10), data.reachesBackTo(15)], [false, true]);
  });
});

describe("cells of ranks", () => {
  test("of a table of some ranks stand at their ranks", () => {
    data.addTable({ ranks: [1, 3], step: [7], compute_s: [[0.1], [null]], ett_s: [[0.2], [0.4]], share: [[0.5], [0.5]] });
    const { compute_s, ett_s } = data.cells.get(7);
    assert.deepEqual([...compute_s], [...new Float32Array([NaN, 0.1, NaN, NaN])]);
    assert.deepEqual([...ett_s], [...new Float32Array([NaN, 0.2, NaN, 0.4])]);
  });
});

describe("what is new since an earlier answer", () => {
  test("joins what is there: what comes again counts once", () => {
    data.start(answerOf(range(0, 5), 1));
    data.add(answerOf(range(4, 8), 1, [8]));
    data.add(answerOf(range(4, 8), 1, [8]));
    assert.deepEqual([data.latest, data.current], [8, 8]);
    for (const map of [data.steps, data.cells, data.heat]) assert.deepEqual([...map.keys()].sort(), range(0, 8));
    assert.deepEqual([...data.heat.get(8).values], [3]);
  });
  test("of a restarted run are steps that are trained again", () => {
    data.start(answerOf(range(0, 9), 1));
    data.add({ ...answerOf(range(4, 9), 1, [4]), run: { step: 4 } });
    assert.deepEqual([data.latest, data.current, ...data.heat.get(4).values], [9, 4, 3]);
  });
  test("has spans without a controller, which join those that are known", () => {
    data.start({ ...answerOf(range(0, 9), 1), coasts: [[2, 3]] });
    data.add({ ...answerOf(range(4, 9), 1), coasts: [[4, 5], [8, 9]] });
    assert.deepEqual(data.coasts, [[2, 6], [8, 10]]);
  });
  test("may be nothing", () => {
    data.start(answerOf(range(0, 5), 1));
    data.add({ ...answerOf([], 1), run: { step: 5 } });
    assert.deepEqual([data.latest, data.current, data.heat.size], [5, 5, 6]);
  });
});

describe("segments", () => {
  test("the newest is the one with the latest step", () => {
    data.addSegment(segment(4));
    data.addSegment(segment(2));
    assert.equal(data.segment.first_step, 4);
  });
  test("coasts that touch are one span", () => {
    for (const first of [2, 8, 4]) data.addSegment(segment(first, { source: "coast" }));
    assert.deepEqual(data.coasts, [[2, 6], [8, 10]]);
    data.addSegment(segment(6, { source: "coast" }));
    assert.deepEqual(data.coasts, [[2, 10]]);
  });
  test("a coast that comes again changes nothing", () => {
    for (const first of [2, 2]) data.addSegment(segment(first, { source: "coast" }));
    assert.deepEqual(data.coasts, [[2, 4]]);
  });
});

describe("the fallback to the all-reduce", () => {
  const relaxed = (first_step, fallback, more = {}) => segment(first_step, { attempt: 0, fallback, ...more });

  test("is none without segments, and without one of theirs", () => {
    assert.equal(data.fallback, "");
    data.addSegment(relaxed(0, ""));
    assert.equal(data.fallback, "");
  });
  test("of a run that begins is its first segment's, which comes twice", () => {
    data.addSegment(relaxed(0, ""));
    data.addSegment(relaxed(0, "why"));
    assert.equal(data.fallback, "why");
    assert.equal(data.recent.length, 1);
  });
  test("is the newest begun segment's: one that is read ahead says nothing yet", () => {
    data.addSegment(relaxed(0, "why"));
    data.addSteps(steps(0, 1));
    data.addSegment(relaxed(2, ""));
    assert.equal(data.fallback, "why");
    data.addSteps(steps(2, 2));
    assert.equal(data.fallback, "");
  });
  test("of a restarted run is the new attempt's", () => {
    data.addSegment(relaxed(8, "why"));
    data.addSteps(steps(0, 9));
    data.addSegment(relaxed(4, "", { attempt: 1 }));
    data.addSteps(steps(4, 4));
    assert.equal(data.fallback, "");
  });
  test("of a restarted run stays while its next segment has not begun", () => {
    data.addSegment(relaxed(8, "why"));
    data.addSteps(steps(0, 9));
    data.addSegment(relaxed(4, "why", { attempt: 1 }));
    data.addSteps(steps(4, 4));
    data.addSegment(relaxed(6, "", { attempt: 1 }));
    assert.equal(data.fallback, "why");
  });
});

describe("choices of synchronisers", () => {
  const chosen = (first_step, digest, why, more = {}) =>
    segment(first_step, { attempt: 0, version: 1, synchroniser_digest: digest, why, ...more });

  test("the same one again is the same choice, with its newest reason", () => {
    data.addSegment(chosen(0, "a", "first"));
    data.addSegment(chosen(2, "a", "second"));
    assert.equal(data.choices.length, 1);
    const [choice] = data.choices;
    assert.deepEqual([choice.step, choice.newest, choice.began, choice.why], [0, 2, "first", "second"]);
  });
  test("another digest, version or attempt is another choice", () => {
    data.addSegment(chosen(0, "a", "w"));
    data.addSegment(chosen(2, "b", "w"));
    data.addSegment(chosen(4, "b", "w", { version: 2 }));
    data.addSegment(chosen(4, "b", "w", { version: 2, attempt: 1 }));
    assert.deepEqual(data.choices.map((choice) => choice.step), [0, 2, 4, 4]);
  });
  test("one that is older than the last is not told again", () => {
    data.addSegment(chosen(4, "a", "w"));
    data.addSegment(chosen(2, "b", "w"));
    assert.equal(data.choices.length, 1);
  });
  test("a policy without a choice has none", () => {
    data.addSegment(segment(0));
    assert.deepEqual(data.choices, []);
  });
  test("only the newest 20 are kept", () => {
    for (const step of range(0, 29)) data.addSegment(chosen(step, `d${step}`, "w"));
    assert.deepEqual([data.choices.length, data.choices[0].step], [20, 10]);
  });
});

describe("switches", () => {
  test("are sorted by version; one that comes again replaces the earlier", () => {
    data.addSwitch({ version: 2 });
    data.addSwitch({ version: 0 });
    data.addSwitch({ version: 2, effective_step: 8 });
    assert.deepEqual(data.switches, [{ version: 0 }, { version: 2, effective_step: 8 }]);
  });

  test("an older answer takes nothing back", () => {
    data.addSwitch({ version: 1, effective_step: 30 });
    data.addSwitch({ version: 1, effective_step: null });
    assert.deepEqual(data.switches, [{ version: 1, effective_step: 30 }]);
  });
});

describe("views", () => {
  test("hold the steps asked for", () => {
    data.addSteps(steps(0, 9));
    data.addTable(table(range(0, 9), [0, 1]));
    const view = data.view(3, 5, 4);
    assert.deepEqual([view.step, view.cellStep, view.ranks, view.world], [[3, 4, 5], [3, 4, 5], [0, 1], 4]);
    assert.deepEqual(view.metrics.se, [0.3, 0.4, 0.5]);
    assert.equal(view.cells.length, 3);
  });
  test("of nothing are empty", () => assert.deepEqual(data.view(0, 9, 4).metrics, {}));
  test("have the heat map of the same steps", () => {
    data.add(answerOf(range(0, 9), 1, [4]));
    const { heat } = data.view(3, 5, 1);
    assert.deepEqual([heat.step, heat.rows, heat.together, heat.bucket], [[3, 4, 5], 1, 1, 1]);
    assert.deepEqual([...heat.values], [1, 3, 1]);
    assert.deepEqual(heat.bands.compute_p50, [1, 3, 1]);
  });
});
