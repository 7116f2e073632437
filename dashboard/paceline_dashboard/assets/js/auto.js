// The panel of `auto`: whether Paceline may choose the policy, and its last decision.
import { change, get } from "./api.js";
import { overtakenWords } from "./changes.js";
import { byId, make, problem, show, text } from "./dom.js";
import { moment } from "./format.js";
import { ENDED, observed } from "./summary.js";

/** @type {Record<string, (last: NonNullable<AutoState["last"]>) => string>} */
const DECIDED = {
  stay: () => "stays",
  wait: () => "waits",
  recommend: (last) => `recommends ${last.policy}`,
  switch: (last) => `switched to ${last.policy}`,
  back: (last) => `went back to ${last.policy}`,
};

export class Auto {
  /**
   * @param {string} path
   * @param {OpenSwitchDialog} openDialog
   * @param {() => Promise<void>} changed called after a choice: takes the run's new revision
   */
  constructor(path, openDialog, changed) {
    this.changed = changed;
    this.path = `${path}/auto`;
    this.busy = false;
    this.changes = 0; // number of changes by the operator
    /** @type {any} */
    this.answer = null; // the newest answer
    this.mode = byId("auto-mode");
    this.relaxed = make("input", { type: "checkbox", id: "auto-relaxed", disabled: true, "aria-describedby": "auto-relaxed-help" });
    byId("auto-relaxed-label").prepend(this.relaxed);
    for (const control of [this.mode, this.relaxed]) control.addEventListener("change", () => this.#set());
    byId("auto-accept").addEventListener("click", () => openDialog(this.answer.last.policy, this.answer.last.parameters));
  }

  /**
   * Takes the run's newest state and asks for the last decision.
   * @param {Run} run
   */
  async refresh(run) {
    if (this.busy) return;
    const { changes } = this;
    const answer = await get(this.path);
    if (changes !== this.changes) return; // the operator has changed the choice since
    if (answer.revision < this.answer?.revision) return; // a later answer was faster
    this.#draw(answer);
    const ended = ENDED.includes(run.state);
    this.mode.disabled = this.relaxed.disabled = ended || observed(run);
    show("auto-accept", !ended && answer.last?.decided === "recommend" && answer.last.policy !== run.policy);
  }

  /**
   * Takes over the revision that the operator's own change has made, if nobody else changed the run since the last answer.
   * @param {number} revision
   */
  follow(revision) {
    if (this.answer?.revision === revision - 1) this.answer = { ...this.answer, revision };
  }

  /** Sends the choice. A choice made before the answer is sent after it, so that the last choice holds. */
  async #set() {
    this.changes += 1;
    if (this.busy) return;
    this.busy = true;
    try {
      let answer = this.answer;
      let sent;
      do {
        sent = this.changes;
        const body = { mode: this.mode.value, relaxed: this.relaxed.checked, by: "dashboard" };
        answer = await change("PUT", this.path, body, answer.revision);
      } while (sent !== this.changes);
      this.#draw(answer);
      problem("auto-problem", "");
    } catch (error) {
      if (error.status === undefined) throw error;
      await this.#refused(error);
    } finally {
      this.busy = false;
    }
    await this.changed(); // not earlier: a choice that is made meanwhile is sent at once
  }

  /**
   * Shows the choice in force, and why the operator's was not taken.
   * @param {import("./api.js").ApiError} error
   */
  async #refused(error) {
    const overtaken = error.status === 412;
    this.#draw(overtaken ? await get(this.path).catch(() => this.answer) : this.answer);
    problem("auto-problem", overtaken ? `${overtakenWords(error)} Your choice was not taken: choose again.` : error.message);
  }

  /** @param {AutoState} answer */
  #draw(answer) {
    this.answer = answer;
    const { mode, relaxed, last } = answer;
    this.mode.value = mode;
    this.relaxed.checked = relaxed;
    if (last) text("auto-last", `${moment(last.at)}: ${DECIDED[last.decided](last)}. ${last.reason}`);
    else text("auto-last", mode === "off" ? "" : "No decision yet.");
    if (last) text("auto-accept", `Switch to ${last.policy}…`);
  }
}
