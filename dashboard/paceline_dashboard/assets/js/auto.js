// Whether Paceline itself may choose the policy, and what it decided last.
import { get, put } from "./api.js";
import { byId, problem, show, text } from "./dom.js";
import { moment } from "./format.js";
import { ENDED } from "./summary.js";

const DECIDED = {
  stay: () => "stays",
  wait: () => "waits",
  recommend: (last) => `recommends ${last.policy}`,
  switch: (last) => `switched to ${last.policy}`,
  back: (last) => `went back to ${last.policy}`,
};

export class Auto {
  /** @param propose opens the dialog for (policy, parameters). */
  constructor(path, propose) {
    this.path = `${path}/auto`;
    this.busy = false;
    this.last = null;
    byId("auto-mode").addEventListener("change", () => this.#set());
    byId("auto-accept").addEventListener("click", () => propose(this.last.policy, this.last.parameters));
  }

  /** Takes the run's newest state, and asks what was decided. */
  async refresh(run) {
    const ended = ENDED.includes(run.state);
    byId("auto-mode").disabled = ended;
    if (this.busy) return;
    const found = await get(this.path);
    if (this.busy) return; // another mode was chosen meanwhile
    this.#draw(found);
    show("auto-accept", !ended && found.last?.decided === "recommend" && found.last.policy !== run.policy);
  }

  async #set() {
    this.busy = true;
    try {
      this.#draw(await put(this.path, { mode: byId("auto-mode").value, by: "dashboard" }));
      problem("auto-problem", "");
    } catch (error) {
      if (error.status === undefined) throw error;
      problem("auto-problem", error.message);
    } finally {
      this.busy = false;
    }
  }

  #draw({ mode, last }) {
    this.last = last;
    byId("auto-mode").value = mode;
    if (last) text("auto-last", `${moment(last.at)}: ${DECIDED[last.decided](last)}. ${last.reason}`);
    else text("auto-last", mode === "off" ? "" : "No decision yet.");
    if (last) text("auto-accept", `Switch to ${last.policy}…`);
  }
}
