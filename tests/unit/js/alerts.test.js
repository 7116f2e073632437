// The page of alerts: what is replaced of its list, and what is sent of a rule.
import assert from "node:assert/strict";
import { afterEach, beforeEach, describe, test } from "node:test";

import { openAlerts } from "../../../dashboard/paceline_dashboard/assets/js/alerts.js";
import { RuleRow } from "../../../dashboard/paceline_dashboard/assets/js/alertrule.js";
import { KeyedRows } from "../../../dashboard/paceline_dashboard/assets/js/keyedrows.js";
import { newDocument } from "./dom.js";

const { fetch: realFetch } = globalThis;
beforeEach(newDocument);
afterEach(() => {
  globalThis.fetch = realFetch;
});

test("a cell is made again only if it changed", () => {
  const body = document.add("body");
  const rows = new KeyedRows(body);
  let made = 0;
  const show = (key) => rows.show([{ id: "1", cells: [{ key }, { key: "button", node: () => `button ${++made}` }] }]);
  show("40 %");
  show("41 %");
  const [row] = body.children;
  assert.deepEqual([made, body.children.length, row.children[0].children], [1, 1, ["41 %"]]);
});

describe("a rule", () => {
  const RULE = { name: "run-waste", words: "ranks wait", unit: "share", threshold: 0.2, raise_after_s: 600, resolve_after_s: 300, severity: "warning", enabled: true, changed_by: null, revision: 7 };
  let tasks, sent, answers, row;
  beforeEach(() => {
    [tasks, sent, answers] = [[], [], []];
    globalThis.fetch = async (_, { headers, body }) => {
      sent.push([headers["If-Match"], JSON.parse(body)]);
      const [status, answer] = answers.shift();
      return new Response(JSON.stringify(answer), { status, headers: { "Content-Type": "application/json" } });
    };
    row = new RuleRow(RULE, true, (task) => tasks.push(task()), () => ({ by: "dashboard" }));
  });
  const save = async () => {
    row.save.dispatch("click");
    await Promise.all(tasks);
  };
  test("is sent with the fields that changed, and the revision that was seen", async () => {
    row.fields.threshold.value = "0.35";
    answers.push([200, { ...RULE, threshold: 0.35, revision: 8 }]);
    await save();
    assert.deepEqual(sent, [['"7"', { threshold: 0.35, by: "dashboard" }]]);
  });
  test("is not sent with an emptied field, which would be 0", async () => {
    row.fields.raise_after_s.value = "";
    row.fields.threshold.value = "0.35";
    await save();
    assert.deepEqual(sent, []);
    assert.match(row.problem.textContent, /^Raised after: give a number/);
  });
  test("is not sent where nothing changed", async () => {
    await save();
    assert.deepEqual(sent, []);
    assert.match(row.problem.textContent, /Nothing has been changed/);
  });
  test("that somebody else changed keeps that change; a second click goes on", async () => {
    row.fields.raise_after_s.value = "30";
    const theirs = { ...RULE, threshold: 0.6, revision: 9, changed_by: "bob" };
    answers.push([412, { detail: "…", who: "bob", at: 1, rule: theirs }], [200, { ...theirs, raise_after_s: 30, revision: 10 }]);
    await save();
    assert.match(row.problem.textContent, /^bob changed this rule/);
    assert.equal(row.fields.threshold.value, "0.6");
    await save();
    assert.deepEqual(sent[1], ['"9"', { raise_after_s: 30, by: "dashboard" }]);
  });
});

describe("the page", () => {
  const ALERT = { id: 1, state: "raised", severity: "warning", rule: "run-waste", run: "r", words: "Ranks wait.", raised_at: 1, acknowledged_by: null };
  const IDS = [
    ...["crumbs", "connection-status", "alerts-state", "alerts-more", "alerts-problem", "alerts-rights", "alerts-summary", "alerts-none", "alerts-list", "alerts-rules"],
    ...["webhook-form", "webhook-name", "webhook-url", "webhook-confirm", "webhooks-note", "webhooks-list", "rules-operator", "rules-operator-field"],
    ...["acknowledge-confirm", "acknowledge-dialog", "acknowledge-about", "acknowledge-why", "acknowledge-operator", "acknowledge-operator-field", "acknowledge-problem"],
  ];
  let me, sent, close;
  beforeEach(() => {
    [me, sent] = [null, []];
    for (const id of IDS) document.add(id).value = "";
    Object.assign(document.getElementById("acknowledge-dialog"), { showModal() {}, close() {} });
    globalThis.localStorage = { getItem: () => "ada", setItem() {} };
    const answers = {
      me: () => me,
      alerts: () => ({ items: [ALERT], counts: { raised: 1, unacknowledged: 1, critical: 0 }, next_cursor: null }),
      "alerts/rules": () => [],
      "alerts/webhooks": () => [],
      "alerts/1/acknowledge": () => ({}),
    };
    globalThis.fetch = async (url, { body }) => {
      if (body) sent.push(JSON.parse(body));
      const answer = answers[url.pathname.split("/api/v1/")[1]]();
      return new Response(JSON.stringify(answer ?? { detail: "busy" }), { status: answer ? 200 : 503, headers: { "Content-Type": "application/json" } });
    };
  });
  afterEach(() => {
    close();
    delete globalThis.localStorage;
  });
  const settled = () => new Promise((done) => setTimeout(done, 20));
  const again = async () => {
    document.dispatch("visibilitychange"); // as the next turn of the poll
    await settled();
  };
  const buttons = () => [...document.getElementById("alerts-list").all()].filter(({ tagName }) => tagName === "button");

  test("asks who looks until it is known, and offers nothing before", async () => {
    close = openAlerts();
    await settled();
    assert.deepEqual([buttons().length, document.getElementById("alerts-rules").children.length], [0, 0]);
    me = { name: "vera", scope: "viewer", shared: false };
    await again();
    assert.equal(buttons().length, 0);
    assert.match(document.getElementById("alerts-rights").textContent, /^vera may look/);
    assert.equal(document.getElementById("alerts-rules").children.length, 1);
  });
  test("sends the name that the field has, and none where it was cleared", async () => {
    me = { name: "configured", scope: "admin", shared: true };
    close = openAlerts();
    await settled();
    for (const name of ["bob", ""]) {
      buttons()[0].dispatch("click");
      assert.equal(document.getElementById("acknowledge-operator").value, "ada");
      document.getElementById("acknowledge-operator").value = name;
      document.getElementById("acknowledge-confirm").dispatch("click");
      await settled();
    }
    assert.deepEqual(sent, [{ by: "dashboard", operator: "bob", why: "" }, { by: "dashboard", why: "" }]);
  });
});
