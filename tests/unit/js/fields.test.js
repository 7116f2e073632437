import assert from "node:assert/strict";
import { beforeEach, describe, test } from "node:test";

import { blame, effective, FieldError, fieldOf, valueOf } from "../../../dashboard/paceline_dashboard/assets/js/fields.js";
import { newDocument } from "./dom.js";

const WORLD = 4;
const WHOLE = { type: "integer", minimum: 1, maximum: 64, default: 8, description: "Steps." };
const SHARE = { type: "number", exclusiveMinimum: 0, default: 0.5, description: "A share." };
const LIST = { type: "array", perRank: true, items: SHARE, default: [], description: "Each rank's capacity." };
const MODE = { type: "string", enum: ["exact", "free"], default: "exact", description: "How." };
const FLAG = { type: "boolean", default: false, description: "Whether." };
const NAME = { type: "string", default: "x", description: "Its name." };

beforeEach(newDocument);

/** Puts the field of a parameter "p" on the page; returns its control. */
function field(schema, value) {
  document.root.append(fieldOf("p", schema, value));
  return document.getElementById("policy-parameter-p");
}

/** What `valueOf` makes of what the user entered. */
function entered(schema, given) {
  field(schema, schema.default).value = given;
  return valueOf("p", schema, WORLD);
}

describe("the fields of a preset", () => {
  const preset = { parameters: { band: SHARE, smoothing: { ...SHARE, oneSize: true } } };
  const names = (dif) => effective(preset, dif).map(([name]) => name);
  test("are all parameters where sizes are equal or unknown", () => {
    assert.deepEqual([names(0), names(null)], [["band", "smoothing"], ["band", "smoothing"]]);
  });
  test("leave out what has no effect where sizes differ", () => assert.deepEqual(names(0.5), ["band"]));
});

describe("a field", () => {
  test("holds the value that is given", () => assert.equal(field(WHOLE, 12).value, 12));
  test("of a list holds it with commas", () => assert.equal(field(LIST, [4, 2]).value, "4, 2"));
  test("of a choice holds JSON", () => assert.equal(field(MODE, "free").value, '"free"'));
  test("of a switch is checked", () => assert.equal(field(FLAG, true).checked, true));
  test("bounds its control", () => {
    const { min, max, step } = field(WHOLE, 8);
    assert.deepEqual([min, max, step], [1, 64, "1"]);
  });
  for (const [schema, words] of [
    [WHOLE, "Steps. A whole number, at least 1, at most 64. Default: 8."],
    [SHARE, "A share. A number, above 0. Default: 0.5."],
    [LIST, "Each rank's capacity. Each is a number, above 0. Default: none."],
    [MODE, "How. Default: exact."],
    [FLAG, "Whether. Default: off."],
  ]) {
    test(`says what is legal: ${words}`, () => {
      field(schema, schema.default);
      assert.deepEqual(document.getElementById("policy-parameter-p-help").children, [words]);
    });
  }
});

describe("a legal value", () => {
  test("whole number", () => assert.equal(entered(WHOLE, "64"), 64));
  test("number", () => assert.equal(entered(SHARE, "1e-3"), 0.001));
  test("choice", () => assert.equal(entered(MODE, '"free"'), "free"));
  test("text", () => assert.equal(entered(NAME, "a b"), "a b"));
  test("switch", () => {
    field(FLAG, false).checked = true;
    assert.equal(valueOf("p", FLAG, WORLD), true);
  });
  for (const given of ["4, 2, 1, 1", "4 2;1 , 1"]) {
    test(`list “${given}”`, () => assert.deepEqual(entered(LIST, given), [4, 2, 1, 1]));
  }
  test("no list", () => assert.deepEqual(entered(LIST, "  "), []));
});

describe("an illegal value", () => {
  for (const [schema, given, words] of [
    [WHOLE, "0", "p: must be a whole number, at least 1, at most 64."],
    [WHOLE, "65", "p: must be a whole number, at least 1, at most 64."],
    [WHOLE, "1.5", "p: must be a whole number, at least 1, at most 64."],
    [WHOLE, "", "p: must be a whole number, at least 1, at most 64."],
    [SHARE, "0", "p: must be a number, above 0."],
    [SHARE, "Infinity", "p: must be a number, above 0."],
    [LIST, "4, x", "p: “x” is no number. Write numbers with commas between them."],
    [LIST, "4, 2", "p: 2 given, but the run has 4 ranks. Give one for each rank, or none."],
    [LIST, "4, 2, 0, 1", "p: must be a number, above 0."],
  ]) {
    test(`“${given}”: ${words}`, () => {
      assert.throws(() => entered(schema, given), (error) => error instanceof FieldError && error.message === words);
    });
  }
});

describe("blame", () => {
  test("shows what is wrong at the field, and goes there", () => {
    const control = field(WHOLE, 8);
    assert.equal(blame("p", "p: too many"), true);
    const shown = document.getElementById("policy-parameter-p-problem");
    assert.deepEqual([shown.textContent, shown.hidden, control.focused], ["p: too many", false, true]);
    assert.equal(control.getAttribute("aria-invalid"), "true");
  });
  test("is taken back by the next input", () => {
    const control = field(WHOLE, 8);
    blame("p", "p: too many");
    control.dispatch("input");
    assert.equal(document.getElementById("policy-parameter-p-problem").hidden, true);
    assert.equal(control.getAttribute("aria-invalid"), "false");
  });
  test("tells where there is no such field", () => assert.equal(blame("other", "words"), false));
});
