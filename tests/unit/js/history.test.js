import assert from "node:assert/strict";
import { afterEach, beforeEach, describe, test } from "node:test";

import { RunData } from "../../../dashboard/paceline_dashboard/assets/js/data.js";
import { History } from "../../../dashboard/paceline_dashboard/assets/js/history.js";
import { answerOf, range, stepsOf } from "./views.js";

const { fetch: realFetch } = globalThis;
const realNow = performance.now;
let now; // ms
let asked; // the ranges of requests
let answer; // range → the response
let arrived; // how many views have arrived
let data, history;
const settled = () => new Promise((resolve) => setImmediate(resolve));
const json = (document) => new Response(JSON.stringify(document));
const busy = () => new Response("busy", { status: 503 });

beforeEach(() => {
  [now, asked, arrived, data] = [0, [], 0, new RunData()];
  answer = ({ from, to }) => json(answerOf(range(from, to), 3));
  performance.now = () => now;
  globalThis.fetch = async (target) => {
    const { pathname, searchParams } = new URL(target);
    assert.ok(pathname.endsWith("/runs/r/view"));
    asked.push({ from: Number(searchParams.get("from")), to: Number(searchParams.get("to")) });
    return answer(asked.at(-1));
  };
  history = new History("runs/r", () => (arrived += 1));
});
afterEach(() => {
  globalThis.fetch = realFetch;
  performance.now = realNow;
});

/** At this time the page draws steps up to `latest`; the view that it gets. */
async function draw(at, latest, key = "all") {
  now = at;
  data.addSteps(stepsOf(range(data.latest + 1, latest)));
  history.view(key, 0, 1_000_000, data, 1);
  await settled();
  return history.view(key, 0, 1_000_000, data, 1);
}

describe("history", () => {
  test("is asked for once; the stream brings what follows", async () => {
    const view = await draw(0, 9);
    assert.deepEqual([asked, arrived, view.step], [[{ from: 0, to: 9 }], 1, [0, 3, 6, 9]]);
    const grown = await draw(60_000, 300);
    assert.equal(asked.length, 1);
    assert.deepEqual(grown.step, range(0, 100).map((point) => 3 * point));
  });
  test("is asked for again when the stream has brought much", async () => {
    await draw(0, 9);
    await draw(1, 408);
    assert.equal(asked.length, 1);
    await draw(2, 409);
    assert.deepEqual(asked.at(-1), { from: 0, to: 409 });
  });
  test("is asked for less and less often from a server in trouble", async () => {
    answer = busy;
    const times = [];
    for (let at = 0; at <= 100_000; at += 500) {
      await draw(at, 9);
      if (asked.length > times.length) times.push(at);
    }
    assert.deepEqual(times, [0, 2000, 6000, 14_000, 30_000, 60_000, 90_000]);
    assert.equal(arrived, 0);
  });
  test("comes as soon as the server is well again", async () => {
    const well = answer;
    answer = busy;
    await draw(0, 9);
    answer = well;
    await draw(2000, 9);
    assert.equal(arrived, 1);
  });
  test("of other steps is asked for at once", async () => {
    await draw(0, 9);
    await draw(1, 9, "last 500");
    assert.equal(asked.length, 2);
  });
  test("of a choice that is no longer shown is thrown away", async () => {
    data.addSteps(stepsOf(range(0, 9)));
    history.view("all", 0, 1_000_000, data, 1);
    history.clear();
    await settled();
    assert.equal(arrived, 0);
  });
});
