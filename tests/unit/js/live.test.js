import assert from "node:assert/strict";
import { afterEach, beforeEach, describe, test } from "node:test";

import { ApiError } from "../../../dashboard/paceline_dashboard/assets/js/api.js";
import { Live } from "../../../dashboard/paceline_dashboard/assets/js/live.js";
import { newDocument } from "./dom.js";

class Stream {
  constructor(url) {
    this.url = url;
    this.closed = false;
    streams.push(this);
  }

  close() {
    this.closed = true;
  }

  tell(event) {
    this.onmessage({ data: JSON.stringify(event) });
  }
}

const { setTimeout: later, clearTimeout: never } = globalThis;
let made = 0;
let timers; // number → task: what waits for its time
let streams, loads, asked, problems, ended, live;
const settled = () => new Promise((resolve) => setImmediate(resolve));
/** All that waits for its time has its turn. */
function pass() {
  const due = [...timers.values()];
  timers.clear();
  for (const task of due) task();
}
const status = () => document.getElementById("connection-status").textContent;

beforeEach(() => {
  timers = new Map();
  globalThis.setTimeout = (task) => timers.set(++made, task) && made;
  globalThis.clearTimeout = (timer) => timers.delete(timer);
  newDocument().add("connection-status");
  globalThis.EventSource = Stream;
  [streams, loads, asked, problems, ended] = [[], [], [], [], false];
  const load = (current) => new Promise((resolve, reject) => loads.push({ current, resolve, reject }));
  const news = (step, opened) => new Promise((resolve, reject) => asked.push({ step, opened, resolve, reject }));
  live = new Live("a run", load, { news, ended: () => ended, problem: (e) => problems.push(e) });
  live.open();
});

afterEach(() => {
  live.close();
  Object.assign(globalThis, { setTimeout: later, clearTimeout: never });
});

async function connected() {
  loads.at(-1).resolve();
  await settled();
  streams.at(-1).onopen();
}

/** The server answers what the page has asked for, and the page may ask again. */
async function answered() {
  asked.at(-1).resolve();
  await settled();
  pass();
  await settled();
}
const questions = () => asked.map(({ step, opened }) => [step, opened]);

describe("the page of a run", () => {
  test("loads, then asks for what came before the stream was open, and with each event", async () => {
    assert.equal(status(), "connecting…");
    await connected();
    assert.match(String(streams[0].url), /api\/v1\/runs\/a%20run\/events$/);
    assert.equal(status(), "live");
    assert.deepEqual(questions(), [[null, true]]);
    await answered();
    streams[0].tell({ type: "change", step: 3, revision: 0 });
    assert.deepEqual(questions(), [[null, true], [3, false]]);
  });

  test("asks one question at a time, and then for the earliest step of all events that came", async () => {
    await connected();
    for (const step of [7, null, 5, 6]) streams[0].tell({ type: "change", step, revision: 0 });
    assert.equal(asked.length, 1);
    asked[0].resolve();
    await settled();
    assert.equal(asked.length, 1, "no sooner than after a pause");
    pass();
    await settled();
    assert.deepEqual(questions().slice(1), [[5, false]]);
    await answered();
    assert.equal(asked.length, 2);
  });

  test("starts again where a question is not answered", async () => {
    await connected();
    asked[0].reject(new ApiError(503, "away"));
    await settled();
    assert.deepEqual([status(), streams[0].closed], ["connection lost, retrying", true]);
    pass();
    assert.equal(loads.length, 2);
  });

  test("asks with the next event where a question was refused", async () => {
    await connected();
    asked[0].reject(new ApiError(429, "too many"));
    await settled();
    assert.deepEqual([loads.length, problems.length], [1, 1]);
    streams[0].tell({ type: "change", step: 3, revision: 0 });
    assert.equal(asked.length, 2);
  });

  test("says what the server waits for", async () => {
    await connected();
    for (const [awaited, words] of [["bus", "waiting for the bus"], ["database", "waiting for the database"], [null, "live"]]) {
      streams[0].tell({ type: "waiting", for: awaited });
      assert.equal(status(), words);
    }
    assert.deepEqual([loads.length, asked.length], [1, 1]);
  });

  test("tries again later while the server is away", async () => {
    for (const waits of [1, 2, 3]) {
      loads.at(-1).reject(new ApiError(0, "away"));
      await settled();
      assert.deepEqual([status(), loads.length], ["connection lost, retrying", waits]);
      pass();
      assert.equal(loads.length, waits + 1);
    }
    assert.deepEqual(problems, []);
  });

  test("does not try again what the server refuses", async () => {
    loads[0].reject(new ApiError(404, "no such run"));
    await settled();
    pass();
    assert.deepEqual([loads.length, problems.map((error) => error.message)], [1, ["no such run"]]);
  });

  test("tries again when the stream breaks", async () => {
    await connected();
    streams[0].onerror();
    pass();
    assert.equal(loads.length, 2);
  });
});

describe("the page of an ended run", () => {
  const end = () => streams.at(-1).tell({ type: "end", step: null, revision: 0 });

  test("is loaded once at a time: reopening waits for a load that is under way", async () => {
    for (let i = 0; i < 5; i++) live.reopen();
    assert.equal(loads.length, 1);
    assert.ok(loads[0].current());
    await connected();
    assert.equal(streams.length, 1);
  });

  test("rests when it has asked for the last time, which the end of the stream does not hurry", async () => {
    await connected();
    end();
    streams[0].onerror();
    assert.equal(status(), "live");
    await answered();
    assert.equal(asked.length, 2);
    await answered();
    assert.deepEqual([status(), loads.length, asked.length, streams[0].closed], ["run ended", 1, 2, true]);
  });

  test("that has loaded all of it asks nothing more", async () => {
    ended = true;
    await connected();
    end();
    assert.deepEqual([status(), loads.length, asked.length, streams[0].closed], ["run ended", 1, 0, true]);
  });

  test("asks again when somebody lets the run go on", async () => {
    ended = true;
    await connected();
    streams[0].tell({ type: "change", step: 3, revision: 0 });
    assert.deepEqual(questions(), [[3, false]]);
  });

  test("is loaded again for late telemetry, once it rests", async () => {
    await connected();
    live.reopen();
    assert.equal(loads.length, 1, "the stream is open");
    await answered();
    end();
    await answered();
    live.reopen();
    live.reopen();
    assert.equal(loads.length, 2);
  });

  test("waits for its retry while the server is away", async () => {
    loads[0].reject(new ApiError(503, "away"));
    await settled();
    live.reopen();
    assert.equal(loads.length, 1);
  });
});

describe("a page that is hidden", () => {
  test("has no stream, and loads anew when it is seen again", async () => {
    await connected();
    document.hidden = true;
    document.dispatch("visibilitychange");
    assert.ok(streams[0].closed);
    document.hidden = false;
    document.dispatch("visibilitychange");
    assert.equal(loads.length, 2);
  });

  test("makes no use of an answer that comes meanwhile", async () => {
    document.hidden = true;
    document.dispatch("visibilitychange");
    assert.equal(loads[0].current(), false);
    loads[0].resolve();
    await settled();
    assert.equal(streams.length, 0);
  });

  test("stays closed after close()", () => {
    live.close();
    document.dispatch("visibilitychange");
    assert.equal(loads.length, 1);
  });
});
