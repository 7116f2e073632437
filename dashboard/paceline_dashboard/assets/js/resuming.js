// Lets a run that failed or was stopped go on, and says who may not change a run.
import { change, get } from "./api.js";
import { overtakenWords } from "./changes.js";
import { byId, make, problem, show, text } from "./dom.js";

export const OPERATOR = "paceline.operator"; // the name that this browser's user gave last, as in switchdialog.js

/**
 * Lines of NAME=value as an object; an Error names the first line that is none.
 * @param {string} lines
 */
export function environmentOf(lines) {
  /** @type {Record<string, string>} */
  const env = {};
  for (const line of lines.split("\n").map((each) => each.trim()).filter(Boolean)) {
    const at = line.indexOf("=");
    if (at < 1) throw new Error(`Environment: "${line}" is not NAME=value.`);
    env[line.slice(0, at)] = line.slice(at + 1);
  }
  return env;
}

/** @type {["nproc", "nodes_min", "nodes_max"]} */
const SIZE = ["nproc", "nodes_min", "nodes_max"];

/**
 * What of a run's place and size is to change, as `POST runs/{run}/resume` takes it.
 * @param {Record<string, any>} run
 * @param {Record<string, any>} wanted
 */
export const elsewhere = (run, wanted) => Object.fromEntries(Object.entries(wanted).filter(([name, value]) => value !== run[name]));

/**
 * Whether a run can be asked to go on. A simulated run has no processes.
 * @param {{ state: string, backend: string }} run
 */
export const resumable = ({ state, backend }) => ["failed", "stopped"].includes(state) && backend !== "simulated";

export class Resuming {
  /**
   * @param {string} path of the run's REST
   * @param {() => any} run the newest state
   * @param {(run: any) => void} changed takes the run's state after a change
   */
  constructor(path, run, changed) {
    this.path = path;
    this.run = run;
    this.changed = changed;
    this.seen = 0; // revision that the dialog was opened with
    /** @type {any} */
    this.me = null;
    /** @type {Record<string, any>} */
    this.size = Object.fromEntries(SIZE.map((name) => [name, make("input", { type: "number", min: "1", step: "1", id: `resume-${name.replace("_", "-")}` })]));
    for (const input of Object.values(this.size)) byId(`${input.id}-slot`).replaceChildren(input);
    byId("resume-open").addEventListener("click", () => this.#open());
    byId("resume-confirm").addEventListener("click", () => this.#resume());
  }

  /** Asks who looks. The page of a viewer offers no change, and says why. */
  async askWho() {
    this.me = await get("me");
    const looks = this.me.scope === "viewer";
    byId("run-body").classList.toggle("only-looks", looks);
    show("run-rights", looks);
    if (looks) text("run-rights", `${this.me.name} may look, and not change runs: the role is viewer. An admin can make a token with the role operator.`);
  }

  async #open() {
    const run = this.run();
    for (const name of SIZE) this.size[name].value = String(run[name]);
    const place = byId("resume-backend");
    place.replaceChildren(make("option", { value: run.backend }, run.backend));
    this.seen = this.run().revision;
    problem("resume-problem", "");
    byId("resume-why").value = "";
    byId("resume-env").value = "";
    show("resume-env-field", false);
    show("resume-operator-field", Boolean(this.me?.shared));
    byId("resume-operator").value = localStorage.getItem(OPERATOR) ?? "";
    byId("resume-dialog").showModal();
    try {
      const others = (await get("backends")).filter((/** @type {any} */ { name }) => name !== "simulated" && name !== run.backend);
      const named = new Set([...place.options].map((/** @type {any} */ { value }) => value)); // the dialog may have been opened again
      const options = others.filter((/** @type {any} */ { name }) => !named.has(name)).map((/** @type {any} */ { name, reachable, problem: why }) =>
        make("option", { value: name, disabled: !reachable }, reachable ? `${name}, with its default options` : `${name}: ${why ?? "cannot be reached"}`));
      place.append(...options);
    } catch (error) {
      if (error.status === undefined) throw error;
      problem("resume-problem", `Other backends are not known: ${error.message}`);
    }
  }

  #body() {
    const operator = this.me?.shared ? byId("resume-operator").value.trim() : "";
    const env = environmentOf(byId("resume-env").value);
    const size = Object.fromEntries(SIZE.map((name) => [name, Number(this.size[name].value)]));
    const wanted = elsewhere(this.run(), { ...size, backend: byId("resume-backend").value });
    return { env, ...wanted, by: "dashboard", why: byId("resume-why").value, ...(operator ? { operator } : {}) };
  }

  async #resume() {
    let body;
    try {
      body = this.#body();
    } catch (error) {
      problem("resume-problem", error.message);
      return;
    }
    byId("resume-confirm").disabled = true; // a second click would be a second request
    try {
      const run = await change("POST", `${this.path}/resume`, body, this.seen);
      if (body.operator) localStorage.setItem(OPERATOR, body.operator);
      byId("resume-dialog").close();
      this.changed(run);
    } catch (error) {
      if (error.status === undefined) throw error;
      this.#refused(error);
    } finally {
      byId("resume-confirm").disabled = false;
    }
  }

  /** @param {any} error */
  #refused(error) {
    const overtaken = error.status === 412;
    if (overtaken) this.seen = error.problem.revision; // the operator knows now
    const fields = error.fields.map((/** @type {any} */ { field }) => field.split(".").at(-1));
    if (fields.some((/** @type {string} */ name) => name === "env")) show("resume-env-field", true); // a variable has no value
    fields.map((/** @type {string} */ name) => this.size[name]).find(Boolean)?.focus();
    problem("resume-problem", overtaken ? `${overtakenWords(error)} The run was not resumed. Confirm again to resume it all the same.` : error.message);
  }
}
