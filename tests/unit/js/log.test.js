// Lines of a log: what is kept, and earlier lines on demand.
import assert from "node:assert/strict";
import { afterEach, beforeEach, describe, test } from "node:test";

import { Log } from "../../../dashboard/paceline_dashboard/assets/js/log.js";
import { LogLines } from "../../../dashboard/paceline_dashboard/assets/js/loglines.js";
import { newDocument } from "./dom.js";

const bytes = (text) => new TextEncoder().encode(text).length;

describe("lines of a log", () => {
  test("go on where a part ended within a line", () => {
    const lines = new LogLines(10);
    lines.add({ text: "a\nb", offset: 5 });
    lines.add({ text: "c\nd\n", offset: 8 });
    assert.deepEqual(lines.all, ["a", "bc", "d"]);
    assert.equal(lines.first.offset, 5);
  });
  test("fit earlier lines, also after the oldest went", () => {
    const whole = Array.from({ length: 30 }, (_, at) => `Schritt ${at} größer\n`).join("");
    const lines = new LogLines(4);
    for (let at = 0; at < whole.length; at += 7) lines.add({ text: whole.slice(at, at + 7), offset: bytes(whole.slice(0, at)) });
    const { offset } = lines.first;
    const before = new TextDecoder().decode(new TextEncoder().encode(whole).slice(offset - 50, offset));
    lines.addEarlier({ text: before, offset: offset - 50 });
    assert.ok(whole.endsWith(`${lines.all.join("\n")}\n`), lines.all.join("\n"));
    assert.equal(lines.first.offset, offset - 50);
  });
  test("of another attempt have offsets of their own", () => {
    const lines = new LogLines(2);
    lines.add({ text: "killed", offset: 900, attempt: 0 });
    lines.add({ text: "a\nb\nc\n", offset: 0, attempt: 1 });
    assert.deepEqual(lines.all, ["b", "c"]);
    assert.deepEqual(lines.first, { attempt: 1, offset: 2 });
    lines.add({ text: "d\n", offset: 0, attempt: 2 });
    assert.deepEqual(lines.all, ["c", "d"]);
  });
  test("fit earlier ones before a line without an end", () => {
    const lines = new LogLines(10);
    lines.add({ text: "half", offset: 4 });
    lines.addEarlier({ text: "a\nb ", offset: 0 });
    lines.add({ text: " and more\n", offset: 8 });
    assert.deepEqual(lines.all, ["a", "b half and more"]);
  });
});

describe("the log of a page", () => {
  const { fetch: realFetch } = globalThis;
  const names = ["log-search-place", "log-output", "log-follow", "log-more", "log-copy", "log-download", "log-text", "log-problem", "log-where", "log-hits"];
  let asked, log, stream;
  const settled = () => new Promise((resolve) => setImmediate(resolve));
  beforeEach(async () => {
    const made = newDocument();
    for (const name of names) made.add(name);
    made.add("log-lines").querySelectorAll = () => [];
    globalThis.requestAnimationFrame = (task) => task();
    globalThis.EventSource = class {
      constructor() {
        stream = this;
      }

      close() {}
    };
    asked = [];
    globalThis.fetch = (target) => new Promise((resolve) => asked.push((part) => resolve(new Response(JSON.stringify({ node: "n", attempt: 0, ...part })), target)));
    log = new Log("runs/r", 0);
    log.open();
    asked.pop()({ text: "c\nd\n", offset: 4, next: 8, size: 8 });
    await settled();
    await settled();
  });
  afterEach(() => {
    log.close();
    globalThis.fetch = realFetch;
  });
  const more = () => document.getElementById("log-more");

  test("loads earlier lines once, however often they are asked for", async () => {
    more().dispatch("click");
    more().dispatch("click");
    assert.equal(asked.length, 1);
    assert.ok(more().disabled);
    asked.pop()({ text: "a\nb\n", offset: 0 });
    await settled();
    await settled();
    assert.deepEqual(log.lines.all, ["a", "b", "c", "d"]);
  });
  test("leaves out earlier lines that no longer fit", async () => {
    more().dispatch("click");
    const many = Array.from({ length: 20_001 }, (_, at) => `${at}\n`).join("");
    stream.onmessage({ data: JSON.stringify({ type: "text", text: many, offset: 8, attempt: 0 }) });
    asked.pop()({ text: "a\nb\n", offset: 0 });
    await settled();
    await settled();
    assert.equal(log.lines.all[0], "1");
    assert.equal(log.lines.first.offset, 10);
  });
});
