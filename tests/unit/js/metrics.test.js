import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { bestWords, courseOf, Metrics, newestWords } from "../../../dashboard/paceline_dashboard/assets/js/metrics.js";
import { reachedWords, targetWords } from "../../../dashboard/paceline_dashboard/assets/js/target.js";

const evaluation = (step, metrics, more = {}) => ({ step, epoch: 1, attempt: 0, trained: 64 * (step + 1), at: 0, after_s: 90, ranks: 1, metrics, ...more });

describe("evaluations", () => {
  test("have a course for each metric, with gaps where it was not finite", () => {
    const seen = [evaluation(1, { accuracy: 0.5 }), evaluation(3, { loss: 2 }), evaluation(5, { accuracy: null })];
    assert.deepEqual(courseOf(seen, "accuracy"), { x: [1, 5], y: [0.5, null] });
  });
  test("come again when further ranks have given their part", () => {
    const metrics = new Metrics();
    metrics.add([evaluation(3, { accuracy: 0.5 })]);
    metrics.add([evaluation(1, { loss: 2 })]);
    metrics.add([evaluation(3, { accuracy: 0.75 }, { ranks: 2 })]);
    assert.deepEqual(metrics.names, ["accuracy", "loss"]);
    assert.deepEqual(metrics.course.map(({ step, metrics: values }) => [step, values.accuracy]), [[1, undefined], [3, 0.75]]);
  });
  test("that a later attempt has undone go", () => {
    const metrics = new Metrics();
    metrics.add([evaluation(3, { accuracy: 0.5 }), evaluation(7, { accuracy: 0.9 })]);
    metrics.add([evaluation(4, { accuracy: 0.6 }, { attempt: 1 })]);
    assert.deepEqual(metrics.course.map(({ step }) => step), [3, 4]);
  });
  test("that came while the answer was on its way stay, the newer of each step", () => {
    const metrics = new Metrics();
    metrics.add([evaluation(3, { accuracy: 0.5 }, { at: 4, ranks: 2 })]);
    metrics.add([evaluation(5, { accuracy: 0.6 }, { at: 6 })]);
    metrics.add([evaluation(7, { accuracy: 0.7 }, { at: 8 })]);
    metrics.add([evaluation(3, { accuracy: 0.4 }, { at: 4 }), evaluation(5, { accuracy: 0.65 }, { at: 7 })]);
    assert.deepEqual(metrics.course.map(({ step, metrics: values }) => [step, values.accuracy]), [[3, 0.5], [5, 0.65], [7, 0.7]]);
    metrics.add([evaluation(3, { accuracy: 0.5 }, { at: 4, ranks: 2 }), evaluation(4, { accuracy: 0.3 }, { at: 9, attempt: 1 })]);
    assert.deepEqual(metrics.course.map(({ step }) => step), [3, 4]);
  });
  test("in words", () => {
    assert.equal(newestWords(evaluation(9, { accuracy: 0.5 })), "Newest evaluation, after step 9, epoch 1, 640 samples and 90.0 s: accuracy 0.5.");
    assert.equal(newestWords(evaluation(-1, { a: null }, { after_s: null })), "Newest evaluation, before the first step: a –.");
  });
});

describe("the best values in words", () => {
  const course = [evaluation(-1, { accuracy: 0.1, loss: 2 }), evaluation(9, { accuracy: 0.5, loss: 1 }), evaluation(19, { accuracy: 0.5, loss: null })];
  test("of a loss, and of a metric of which nobody said which values are better", () => {
    assert.equal(bestWords(course, null), "So far: accuracy between 0.1 before the first step and 0.5 after step 9; loss at best 1 after step 9.");
  });
  test("of the metric that the target is for", () => {
    const target = { metric: "accuracy", value: 0.9, direction: ">=", source: "evaluations", met: null, best: 0.5, best_step: 9 };
    assert.equal(bestWords(course, target), "So far: accuracy at best 0.5 after step 9; loss at best 1 after step 9.");
  });
  test("of nothing", () => assert.equal(bestWords([evaluation(9, { accuracy: null })], null), ""));
});

describe("a target in words", () => {
  const target = { metric: "loss", value: 0.3, direction: "<=", source: "evaluations", met: null, best: null, best_step: null };
  test("and the newest evaluation say what a model has reached", () => {
    const wanted = { metric: "accuracy", value: 0.9, direction: ">=", source: "evaluations", met: null, best: 0.5, best_step: 3 };
    assert.equal(reachedWords({ target: null, evaluation: null }), "");
    assert.equal(reachedWords({ target: wanted, evaluation: null }), "Target: accuracy ≥ 0.9 is not met yet; the best so far is 0.5, after step 3.");
    const seen = evaluation(3, { accuracy: 0.5 });
    assert.equal(reachedWords({ target: wanted, evaluation: seen }), `${newestWords(seen)} Target: ${targetWords(wanted)}`);
  });
  test("that nobody has set", () => assert.equal(targetWords(null), "None is set."));
  test("that is not met", () => {
    assert.equal(targetWords(target), "loss ≤ 0.3 is not met yet.");
    assert.equal(targetWords({ ...target, best: 0.5, best_step: 1999, source: "training" }), "loss ≤ 0.3 is not met yet; the best so far is 0.5, after step 1,999. The training loss counts, as its mean over 100 steps.");
  });
  test("that was met", () => {
    const met = { step: 1279, epoch: 3, trained: 81_920, at: 0, after_s: 150, value: 0.25 };
    assert.equal(targetWords({ ...target, met }), "loss ≤ 0.3 was met after 2.5 min: in step 1,279, epoch 3, with 81,920 samples (0.25).");
  });
});
