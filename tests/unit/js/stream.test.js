import assert from "node:assert/strict";
import { afterEach, beforeEach, describe, test } from "node:test";

import { follow } from "../../../dashboard/paceline_dashboard/assets/js/stream.js";

class Source {
  constructor(url) {
    this.url = String(url);
    this.closed = false;
    sources.push(this);
  }

  close() {
    this.closed = true;
  }

  tell(event) {
    this.onmessage({ data: JSON.stringify(event) });
  }
}

/** A browser's locks: who asks first has it until its promise is kept. */
class Locks {
  constructor() {
    this.queue = [];
    this.held = false;
  }

  request(_name, { signal }, task) {
    return new Promise((resolve, reject) => {
      signal.addEventListener("abort", () => reject(new DOMException("no more", "AbortError")));
      this.queue.push({ signal, task, resolve });
      this.next();
    });
  }

  async next() {
    while (!this.held && this.queue.length) {
      const { signal, task, resolve } = this.queue.shift();
      if (signal.aborted) continue;
      this.held = true;
      resolve(await task());
      this.held = false;
    }
  }
}

let sources, tabs, number;
const later = () => new Promise((resolve) => setTimeout(resolve, 20)); // channels hand on what they hear in a turn of the loop

beforeEach(() => {
  [sources, tabs] = [[], []];
  number = (number ?? 0) + 1; // a channel of its own for each test
  globalThis.EventSource = Source;
  Object.defineProperty(globalThis, "navigator", { value: { locks: new Locks() }, configurable: true });
});
afterEach(() => {
  for (const tab of tabs) tab.close();
  delete globalThis.navigator;
});

/** A tab that follows the run; what it hears. */
async function tab() {
  const heard = { events: [], opened: 0, errors: 0 };
  const on = { open: () => (heard.opened += 1), message: (event) => heard.events.push(event), error: () => (heard.errors += 1) };
  const stream = follow(new URL(`http://localhost/runs/r${number}/events`), on);
  heard.close = () => stream.close();
  tabs.push(heard);
  await later();
  return heard;
}

const change = (step) => ({ type: "change", step, revision: 0 });
const waiting = { type: "waiting", for: "bus" };

describe("tabs of a browser", () => {
  test("share one stream, which tells all of them", async () => {
    const first = await tab();
    sources[0].onopen();
    const second = await tab();
    assert.equal(sources.length, 1);
    assert.deepEqual([first.opened, second.opened], [1, 1], "the second asks for what came before, too");
    sources[0].tell(change(6));
    await later();
    assert.deepEqual([first.events, second.events], [[change(6)], [change(6)]]);
  });
  test("one that joins hears what the server waits for", async () => {
    await tab();
    sources[0].onopen();
    for (const event of [change(6), waiting, change(7)]) sources[0].tell(event);
    assert.deepEqual((await tab()).events, [waiting]);
  });
  test("one that joins before the stream is open hears when it is", async () => {
    await tab();
    const second = await tab();
    assert.equal(second.opened, 0);
    sources[0].onopen();
    await later();
    assert.deepEqual([sources.length, second.opened], [1, 1]);
  });
  test("have another stream when the tab with the stream is closed, and ask again", async () => {
    const first = await tab();
    sources[0].onopen();
    const second = await tab();
    first.close();
    await later();
    assert.deepEqual(sources.map(({ closed }) => closed), [true, false]);
    sources[1].onopen();
    sources[1].tell(change(7));
    await later();
    assert.deepEqual([first.events, second.opened, second.events], [[], 2, [change(7)]]);
  });
  test("all hear that the stream broke", async () => {
    const first = await tab();
    const second = await tab();
    sources[0].onerror();
    await later();
    assert.deepEqual([first.errors, second.errors], [1, 1]);
  });
  test("have a stream each where the browser has no locks", async () => {
    delete globalThis.navigator;
    await tab();
    await tab();
    assert.equal(sources.length, 2);
  });
});
