// The page that starts a run, on any backend. Its address may name a run whose fields it takes: `?from=RUN`.
import { get, send } from "./api.js";
import { byId, connection, crumbs, go, make, problem, show, text, whenThere } from "./dom.js";
import { integer, plural } from "./format.js";
import { OptionFields } from "./optionfields.js";
import { environmentOf } from "./resuming.js";

const NUMBERS = ["nproc", "nodes_min", "nodes_max", "spares", "max_restarts", "restart_hung_s"];
const LOCAL = "local";
const RETRY_MS = 2000;

/** Opens the page; returns a function that closes it. */
export function openLaunch() {
  const page = new LaunchPage();
  page.open();
  return () => page.close();
}

/**
 * The body of `POST runs`. What is empty is left out, and the server's default holds.
 * @param {Record<string, string | boolean>} typed by field
 * @param {Record<string, any>} options of the backend
 * @param {Record<string, any>} like what a run was started with of which the fields are; {} for none
 */
export function bodyOf(typed, options, like = {}) {
  /** @type {Record<string, any>} */
  const body = {};
  if (like.join_check !== undefined) body.join_check = like.join_check;
  if (like.parameters && like.policy === typed.policy) body.parameters = like.parameters;
  for (const [name, value] of Object.entries(typed)) {
    if (typeof value === "boolean") body[name] = value;
    else if (value.trim() === "") continue;
    else if (name === "args") body.args = value === like.args?.join("\n") ? like.args : value.split("\n").filter((line) => line.trim() !== "");
    else if (name === "env") body.env = environmentOf(value);
    else body[name] = NUMBERS.includes(name) ? Number(value) : value.trim();
  }
  if (body.backend !== LOCAL) delete body.node;
  if (Object.keys(options).length) body.backend_options = options;
  return body;
}

/**
 * What the run of the address was started with: a policy that came later is not taken. {}: the address names none;
 * null: there is no such run.
 * @returns {Promise<Record<string, any> | null>}
 */
async function likeness() {
  const from = new URLSearchParams(location.search).get("from");
  if (!from) return {};
  const path = `runs/${encodeURIComponent(from)}`;
  try {
    const [run, switches] = await Promise.all([get(path), get(`${path}/switches`)]);
    const first = switches.find((/** @type {Switch} */ { version }) => version === 0);
    return { ...run, policy: first?.policy ?? run.policy, parameters: first?.parameters ?? {} };
  } catch (error) {
    if (error.status === 404) return null;
    throw error;
  }
}

/**
 * What starts, in a sentence.
 * @param {Record<string, any>} body
 */
export function summaryOf({ nproc = 0, nodes_min: least = 1, nodes_max: most = 1, backend = LOCAL, policy = "paceline" }) {
  const nodes = least === most ? plural(most, "node") : `${integer(least)} to ${integer(most)} nodes`;
  const ranks = least === most ? plural(nproc * most, "rank") : `${integer(nproc * least)} to ${integer(nproc * most)} ranks`;
  return `${ranks} on ${nodes} (${backend}), policy ${policy}`;
}

class LaunchPage {
  constructor() {
    this.closed = false;
    /** @type {Record<string, any>} */
    this.controls = {};
    /** @type {OptionFields} */
    this.options = new OptionFields({}, {});
    /** @type {any[]} */
    this.backends = [];
    /** @type {Record<string, any>} */
    this.like = {}; // what the run of the address was started with
  }

  async open() {
    crumbs("New run");
    connection("connecting");
    await whenThere("launch-form");
    byId("launch-form").addEventListener("input", () => this.#tell());
    byId("launch-form").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      this.#start();
    });
    while (!this.closed && !(await this.#filled())) await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }

  /** Fills the form; false: the server did not answer. */
  async #filled() {
    try {
      await this.#fill();
      return true;
    } catch (error) {
      if (error.status === undefined) throw error;
      if (error.status === 0) connection("lost");
      problem("launch-problem", error.message);
      return false;
    }
  }

  close() {
    this.closed = true;
  }

  async #fill() {
    const [me, backends, policies, nodes, like] = await Promise.all([get("me"), get("backends"), get("policies"), get("nodes"), likeness()]);
    if (this.closed) return;
    connection("live");
    problem("launch-problem", like ? "" : "The run of the address is not there any more. The fields have their defaults.");
    this.like = like ?? {};
    this.backends = backends.filter((/** @type {any} */ { name }) => name !== "simulated"); // it has no processes
    const may = ["operator", "admin"].includes(me.scope);
    show("launch-rights", !may);
    text("launch-rights", may ? "" : `${me.name} may look, and start no run: the role is ${me.scope}. An admin can make a token with the role operator.`);
    this.#make(this.like, policies, nodes);
    byId("launch-start").disabled = !may;
    this.#tell();
  }

  /**
   * @param {any} run whose fields are taken; {} for none
   * @param {PresetInfo[]} policies
   * @param {any[]} nodes
   */
  #make(run, policies, nodes) {
    const line = (/** @type {string} */ value = "") => make("textarea", { rows: 1, spellcheck: false, value });
    const lines = (/** @type {string} */ value = "") => make("textarea", { rows: 3, spellcheck: false, value });
    const count = (/** @type {number | null | undefined} */ value, /** @type {number} */ min) => make("input", { type: "number", min: String(min), step: "1", value: value ?? "" });
    const choice = (/** @type {[string, string, boolean?][]} */ all, /** @type {string} */ chosen) => {
      const select = make("select", {}, ...all.map(([value, words, disabled]) => make("option", { value, disabled: Boolean(disabled) }, words)));
      select.value = chosen;
      return select;
    };
    const backend = choice(
      this.backends.map(({ name, reachable, problem: why }) => [name, reachable ? name : `${name}: ${why ?? "cannot be reached"}`, !reachable]),
      run.backend ?? LOCAL,
    );
    const alive = nodes.filter(({ alive }) => alive).map(({ id }) => /** @type {[string, string]} */ ([id, id]));
    const node = choice([["", "the least busy one"], ...alive], "");
    const policy = choice(policies.map(({ name }) => [name, name]), run.policy ?? "paceline");
    byId("launch-what").replaceChildren(
      this.#field("script", "Script", line(run.script), "Its path on the node: absolute, or from the working directory."),
      this.#field("args", "Arguments", lines((run.args ?? []).join("\n")), "A line each."),
      this.#field("cwd", "Working directory", line(run.cwd ?? ""), ""),
      this.#field("env", "Environment", lines(), run.id ? `NAME=value, a line each. Those of ${run.name || run.id} are not stored: type what it needs.` : "NAME=value, a line each. Values are not stored."),
      this.#field("name", "Name", line(run.name), "Default: the script's."),
    );
    byId("launch-where").replaceChildren(
      this.#field("backend", "Backend", backend, ""),
      this.#field("node", "Node", node, ""),
      this.#field("nproc", "Ranks on each node", count(run.nproc ?? 2, 1), ""),
      this.#field("nodes_min", "Fewest nodes", count(run.nodes_min ?? 1, 1), ""),
      this.#field("nodes_max", "Most nodes", count(run.nodes_max ?? 1, 1), "Above 1 the run trains on several."),
      make("div", { id: "launch-options" }),
    );
    byId("launch-how").replaceChildren(
      this.#field("policy", "Policy", policy, ""),
      make("p", { id: "launch-policy", className: "muted small" }),
      this.#field("max_restarts", "Restarts at most", count(run.max_restarts ?? 0, 0), "After a rank has failed."),
      this.#field("restart_hung_s", "Start again when hung for, s", count(run.restart_hung_s, 10), "Empty: a hung run is left alone."),
      this.#field("spares", "Idle nodes held back", count(run.spares ?? 0, 0), ""),
      this.#field("replace_slow_nodes", "A slow node makes way for a spare", make("input", { type: "checkbox", checked: Boolean(run.replace_slow_nodes) }), ""),
    );
    const described = () => text("launch-policy", policies.find(({ name }) => name === policy.value)?.summary ?? "");
    const asked = () => {
      const chosen = this.backends.find(({ name }) => name === backend.value);
      this.options = new OptionFields(chosen?.options ?? {}, run.backend === backend.value ? (run.backend_options ?? {}) : {});
      byId("launch-options").replaceChildren(...this.options.elements);
      show("launch-node-field", backend.value === LOCAL);
    };
    policy.addEventListener("change", described);
    backend.addEventListener("change", asked);
    described();
    asked();
  }

  /**
   * @param {string} name
   * @param {string} label
   * @param {any} control
   * @param {string} help
   */
  #field(name, label, control, help) {
    const id = `launch-${name.replaceAll("_", "-")}-input`;
    control.id = id;
    control.setAttribute("aria-describedby", `${id}-help`);
    this.controls[name] = control;
    return make("div", { className: "field", id: `launch-${name.replaceAll("_", "-")}-field` }, make("label", { for: id }, label), control,
      make("div", { className: "muted small", id: `${id}-help` }, help));
  }

  /** What the fields ask for. Throws an Error that names the field. */
  #body() {
    const typed = Object.entries(this.controls).map(([name, control]) => [name, control.type === "checkbox" ? control.checked : control.value]);
    return bodyOf(Object.fromEntries(typed), this.options.values, this.like);
  }

  #tell() {
    try {
      text("launch-summary", summaryOf(this.#body()));
    } catch {
      text("launch-summary", ""); // a field is half typed
    }
  }

  async #start() {
    let body;
    try {
      body = this.#body();
    } catch (error) {
      problem("launch-problem", error.message);
      return;
    }
    problem("launch-problem", "");
    byId("launch-start").disabled = true; // a second click would start a second run
    try {
      const run = await send("POST", "runs", body);
      go(`runs/${run.id}`);
    } catch (error) {
      if (error.status === undefined) throw error;
      this.#refused(error);
      byId("launch-start").disabled = false;
    }
  }

  /** @param {any} error */
  #refused(error) {
    problem("launch-problem", error.status === 0 ? `${error.message} The run may have started all the same: look at the list of runs.` : error.message);
    const name = (error.fields[0]?.field ?? "").split(".").at(-1);
    const control = this.controls[name] ?? this.options.controls[name];
    control?.setAttribute("aria-invalid", "true");
    control?.focus();
    control?.addEventListener("input", () => control.removeAttribute("aria-invalid"), { once: true });
  }
}
