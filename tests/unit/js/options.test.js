import assert from "node:assert/strict";
import { describe, test } from "node:test";

import { changesOf, consequences, forecastOf, ofGroup, optionsOf } from "../../../dashboard/paceline_dashboard/assets/js/options.js";

const paceline = {
  name: "paceline",
  summary: "Divides each global batch.",
  source: "",
  changes: "nothing",
  changes_with: { mode: { free: "batches" } },
  parameters: { mode: { type: "string", default: "exact", enum: ["exact", "free"] }, window: { type: "integer", default: 64 } },
};
const plain = (name, changes) => ({ name, summary: name, source: "", changes, changes_with: {}, parameters: {} });
const PRESETS = [plain("adpsgd", "training"), plain("bsp", "nothing"), plain("chronica", "batches"), paceline, plain("sata", "nothing")];
const forecast = (policy, saving, half, more = {}) => ({
  policy, label: policy, parameters: {}, saving, saving_low: saving - half, saving_high: saving + half, harmful: false, in_force: false, ...more,
});
const answer = (forecasts, left_out = [], recommended = null) => ({ forecasts, left_out, recommended });
const BSP = { policy: "bsp", parameters: {} };
const options = (...forecasts) => optionsOf(PRESETS, answer(forecasts), BSP);
const chosen = (recommended, ...forecasts) =>
  optionsOf(PRESETS, answer(forecasts, [], recommended), BSP).find((option) => option.recommended)?.label;

describe("what a preset changes in the training", () => {
  test("without such parameters it is the preset's", () => {
    assert.equal(changesOf({ changes: "training", changes_with: {} }, { probes: 2 }), "training");
  });
  test("a value that changes nothing leaves it", () => assert.equal(changesOf(paceline, { mode: "exact" }), "nothing"));
  test("a value may change it", () => assert.equal(changesOf(paceline, { mode: "free" }), "batches"));
  test("a parameter that is not given has its default", () => assert.equal(changesOf(paceline, {}), "nothing"));
  test("a value may also change less than the default", () => {
    const other = { changes: "training", changes_with: { synchronous: { true: "nothing" } } };
    assert.deepEqual([changesOf(other, { synchronous: true }), changesOf(other, { synchronous: false })], ["nothing", "training"]);
  });
  test("of several the gravest counts", () => {
    const changes_with = { mode: { free: "batches" }, how: { relaxed: "training" } };
    assert.equal(changesOf({ changes: "nothing", changes_with }, { mode: "free", how: "relaxed" }), "training");
    assert.equal(changesOf({ changes: "nothing", changes_with }, { mode: "free", how: "exact" }), "batches");
  });
});

describe("options", () => {
  test("without a forecast there is one of each preset", () => {
    const all = optionsOf(PRESETS, null, BSP);
    assert.deepEqual(all.map(({ label }) => label), ["adpsgd", "bsp", "chronica", "paceline", "sata"]);
    assert.deepEqual(all.filter(({ inForce }) => inForce).map(({ label }) => label), ["bsp"]);
    assert.ok(all.every(({ recommended: best }) => !best));
  });

  test("a forecast of other parameters is an option of its own, in the group of what it changes", () => {
    const all = options(forecast("paceline", 0.3, 0.02), forecast("paceline", 0.32, 0.02, { parameters: { mode: "free" } }));
    const free = all.find(({ label }) => label === "paceline (mode free)");
    assert.equal(free.changes, "batches");
    assert.deepEqual(free.parameters, { mode: "free", window: 64 });
    assert.equal(free.forecast.saving, 0.32);
  });

  test("parameters that are the defaults make no second option", () => {
    assert.equal(options(forecast("paceline", 0.3, 0.02, { parameters: { window: 64 } })).length, PRESETS.length);
  });

  test("parameters in force that no option has are those of the preset's own row", () => {
    const all = optionsOf(PRESETS, null, { policy: "paceline", parameters: { mode: "exact", window: 16 } });
    assert.deepEqual(all.filter(({ inForce }) => inForce).map(({ label }) => label), ["paceline"]);
  });

  test("it is known why there is no forecast", () => {
    const [adpsgd] = optionsOf(PRESETS, answer([], [{ policy: "adpsgd", reason: "two optimisers" }]), BSP);
    assert.equal(adpsgd.left, "two optimisers");
  });

  test("a forecast is of exactly these parameters", () => {
    const made = answer([forecast("paceline", 0.3, 0.02)]);
    assert.equal(forecastOf(made, paceline, { window: 64, mode: "exact" }).saving, 0.3);
    assert.equal(forecastOf(made, paceline, { window: 32, mode: "exact" }), null);
  });
});

describe("the recommended option", () => {
  test("is the server's", () => assert.equal(chosen("paceline", forecast("sata", 0.2, 0.02), forecast("paceline", 0.1, 0.02)), "paceline"));
  test("is none where the server names none", () => assert.equal(chosen(null, forecast("sata", 0.6, 0.02)), undefined));
  test("is not in force", () => assert.equal(chosen("bsp", forecast("bsp", 0.3, 0.02)), undefined));
});

test("a group begins with the recommended option and ends with those without a forecast", () => {
  const all = optionsOf(PRESETS, answer([forecast("paceline", 0.3, 0.02), forecast("sata", -0.1, 0.02)], [], "paceline"), BSP);
  assert.deepEqual(ofGroup(all, "nothing").map(({ label }) => label), ["paceline", "bsp", "sata"]);
  assert.deepEqual(ofGroup(all, "training").map(({ label }) => label), ["adpsgd"]);
});

test("what changes the training is not said to stay the same, nor to be undone by a switch back", () => {
  const words = consequences("training").map((point) => point.words).join(" ");
  assert.doesNotMatch(words, /stays the same|any time|keep|global batch/);
  assert.match(words, /A switch back does not undo it/);
  assert.ok(consequences("training").some(({ good }) => !good));
});
