// The panel of `auto`: whether Paceline may choose the policy, and its last decision.
import { get, put } from "./api.js";
import { byId, make, problem, show, text } from "./dom.js";
import { moment } from "./format.js";
import { ENDED } from "./summary.js";

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
   */
  constructor(path, openDialog) {
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
    this.#draw(answer);
    const ended = ENDED.includes(run.state);
    this.mode.disabled = this.relaxed.disabled = ended;
    show("auto-accept", !ended && answer.last?.decided === "recommend" && answer.last.policy !== run.policy);
  }

  /** Sends the choice. A choice made before the answer is sent after it, so that the last choice holds. */
  async #set() {
    this.changes += 1;
    if (this.busy) return;
    this.busy = true;
    try {
      let answer, sent;
      do {
        sent = this.changes;
        answer = await put(this.path, { mode: this.mode.value, relaxed: this.relaxed.checked, by: "dashboard" });
      } while (sent !== this.changes);
      this.#draw(answer);
      problem("auto-problem", "");
    } catch (error) {
      if (error.status === undefined) throw error;
      this.#draw(this.answer); // the server refused the choice: show the one in force
      problem("auto-problem", error.message);
    } finally {
      this.busy = false;
    }
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
