import assert from "node:assert/strict";
import { afterEach, beforeEach, describe, test } from "node:test";

import { ApiError, change } from "../../../dashboard/paceline_dashboard/assets/js/api.js";
import { Auto } from "../../../dashboard/paceline_dashboard/assets/js/auto.js";
import { Changes, changeWords, overtakenWords } from "../../../dashboard/paceline_dashboard/assets/js/changes.js";
import { newDocument } from "./dom.js";

const at = new Date().setHours(12, 3, 4, 0) / 1000; // today
const row = { at, who: "ada", via: "api", action: "run.policy", revision: 1, why: "", details: { policy: "chronica" } };
const overtaken = { detail: "changed", status: 412, who: "ada", at, action: "run.policy", revision: 7 };

describe("a change in words", () => {
  const cases = [
    [{}, "12:03:04: ada switched the policy to chronica."],
    [{ why: "rank 3 is slow", via: "cli" }, "12:03:04: ada switched the policy to chronica (cli): rank 3 is slow"],
    [{ action: "run.auto", details: { mode: "recommend" } }, "12:03:04: ada changed auto to recommend."],
    [{ action: "run.stop", details: { force: true } }, "12:03:04: ada stopped the run."],
    [{ action: "run.create" }, "12:03:04: ada created the run."],
    [{ action: "run.note", details: {} }, "12:03:04: ada wrote the run's note."],
    [{ action: "run.tag", details: { tag: "nightly" } }, "12:03:04: ada tagged the run."],
    [{ action: "run.untag", details: { tag: "nightly" } }, "12:03:04: ada took a tag from the run."],
    [{ action: "run.join", details: {} }, "12:03:04: ada let a node join the run."],
    [{ action: "run.leave", details: {} }, "12:03:04: ada let a node leave the run."],
    [{ action: "run.replace", details: {} }, "12:03:04: ada replaced a node of the run."],
    [{ action: "run.other", details: {} }, "12:03:04: ada did run.other."],
  ];
  for (const [fields, words] of cases) test(words, () => assert.equal(changeWords({ ...row, ...fields }), words));
});

describe("what the second operator is told", () => {
  test("who, what and when", () => {
    const error = new ApiError(412, "changed", overtaken);
    assert.equal(overtakenWords(error), "ada switched the policy at 12:03:04, since this was shown.");
  });
  test("a server that does not know who", () => {
    assert.equal(overtakenWords(new ApiError(412, "changed", {})), "The run was changed since this was shown.");
  });
});

describe("with a server", () => {
  const { fetch } = globalThis;
  let asked, answers, select, box;

  beforeEach(() => {
    const document = newDocument();
    for (const id of ["auto-relaxed-label", "auto-accept", "auto-last", "auto-problem", "changes", "changes-none"]) document.add(id);
    document.getElementById("auto-relaxed-label").prepend = (input) => (box = input);
    select = document.add("auto-mode", "select");
    asked = [];
    answers = [];
    globalThis.fetch = async (url, { method = "GET", headers = {}, body }) => {
      asked.push([method, headers["If-Match"] ?? null, body ? (JSON.parse(body).mode ?? null) : null]);
      const answer = answers.shift();
      const { status = 200 } = answer;
      return { ok: status < 400, status, headers: new Headers({ "Content-Type": "application/json" }), json: async () => answer };
    };
  });
  afterEach(() => {
    globalThis.fetch = fetch;
  });
  const settled = async () => {
    for (let turn = 0; turn < 20; turn++) await new Promise((resolve) => setImmediate(resolve));
  };
  const state = (mode, revision) => ({ mode, relaxed: false, revision, last: null });

  test("a change carries the revision that was seen", async () => {
    answers.push({ done: true });
    assert.deepEqual(await change("POST", "runs/r/policy", {}, 3), { done: true });
    assert.deepEqual(asked, [["POST", '"3"', null]]);
  });

  test("a refusal carries the server's document", async () => {
    answers.push(overtaken);
    await assert.rejects(change("POST", "runs/r/policy", {}, 3), (error) => error.status === 412 && error.problem.revision === 7);
  });

  test("the list has a line for each change, and says if there is none", async () => {
    const list = new Changes("runs/r");
    answers.push({ items: [] }, { items: [row, row] });
    await list.refresh();
    assert.equal(document.getElementById("changes-none").hidden, false);
    await list.refresh();
    assert.equal(document.getElementById("changes").children.length, 2);
    assert.equal(document.getElementById("changes-none").hidden, true);
  });

  /** The panel of `auto`, as drawn at revision 4. */
  async function panel() {
    let changes = 0;
    const auto = new Auto("runs/r", () => {}, async () => void (changes += 1));
    answers.push(state("off", 4));
    await auto.refresh({ state: "running", policy: "bsp" });
    asked.length = 0;
    return () => changes;
  }

  test("auto has no say over an observed run", async () => {
    await panel();
    const mode = document.getElementById("auto-mode");
    assert.equal(mode.disabled, false);
    const auto = new Auto("runs/r", () => {}, async () => {});
    answers.push(state("off", 4));
    await auto.refresh({ state: "running", policy: "observed" });
    assert.equal(mode.disabled, true);
  });

  test("auto's panel sends the revision that it shows, then the answer's", async () => {
    const changes = await panel();
    answers.push(state("switch", 5), state("recommend", 6));
    select.value = "switch";
    select.dispatch("change");
    select.value = "recommend"; // before the first answer
    select.dispatch("change");
    await settled();
    assert.deepEqual(asked, [["PUT", '"4"', "switch"], ["PUT", '"5"', "recommend"]]);
    assert.equal(changes(), 1);
    assert.equal(box.checked, false);
  });

  test("a choice that is made while the page reads the run again is sent", async () => {
    const auto = new Auto("runs/r", () => {}, () => new Promise(() => {})); // it reads for ever
    answers.push(state("off", 4), state("switch", 5), state("recommend", 6));
    await auto.refresh({ state: "running", policy: "bsp" });
    asked.length = 0;
    for (const mode of ["switch", "recommend"]) {
      select.value = mode;
      select.dispatch("change");
      await settled();
    }
    assert.deepEqual(asked, [["PUT", '"4"', "switch"], ["PUT", '"5"', "recommend"]]);
  });

  test("auto's panel ignores an answer that a later one has overtaken", async () => {
    const auto = new Auto("runs/r", () => {}, async () => {});
    answers.push(state("switch", 4), state("off", 3));
    await auto.refresh({ state: "running", policy: "bsp" });
    await auto.refresh({ state: "running", policy: "bsp" });
    assert.equal(select.value, "switch");
  });

  test("auto's panel says who was faster, shows that choice, and takes the next", async () => {
    await panel();
    answers.push({ ...overtaken, action: "run.auto" }, state("recommend", 7), state("switch", 8));
    select.value = "switch";
    select.dispatch("change");
    await settled();
    const problem = document.getElementById("auto-problem");
    assert.equal(problem.textContent, "ada changed auto at 12:03:04, since this was shown. Your choice was not taken: choose again.");
    assert.equal(select.value, "recommend");
    select.value = "switch";
    select.dispatch("change");
    await settled();
    assert.deepEqual(asked, [["PUT", '"4"', "switch"], ["GET", null, null], ["PUT", '"7"', "switch"]]);
    assert.equal(problem.hidden, true);
  });
});
