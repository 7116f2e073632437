import assert from "node:assert/strict";
import { afterEach, beforeEach, describe, test } from "node:test";

import { History } from "../../../dashboard/paceline_dashboard/assets/js/history.js";

const { fetch: realFetch } = globalThis;
const realNow = performance.now;
let now; // ms
let asked; // paths of requests
let answer; // path → the response
let arrived; // how many views have arrived
let history;
const settled = () => new Promise((resolve) => setImmediate(resolve));
const json = (document) => new Response(JSON.stringify(document));
const answers = {
  steps: { bucket: 3, step: [0], se: [1] },
  "worker-steps": { bucket: 3, ranks: [0], step: [0], compute_s: [[1]] },
  coasts: [],
};

beforeEach(() => {
  [now, asked, arrived] = [0, [], 0];
  answer = (path) => json(answers[path]);
  performance.now = () => now;
  globalThis.fetch = async (target) => {
    const path = new URL(target).pathname.split("/").at(-1);
    asked.push(path);
    return answer(path);
  };
  history = new History("runs/r", () => (arrived += 1));
});
afterEach(() => {
  globalThis.fetch = realFetch;
  performance.now = realNow;
});

/** At this time the page draws steps up to `latest`; how often it has asked for steps by then. */
async function draw(at, latest, key = "all") {
  now = at;
  history.view(key, 0, 1_000_000, latest, 1);
  await settled();
  return asked.filter((path) => path === "steps").length;
}

describe("history", () => {
  test("is asked for once, and again with a new point after a pause of 2 s", async () => {
    assert.equal(await draw(0, 9), 1);
    assert.equal(arrived, 1);
    assert.equal(await draw(5000, 11), 1, "no new point: a point stands for 3 steps");
    assert.equal(await draw(5000, 12), 2);
    assert.equal(await draw(6999, 15), 2, "within the pause");
    assert.equal(await draw(7000, 15), 3);
  });
  test("is asked for less and less often from a server in trouble", async () => {
    answer = () => new Response("busy", { status: 503 });
    const times = [];
    for (let at = 0; at <= 100_000; at += 500) if ((await draw(at, at)) > times.length) times.push(at);
    assert.deepEqual(times, [0, 2000, 6000, 14_000, 30_000, 60_000, 90_000]);
    assert.equal(arrived, 0);
  });
  test("comes as soon as the server is well again", async () => {
    answer = () => new Response("busy", { status: 503 });
    await draw(0, 9);
    answer = (path) => json(answers[path]);
    await draw(2000, 9);
    assert.equal(arrived, 1);
  });
  test("of other steps does not wait for the pause", async () => {
    assert.equal(await draw(0, 9), 1);
    assert.equal(await draw(1, 9, "last 500"), 2);
  });
  test("of a choice that is no longer shown is thrown away", async () => {
    history.view("all", 0, 1_000_000, 9, 1);
    history.clear();
    await settled();
    assert.equal(arrived, 0);
  });
});
