// The dialog that asks before a node makes way for another one.
import { change } from "./api.js";
import { overtakenWords } from "./changes.js";
import { byId, problem, text } from "./dom.js";

export class Replacing {
  /**
   * @param {string} path of the run's REST
   * @param {() => number} revision of the run
   * @param {() => Promise<void>} changed called after a change
   */
  constructor(path, revision, changed) {
    this.path = path;
    this.revision = revision;
    this.changed = changed;
    this.node = "";
    this.seen = 0; // revision that the dialog was opened with
    byId("verdict-replace").addEventListener("click", () => this.#open(byId("verdict-replace").value));
    byId("replace-confirm").addEventListener("click", () => this.#replace());
  }

  /** @param {string} node */
  #open(node) {
    this.node = node;
    this.seen = this.revision();
    problem("replace-problem", "");
    byId("replace-why").value = "";
    text("replace-dialog-title", `Replace ${node}?`);
    text("replace-confirm", `Replace ${node}`);
    byId("replace-dialog").showModal();
  }

  async #replace() {
    const body = { cordon: byId("replace-cordon").checked, by: "dashboard", why: byId("replace-why").value };
    try {
      await change("POST", `${this.path}/nodes/${encodeURIComponent(this.node)}/replace`, body, this.seen);
      byId("replace-dialog").close();
    } catch (error) {
      if (error.status === undefined) throw error;
      const overtaken = error.status === 412;
      if (overtaken) this.seen = error.problem.revision; // the operator knows now
      problem("replace-problem", overtaken ? `${overtakenWords(error)} Confirm again to replace the node all the same.` : error.message);
      return;
    }
    await this.changed();
  }
}
