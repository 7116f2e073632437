// Choosing another policy: preset, parameters, confirmation, and what came of it.
import { get, post } from "./api.js";
import { byId, make, text } from "./dom.js";
import { mean, moment, seconds } from "./format.js";
import { ENDED } from "./summary.js";

const NUMBERS = "[\\d\\s,.e+]*"; // as an input's pattern; the server tells what else is wrong

export class PolicyPanel {
  constructor(run, data, effects) {
    this.id = run;
    this.data = data;
    this.effects = effects;
    this.run = null;
    this.presets = [];
    this.problem = "";
    byId("policy-select").addEventListener("change", () => this.#chosen());
    byId("policy-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (byId("policy-form").reportValidity()) this.#ask();
    });
    byId("policy-confirm").addEventListener("click", () => this.#apply());
  }

  async load() {
    this.presets = await get("policies");
    const select = byId("policy-select");
    select.replaceChildren(...this.presets.map((preset) => make("option", { value: preset.name }, preset.name)));
    if (this.run) this.#select(this.run.policy);
  }

  /** Takes the run's newest state. */
  update(run) {
    const first = this.run === null;
    this.run = run;
    if (first && this.presets.length) this.#select(run.policy);
    const ended = ENDED.includes(run.state);
    byId("policy-apply").disabled = ended || !this.presets.length;
    byId("policy-apply").title = ended ? `The run has ${run.state === "finished" ? "finished" : "ended"}` : "";
  }

  /** The newest switch in words, the earlier ones below it. */
  draw() {
    const [newest, ...earlier] = this.data.switches.filter((change) => change.version > 0).reverse();
    const status = byId("switch-status");
    status.classList.toggle("problem", this.problem !== "");
    text("switch-status", this.problem || (newest ? this.#words(newest) : "No switch yet."));
    const history = earlier.map((change) => this.#words(change));
    const list = byId("switch-history");
    if (list.dataset.shown === JSON.stringify(history)) return;
    list.dataset.shown = JSON.stringify(history);
    list.replaceChildren(...history.map((words) => make("li", {}, words)));
  }

  #select(name) {
    byId("policy-select").value = name;
    this.#chosen();
  }

  get #preset() {
    return this.presets.find((preset) => preset.name === byId("policy-select").value);
  }

  /** Parameters in force, where the chosen preset is the run's. */
  get #current() {
    const last = this.data.switches.at(-1);
    return last && last.policy === this.#preset?.name ? last.parameters : {};
  }

  #chosen() {
    const preset = this.#preset;
    text("policy-summary", preset ? [preset.summary, preset.source].filter(Boolean).join(" – ") : "");
    const fields = Object.entries(preset?.parameters ?? {}).map(([name, schema]) =>
      fieldOf(name, schema, this.#current[name] ?? schema.default),
    );
    byId("policy-parameters").replaceChildren(...fields);
  }

  #parameters() {
    const schemas = this.#preset.parameters ?? {};
    return Object.fromEntries(Object.keys(schemas).map((name) => [name, valueOf(name, schemas[name])]));
  }

  #ask() {
    const { policy } = this.run;
    const name = this.#preset.name;
    text("switch-dialog-title", name === policy ? `Restart ${name} with these parameters?` : `Switch from ${policy} to ${name}?`);
    const recent = this.data.rowsBetween(this.data.latest - 19, this.data.latest);
    const step = mean(recent.map((row) => row.step_s));
    const steps = this.data.segment?.steps ?? 4;
    const when = this.run.controller?.alive
      ? `It takes effect when the running plan segment ends: within about ${steps} steps${step === null ? "" : ` (${seconds(steps * step)})`}.`
      : "No controller plans this run now: the switch waits until one does.";
    const parameters = Object.entries(this.#parameters()).map(([key, value]) => make("li", {}, `${key} = ${JSON.stringify(value)}`));
    byId("switch-dialog-text").replaceChildren(
      make("p", {}, when),
      make("p", {}, "Training does not stop. Each sample is still used exactly once per epoch, and the global batch stays the same. You can switch back at any time."),
      ...(parameters.length ? [make("p", {}, "Parameters:"), make("ul", {}, ...parameters)] : []),
    );
    byId("switch-dialog").showModal();
  }

  async #apply() {
    const button = byId("policy-confirm");
    button.disabled = true; // a double click must not switch twice
    try {
      const body = { policy: this.#preset.name, parameters: this.#parameters(), by: "dashboard" };
      this.data.addSwitch(await post(`runs/${encodeURIComponent(this.id)}/policy`, body));
      this.problem = "";
    } catch (error) {
      if (error.status === undefined) throw error;
      this.problem = error.message;
    } finally {
      button.disabled = false;
      byId("switch-dialog").close();
      this.draw();
    }
  }

  #words(change) {
    const asked = `${change.policy}: requested ${moment(change.requested_at)} by ${change.requested_by}`;
    if (change.effective_step === null || change.effective_step === undefined) {
      const newer = this.data.switches.some((other) => other.version > change.version);
      if (newer) return `${asked} → superseded before it took effect.`;
      if (ENDED.includes(this.run?.state)) return `${asked} → the run ended before.`;
      return `${asked} → takes effect with the next segment…`;
    }
    const after = Math.max(0, change.effective_at - change.requested_at);
    const effect = this.effects.words(change);
    return `${asked} → took effect at step ${change.effective_step} (after ${seconds(after)}).${effect ? ` ${effect}.` : ""}`;
  }
}

const inputId = (name) => `policy-parameter-${name}`;

/** A labelled control for one JSON-Schema property. */
function fieldOf(name, schema, value) {
  const id = inputId(name);
  const help = schema.description ? [make("div", { className: "muted small", id: `${id}-help` }, schema.description)] : [];
  const label = make("label", { for: id }, schema.title ?? name);
  const control = controlOf(schema, value);
  control.id = id;
  if (help.length) control.setAttribute("aria-describedby", `${id}-help`);
  return make("div", { className: "field" }, label, control, ...help);
}

function controlOf(schema, value) {
  if (schema.enum) {
    const select = make("select", {}, ...schema.enum.map((entry) => make("option", { value: JSON.stringify(entry) }, String(entry))));
    select.value = JSON.stringify(value);
    return select;
  }
  if (schema.type === "boolean") return make("input", { type: "checkbox", checked: Boolean(value) });
  if (schema.type === "integer" || schema.type === "number") {
    const input = make("input", { type: "number", required: true, step: schema.type === "integer" ? "1" : "any" });
    if (schema.minimum !== undefined) input.min = schema.minimum;
    if (schema.maximum !== undefined) input.max = schema.maximum;
    input.value = value;
    return input;
  }
  if (schema.type === "array") {
    const title = "Numbers with commas between them";
    return make("input", { type: "text", value: value.join(", "), placeholder: "4, 4, 2", pattern: NUMBERS, title });
  }
  return make("input", { type: "text", value: value ?? "" });
}

function valueOf(name, schema) {
  const control = byId(inputId(name));
  if (schema.enum) return JSON.parse(control.value);
  if (schema.type === "boolean") return control.checked;
  if (schema.type === "integer" || schema.type === "number") return Number(control.value);
  if (schema.type === "array") return (control.value.match(/[^\s,]+/g) ?? []).map(Number);
  return control.value;
}
