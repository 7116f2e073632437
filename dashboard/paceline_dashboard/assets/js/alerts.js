// The page of alerts: the list, the rules, and the webhooks.
import { RuleRow } from "./alertrule.js";
import { BASE, get, send } from "./api.js";
import { showCounts } from "./bell.js";
import { byId, connection, crumbs, make, poll, problem, show, text, whenThere } from "./dom.js";
import { integer, moment, number, plural, seconds } from "./format.js";
import { KeyedRows } from "./keyedrows.js";
import { OPERATOR } from "./resuming.js";

const PERIOD_S = 5;
const PAGE = 50;
const DOTS = /** @type {Record<string, string>} */ ({ critical: "bad", warning: "warn", info: "" });

/** Opens the page; returns a function that closes it. */
export function openAlerts() {
  const page = new AlertsPage();
  page.open();
  return () => page.close();
}

class AlertsPage {
  constructor() {
    this.closed = false;
    this.pages = 1;
    this.end = () => {};
    /** @type {any} */
    this.me = null; // who looks; null: not yet known
    this.hasRules = false; // rules and webhooks are shown
    /** @type {KeyedRows | null} */
    this.rows = null;
    /** @type {() => Promise<void>} */
    this.confirmed = async () => {}; // what the open dialog is for
  }

  async open() {
    crumbs("", "Alerts");
    connection("connecting");
    await whenThere("webhook-form");
    if (this.closed) return;
    addInputs();
    byId("alerts-state").addEventListener("change", () => {
      this.pages = 1;
      this.refresh();
    });
    byId("alerts-more").addEventListener("click", () => {
      this.pages += 1;
      this.refresh();
    });
    byId("webhook-form").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      this.#tried(() => this.#addWebhook());
    });
    for (const name of ["acknowledge", "webhook"]) byId(`${name}-confirm`).addEventListener("click", () => this.#confirm(name));
    this.end = poll(() => this.refresh(), PERIOD_S);
  }

  close() {
    this.closed = true;
    this.end();
  }

  refresh() {
    return this.#tried(async () => {
      if (!this.me) await this.#askWho();
      const state = byId("alerts-state").value;
      /** @type {any[]} */
      const items = [];
      let answer = null;
      for (let page = 0; page < this.pages; page++) {
        answer = await get("alerts", { state, limit: PAGE, cursor: answer?.next_cursor });
        items.push(...answer.items);
        if (answer.next_cursor === null) break;
      }
      if (this.closed || !byId("alerts-list")) return;
      connection("live");
      problem("alerts-problem", "");
      showCounts(answer.counts);
      const { raised, unacknowledged } = answer.counts;
      text("alerts-summary", raised ? `${plural(raised, "active alert")}, ${integer(unacknowledged)} of them new` : "nothing is wrong");
      this.#show(items, state);
      show("alerts-more", answer.next_cursor !== null);
      if (this.hasRules) return;
      await Promise.all([this.#rules(), this.#webhooks()]);
      this.hasRules = true;
    });
  }

  /**
   * @param {any[]} items
   * @param {string} state
   */
  #show(items, state) {
    text("alerts-none", state === "raised" ? "No active alerts." : "No alerts yet.");
    show("alerts-none", items.length === 0);
    if (!this.rows) {
      const head = ["Raised", "Severity", "Rule", "About", "What", "State", "Looked after by"];
      const made = table(head, []);
      byId("alerts-list").replaceChildren(made);
      this.rows = new KeyedRows(made.querySelector("tbody"));
    }
    show("alerts-list", items.length > 0);
    this.rows.show(items.map((alert) => ({ id: String(alert.id), cells: this.#cells(alert) })));
  }

  /**
   * @param {any} alert
   * @returns {import("./keyedrows.js").Cell[]}
   */
  #cells(alert) {
    const link = () => make("a", { href: new URL(`runs/${encodeURIComponent(alert.run)}`, BASE).pathname }, alert.run);
    const dot = () => make("span", { className: `dot ${alert.state === "raised" ? DOTS[alert.severity] : "ok"}` });
    return [
      { key: moment(alert.raised_at) },
      { key: `${alert.severity} ${alert.state}`, node: () => make("span", {}, dot(), ` ${alert.severity}`) },
      { key: alert.rule },
      alert.run ? { key: alert.run, node: link } : { key: "the control plane" },
      { key: alert.words, words: true },
      { key: alert.state === "raised" ? "active" : `resolved ${moment(alert.resolved_at)}` },
      this.#acknowledgement(alert),
    ];
  }

  /**
   * @param {any} alert
   * @returns {import("./keyedrows.js").Cell}
   */
  #acknowledgement(alert) {
    const { acknowledged_by: by, acknowledged_why: why } = alert;
    if (by) return { key: why ? `${by}: ${why}` : by };
    if (alert.state !== "raised" || this.me.scope === "viewer") return { key: "nobody" };
    return { key: "button", node: () => this.#acknowledgeButton(alert) };
  }

  /** @param {any} alert */
  #acknowledgeButton(alert) {
    const about = `${alert.rule} of ${alert.run || "the control plane"}`;
    const button = make("button", { type: "button", className: "smaller", "aria-label": `Acknowledge ${about}` }, "Acknowledge");
    button.addEventListener("click", () => {
      text("acknowledge-about", `${about}: ${alert.words}`);
      byId("acknowledge-why").value = "";
      byId("acknowledge-operator").value = localStorage.getItem(OPERATOR) ?? "";
      this.#ask("acknowledge", async () => {
        await send("POST", `alerts/${alert.id}/acknowledge`, { ...this.#who("acknowledge-operator"), why: byId("acknowledge-why").value });
        await this.refresh();
      });
    });
    return button;
  }

  /** Asks who looks, and says what the role does not allow. */
  async #askWho() {
    this.me = await get("me");
    if (this.closed || !byId("alerts-rights")) return;
    const { name, scope, shared } = this.me;
    show("acknowledge-operator-field", Boolean(shared));
    show("rules-operator-field", Boolean(shared) && scope === "admin");
    byId("rules-operator").value = localStorage.getItem(OPERATOR) ?? "";
    const may = scope === "viewer" ? "may look, and change nothing here" : "may acknowledge alerts, and not change rules or webhooks";
    text("alerts-rights", scope === "admin" ? "" : `${name} ${may}: the role is ${scope}.`);
    show("alerts-rights", scope !== "admin");
  }

  /**
   * What a change says about who asks.
   * @param {string} field for the name of one of those who share the token
   */
  #who(field) {
    const operator = this.me.shared ? byId(field).value.trim() : "";
    if (operator) localStorage.setItem(OPERATOR, operator);
    return { by: "dashboard", ...(operator ? { operator } : {}) };
  }

  /**
   * Opens a dialog; its button does the task.
   * @param {string} name
   * @param {() => Promise<void>} task
   */
  #ask(name, task) {
    problem(`${name}-problem`, "");
    this.confirmed = task;
    byId(`${name}-dialog`).showModal();
  }

  /** @param {string} name of the open dialog */
  async #confirm(name) {
    byId(`${name}-confirm`).disabled = true; // a second click would be a second request
    try {
      await this.confirmed();
      byId(`${name}-dialog`)?.close();
    } catch (error) {
      if (error.status === undefined) throw error;
      problem(`${name}-problem`, error.message);
    } finally {
      if (byId(`${name}-confirm`)) byId(`${name}-confirm`).disabled = false;
    }
  }

  async #rules() {
    const rules = await get("alerts/rules");
    if (this.closed || !byId("alerts-rules")) return;
    const may = this.me.scope === "admin";
    const rows = rules.map((/** @type {any} */ rule) => new RuleRow(rule, may, (task) => this.#tried(task), () => this.#who("rules-operator")).cells);
    const head = ["Rule", "Holds when", "Threshold", "Raised after, s", "Resolved after, s", "Severity", "On", "Change"];
    byId("alerts-rules").replaceChildren(table(head, rows));
  }

  async #webhooks() {
    let hooks;
    try {
      hooks = await get("alerts/webhooks");
    } catch (error) {
      if (error.status !== 403) throw error;
      text("webhooks-note", "Only an admin sees who is told.");
      return;
    }
    if (this.closed || !byId("webhooks-list")) return;
    text("webhooks-note", "Told when an alert is raised and when it is resolved. The operator lists the hosts that are allowed: paceline server --webhook-to.");
    show("webhook-form", true);
    const rows = hooks.map((/** @type {any} */ hook) => {
      const said = make("span", { role: "status" }, newest(hook));
      const test = make("button", { type: "button", className: "smaller", "aria-label": `Test ${hook.name}` }, "Test");
      test.addEventListener("click", () => this.#tried(async () => {
        said.textContent = "sending…";
        const answer = await send("POST", `alerts/webhooks/${hook.id}/test`, {});
        said.textContent = answer.sent ? `the test was taken (${answer.status})` : `the test was not taken: ${answer.error}`;
      }));
      const remove = make("button", { type: "button", className: "smaller", "aria-label": `Delete ${hook.name}` }, "Delete");
      remove.addEventListener("click", () => {
        text("webhook-about", `${hook.name} (${hook.url}) is told of no alert any more. Its secret is lost.`);
        this.#ask("webhook", async () => {
          await send("DELETE", `alerts/webhooks/${hook.id}`);
          await this.#webhooks();
        });
      });
      return [hook.name, hook.url, `${hook.severity} and above`, said, make("span", {}, test, " ", remove)];
    });
    const head = ["Name", "URL", "Told of", "Newest delivery", "Do"];
    byId("webhooks-list").replaceChildren(...(hooks.length ? [table(head, rows)] : []));
  }

  async #addWebhook() {
    const body = { name: byId("webhook-name").value, url: byId("webhook-url").value, severity: byId("webhook-severity").value };
    const made = await send("POST", "alerts/webhooks", body);
    text("webhook-secret", `The secret of ${made.name}, shown only now: ${made.secret}`);
    show("webhook-secret", true);
    byId("webhook-form").reset();
    await this.#webhooks();
  }

  /** @param {() => Promise<void>} task */
  async #tried(task) {
    try {
      await task();
    } catch (error) {
      if (error.status === undefined) throw error;
      if (this.closed) return;
      if (error.status === 0) connection("lost");
      else problem("alerts-problem", error.message);
    }
  }
}

/** Dash has no text input of HTML's own. */
function addInputs() {
  for (const [id, type] of [["webhook-name", "text"], ["webhook-url", "url"]]) {
    if (!byId(id)) byId(`${id}-slot`).replaceWith(make("input", { id, type, required: true }));
  }
}

/** @param {any} hook */
function newest(hook) {
  if (hook.tries === null) return "none yet";
  if (hook.sent_at !== null) return `taken ${moment(hook.sent_at)}`;
  const again = hook.due_at === null ? "given up" : `again in ${seconds(Math.max(0, hook.due_at - Date.now() / 1000))}`;
  return hook.tries ? `${hook.error}; ${number(hook.tries)} tries, ${again}` : "on its way";
}

/**
 * @param {string[]} head
 * @param {any[][]} rows cells: texts, elements, or {words} for a long text
 */
function table(head, rows) {
  const cell = (/** @type {any} */ value) => (value?.words !== undefined ? make("td", { className: "words" }, value.words) : make("td", {}, value));
  const line = (/** @type {any[]} */ [first, ...others]) => make("tr", {}, make("th", { scope: "row" }, first), ...others.map(cell));
  const names = make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)));
  const parts = [make("thead", {}, names), make("tbody", {}, ...rows.map(line))];
  return make("div", { className: "scroll" }, make("table", { className: "alerts-table" }, ...parts));
}
