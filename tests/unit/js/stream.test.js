import assert from "node:assert/strict";
import { afterEach, beforeEach, describe, test } from "node:test";

import { follow } from "../../../dashboard/paceline_dashboard/assets/js/stream.js";

class Source {
  constructor(url) {
    this.since = new URL(url).searchParams.get("since");
    this.closed = false;
    sources.push(this);
  }

  close() {
    this.closed = true;
  }

  tell(id) {
    this.onmessage({ data: `event ${id}`, lastEventId: id });
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

/** A tab that follows the run from a position; what it hears. */
async function tab(since) {
  const heard = { events: [], opened: 0, errors: 0 };
  const on = { open: () => (heard.opened += 1), message: (_data, id) => heard.events.push(id), error: () => (heard.errors += 1) };
  const stream = follow(new URL(`http://localhost/runs/r${number}/events`), since, on);
  heard.close = () => stream.close();
  tabs.push(heard);
  await later();
  return heard;
}

describe("tabs of a browser", () => {
  test("share one stream, which tells all of them", async () => {
    const first = await tab("5-0");
    sources[0].onopen();
    const second = await tab("5-0");
    assert.deepEqual([sources.length, sources[0].since], [1, "5-0"]);
    assert.deepEqual([first.opened, second.opened], [1, 1]);
    sources[0].tell("6-0");
    await later();
    assert.deepEqual([first.events, second.events], [["6-0"], ["6-0"]]);
  });
  test("one that joins hears what came since its own position", async () => {
    await tab("5-0");
    sources[0].onopen();
    for (const id of ["6-0", "7-0", "7-1", "10-0"]) sources[0].tell(id);
    const second = await tab("7-1");
    assert.deepEqual(second.events, ["7-1", "10-0"]);
  });
  test("one that joins from before the stream's beginning lets it begin there", async () => {
    const first = await tab("5-0");
    const second = await tab("3-0");
    assert.deepEqual(sources.map(({ since, closed }) => [since, closed]), [["5-0", true], ["3-0", false]]);
    sources[1].onopen();
    sources[1].tell("4-0");
    await later();
    assert.deepEqual([first.events, second.events], [["4-0"], ["4-0"]]);
  });
  test("go on from their own position when the one with the stream is closed", async () => {
    const first = await tab("5-0");
    sources[0].onopen();
    const second = await tab("5-0");
    sources[0].tell("6-0");
    await later();
    first.close();
    await later();
    assert.deepEqual(sources.map(({ since, closed }) => [since, closed]), [["5-0", true], ["6-0", false]]);
    sources[1].tell("7-0");
    await later();
    assert.deepEqual([first.events, second.events], [["6-0"], ["6-0", "7-0"]]);
  });
  test("all hear that the stream broke", async () => {
    const first = await tab("5-0");
    const second = await tab("5-0");
    sources[0].onerror();
    await later();
    assert.deepEqual([first.errors, second.errors], [1, 1]);
  });
  test("have a stream each where the browser has no locks", async () => {
    delete globalThis.navigator;
    await tab("5-0");
    await tab("6-0");
    assert.deepEqual(sources.map(({ since }) => since), ["5-0", "6-0"]);
  });
});
