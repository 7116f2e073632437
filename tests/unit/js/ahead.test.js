import assert from "node:assert/strict";
import { afterEach, beforeEach, describe, test } from "node:test";

import { askEarly, newestSteps } from "../../../dashboard/paceline_dashboard/assets/js/ahead.js";

const { fetch } = globalThis;
/** @type {string[]} */
let asked;

beforeEach(() => {
  asked = [];
  globalThis.fetch = async (target) => {
    asked.push(/** @type {URL} */ (target).href.replace(/.*\/api\/v1\//, ""));
    return new Response(JSON.stringify({ number: asked.length }));
  };
});
afterEach(() => (globalThis.fetch = fetch));

describe("what a run's page begins with", () => {
  test("is asked for once before the page is there, and again when the page is opened again", async () => {
    askEarly("/below/runs/a%20b", "/below/");
    assert.deepEqual(asked, ["runs/a%20b/view?last=511"]);
    assert.deepEqual(await newestSteps("runs/a%20b"), { number: 1 });
    assert.deepEqual(await newestSteps("runs/a%20b"), { number: 2 });
  });

  test("is asked for when the page is opened, where the early answer is another run's", async () => {
    askEarly("/runs/a", "/");
    assert.deepEqual(await newestSteps("runs/b"), { number: 2 });
    assert.deepEqual(await newestSteps("runs/a"), { number: 3 });
  });

  test("is not asked for early on other pages", () => {
    for (const path of ["/", "/runs/a/ranks/1", "/compare", "/other/runs/a"]) askEarly(path, "/");
    askEarly("/runs/a", "/below/");
    assert.deepEqual(asked, []);
  });

  test("whose early answer is an error tells the page of it", async () => {
    globalThis.fetch = async () => new Response("{}", { status: 500 });
    askEarly("/runs/a", "/");
    await new Promise((resolve) => setImmediate(resolve));
    await assert.rejects(newestSteps("runs/a"), { status: 500 });
  });
});
