// The dialog to switch the policy: preset, parameters, confirmation and result.
import { change, get } from "./api.js";
import { overtakenWords } from "./changes.js";
import { byId, make, problem, show, text } from "./dom.js";
import { blame, fieldOf, FieldError, valueOf } from "./fields.js";
import { mean, moment, seconds } from "./format.js";
import { ENDED, simulated } from "./summary.js";

// What the chosen preset changes in the training: `changes` of `GET policies`.
/** @type {Record<Changes, string>} */
const CHANGES = {
  nothing:
    "Training does not stop and stays the same: each global batch holds the samples that plain DDP would give it, and " +
    "each sample is used once per epoch. You can switch back at any time.",
  batches:
    "Training does not stop, but batches are composed differently: each sample is still used once per epoch and the " +
    "global batch keeps its size, but other samples meet in it than under plain DDP. Accuracy may differ. You can " +
    "switch back at any time; steps trained until then stay as they are.",
  training:
    "Training does not stop, but it changes: ranks do not wait for all others in each step, so gradients may be old or " +
    "dropped, and replicas may differ. Accuracy may differ. You can switch back at any time; steps trained until then " +
    "stay as they are.",
};
/** @type {string[]} */
const SEVERITY = Object.keys(CHANGES);
const WARNINGS_MS = 20_000; // a trial takes a part of a second, the first one seconds
const AT_PARAMETER = /^parameters\.(\w+): (.*)$/s; // the server's message about a wrong parameter

export class PolicyPanel {
  /**
   * @param {string} run
   * @param {import("./data.js").RunData} data
   * @param {import("./effect.js").Effects} effects
   * @param {() => Promise<void>} changed called after a switch: takes the run's new revision
   */
  constructor(run, data, effects, changed) {
    this.id = run;
    this.data = data;
    this.effects = effects;
    this.changed = changed;
    this.asked = 0; // how often warnings were asked for: only the newest answer counts
    this.seen = 0; // revision of the run that the dialog was opened with
    /** @type {any} */
    this.run = null; // the run's newest state
    /** @type {PresetInfo[]} */
    this.presets = [];
    byId("switch-open").addEventListener("click", () => this.openDialog());
    byId("policy-presets").addEventListener("change", () => this.#chosen({}));
    byId("policy-parameters").addEventListener("change", () => {
      this.#tellChanges();
      this.#tellWarnings();
    });
    byId("policy-parameters").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "Enter") return;
      event.preventDefault(); // otherwise Enter would press the form's first button, Cancel
      this.#requestSwitch();
    });
    byId("switch-confirm").addEventListener("click", () => this.#requestSwitch());
  }

  async load() {
    this.presets = await get("policies");
  }

  /**
   * Takes the run's newest state.
   * @param {Run} run
   */
  update(run) {
    this.run = run;
    const ended = ENDED.includes(run.state);
    byId("switch-open").disabled = ended || !this.presets.length;
    byId("switch-open").title = ended ? `The run has ${run.state === "finished" ? "finished" : "ended"}` : "";
  }

  /**
   * Opens the dialog with a chosen preset, by default the policy in force.
   * @param {string} policy
   * @param {Record<string, any>} parameters
   */
  openDialog(policy = this.run.policy, parameters = {}) {
    this.seen = this.run.revision;
    byId("switch-why").value = "";
    const options = this.presets.map((preset) => optionOf(preset, preset.name === this.run.policy));
    byId("policy-presets").replaceChildren(...options);
    byId("switch-dialog").showModal();
    const radio = byId(`policy-preset-${policy}`) ?? options[0].querySelector("input");
    radio.checked = true;
    radio.focus();
    radio.closest("label").scrollIntoView({ block: "nearest" });
    this.#chosen(parameters);
  }

  /** Draws the policy in force, the newest switch in words, and the earlier switches below. */
  draw() {
    const preset = this.presets.find((known) => known.name === this.run.policy);
    text("policy-current", this.run.policy);
    text("policy-summary", preset?.summary ?? "");
    const set = Object.entries(this.#inForce).filter(([name, value]) => !same(value, preset?.parameters[name]?.default));
    text("policy-changed", set.map(([name, value]) => `${name} = ${brief(value)}`).join(", "));
    show("policy-changed", set.length > 0);
    this.#explain();
    const [newest, ...earlier] = this.data.switches.filter((change) => change.version > 0).reverse();
    text("switch-status", newest ? this.#words(newest) : "No switch yet.");
    fill("switch-history", earlier.map((change) => this.#words(change)));
  }

  /** Draws why the policy in force chose its synchroniser, if it chooses one, and why ranks all-reduce in spite of it. */
  #explain() {
    const choices = this.data.choices.filter((choice) => choice.version === this.data.segment?.version);
    const [newest, ...earlier] = choices.reverse();
    text("policy-why", newest ? `Since step ${newest.step} ${newest.why}.` : "");
    fill("policy-choices", earlier.map((choice) => `From step ${choice.step} ${choice.began}.`));
    show("policy-why", newest !== undefined);
    show("policy-choices", earlier.length > 0);
    text("policy-fallback", fallbackWords(this.data.fallback));
    show("policy-fallback", this.data.fallback !== "");
  }

  /** @returns {PresetInfo} */
  get #preset() {
    const name = byId("policy-presets").querySelector("input:checked").value;
    return /** @type {PresetInfo} */ (this.presets.find((preset) => preset.name === name));
  }

  /** Ranks of the run. @returns {number} */
  get #world() {
    return this.run.world ?? this.run.nproc;
  }

  /**
   * Parameters of the policy in force.
   * @returns {Record<string, any>}
   */
  get #inForce() {
    return this.data.switches.at(-1)?.parameters ?? {};
  }

  /** @param {Record<string, any>} parameters */
  #chosen(parameters) {
    const preset = this.#preset;
    const again = preset.name === this.run.policy;
    const values = { ...(again ? this.#inForce : {}), ...parameters };
    const fields = Object.entries(preset.parameters).map(([name, schema]) => fieldOf(name, schema, values[name] ?? schema.default));
    text("policy-chosen", fields.length ? `Parameters of ${preset.name}` : `${preset.name} has no parameters`);
    byId("policy-parameters").replaceChildren(...fields);
    byId("policy-parameters").scrollTop = 0;
    text("switch-confirm", again ? `Restart ${preset.name} with these parameters` : `Switch to ${preset.name}`);
    text("switch-when", this.#when());
    this.#tellChanges();
    this.#tellWarnings();
    problem("switch-problem", "");
  }

  /** What the chosen preset changes in the training, with the parameters that its fields hold. */
  #tellChanges() {
    const preset = this.#preset;
    const choices = Object.keys(preset.changes_with).map((name) => [name, valueOf(name, preset.parameters[name], this.#world)]);
    text("switch-changes", CHANGES[changesOf(preset, Object.fromEntries(choices))]);
  }

  /** What to know before this switch, by what the run has measured. Without an answer nothing is shown. */
  async #tellWarnings() {
    const asked = ++this.asked;
    fill("switch-warnings", []);
    show("switch-warnings", false);
    try {
      const parameters = JSON.stringify(this.#values());
      const path = `runs/${encodeURIComponent(this.id)}/policy/warnings`;
      const { warnings } = await get(path, { policy: this.#preset.name, parameters }, WARNINGS_MS);
      if (asked !== this.asked || !byId("switch-warnings")) return;
      fill("switch-warnings", warnings);
      show("switch-warnings", warnings.length > 0);
    } catch (error) {
      // A value that is not legal yet, or a server of an earlier release: the confirmation says what is wrong.
      if (!(error instanceof FieldError) && error.status === undefined) throw error;
    }
  }

  #when() {
    if (!simulated(this.run) && !this.run.controller?.alive) return "No controller plans this run now: the switch waits until one does.";
    const recent = this.data.rowsBetween(this.data.latest - 19, this.data.latest);
    const step = mean(recent.map((row) => row.step_s));
    const steps = this.data.segment?.steps ?? 4;
    return `It takes effect when the running plan segment ends: within about ${steps} steps${step === null ? "" : ` (${seconds(steps * step)})`}.`;
  }

  /** The chosen preset's parameters; throws FieldError if a value is not legal. @returns {Record<string, any>} */
  #values() {
    const schemas = Object.entries(this.#preset.parameters);
    return Object.fromEntries(schemas.map(([name, schema]) => [name, valueOf(name, schema, this.#world)]));
  }

  /** The chosen preset's parameters, or null if a value is not legal; its field shows the message. */
  #parameters() {
    try {
      return this.#values();
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      blame(error.field, error.message);
      return null;
    }
  }

  /** Requests the switch that the dialog describes; closes the dialog if the server takes it. */
  async #requestSwitch() {
    const parameters = this.#parameters();
    const button = byId("switch-confirm");
    if (parameters === null || button.disabled) return;
    button.disabled = true; // a double click must not switch twice
    try {
      const body = { policy: this.#preset.name, parameters, by: "dashboard", why: byId("switch-why").value };
      const path = `runs/${encodeURIComponent(this.id)}/policy`;
      this.data.addSwitch(await change("POST", path, body, this.seen));
      await this.changed();
      byId("switch-dialog").close();
    } catch (error) {
      if (error.status === undefined) throw error;
      this.#refused(error);
    } finally {
      button.disabled = false;
    }
    this.draw();
  }

  /**
   * Shows the server's message at the field that it names, otherwise below all fields.
   * @param {import("./api.js").ApiError} error
   */
  #refused(error) {
    if (error.status === 412) {
      this.seen = error.problem.revision; // the operator knows now: the next confirmation goes ahead
      problem("switch-problem", `${overtakenWords(error)} Your switch was not made. Confirm again to make it all the same.`);
      return;
    }
    const [, name, words] = error.fields[0]?.message.match(AT_PARAMETER) ?? [];
    if (!name || !blame(name, `${name}: ${words}`)) problem("switch-problem", error.message);
  }

  /** @param {Switch} change */
  #words(change) {
    const asked = `${change.policy}: requested ${moment(change.requested_at)} by ${change.requested_by}`;
    if (change.effective_step === null || change.effective_step === undefined) {
      const newer = this.data.switches.some((other) => other.version > change.version);
      if (newer) return `${asked} → superseded before it took effect.`;
      if (ENDED.includes(this.run?.state)) return `${asked} → the run ended before.`;
      return `${asked} → takes effect with the next segment…`;
    }
    // A simulated run's own clock says nothing about how long an operator waited.
    const after = simulated(this.run) ? "" : ` (after ${seconds(Math.max(0, Number(change.effective_at) - change.requested_at))})`;
    const effect = this.effects.words(change);
    return `${asked} → took effect at step ${change.effective_step}${after}.${effect ? ` ${effect}` : ""}`;
  }
}

/**
 * What a preset changes in the training with these parameters: "nothing", "batches" or "training".
 * If several parameters change it, the gravest change counts.
 * @param {Pick<PresetInfo, "changes" | "changes_with">} preset
 * @param {Record<string, any>} parameters
 * @returns {Changes}
 */
export function changesOf({ changes, changes_with: changesWith }, parameters) {
  const values = Object.entries(changesWith).map(([name, byValue]) => byValue[String(parameters[name])]);
  const known = values.filter((value) => value !== undefined);
  return known.length ? known.reduce((gravest, next) => (SEVERITY.indexOf(next) > SEVERITY.indexOf(gravest) ? next : gravest)) : changes;
}

/**
 * The notice that ranks do not follow the policy's synchroniser.
 * @param {string} fallback
 */
export function fallbackWords(fallback) {
  return fallback && `Gradients are all-reduced, because ${fallback}.`;
}

/**
 * Puts lines into a list, if they have changed.
 * @param {string} id
 * @param {string[]} lines
 */
function fill(id, lines) {
  const list = byId(id);
  if (list.dataset.shown === JSON.stringify(lines)) return;
  list.dataset.shown = JSON.stringify(lines);
  list.replaceChildren(...lines.map((line) => make("li", {}, line)));
}

/**
 * @param {PresetInfo} preset
 * @param {boolean} inForce
 */
function optionOf(preset, inForce) {
  const id = `policy-preset-${preset.name}`;
  const mark = inForce ? [make("span", { className: "badge" }, "in force")] : [];
  return make(
    "label",
    { className: "preset", for: id },
    make("input", { type: "radio", name: "policy", id, value: preset.name, "aria-describedby": `${id}-about` }),
    make(
      "span",
      {},
      make("span", { className: "preset-name" }, preset.name, ...mark),
      make("span", { id: `${id}-about` }, preset.summary, make("span", { className: "muted" }, preset.source)),
    ),
  );
}

/** @type {(value: any, other: any) => boolean} */
const same = (value, other) => JSON.stringify(value) === JSON.stringify(other);

/**
 * A short text for a value; a long list is cut.
 * @param {any} value
 */
function brief(value) {
  if (!Array.isArray(value)) return String(value);
  return value.length > 8 ? `${value.slice(0, 6).join(" ")} … (${value.length})` : value.join(" ");
}
