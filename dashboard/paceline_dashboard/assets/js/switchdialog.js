// The dialog that switches the policy: options with their forecasts, parameters, who and why, and conflicts.
import { change, get } from "./api.js";
import { overtakenWords } from "./changes.js";
import { byId, make, problem, show, text } from "./dom.js";
import { blame, effective, fieldOf, FieldError, valueOf } from "./fields.js";
import { ago, integer, mean, moment, plural, seconds } from "./format.js";
import { estimateOf, forecastWords, interval, scaleOf } from "./interval.js";
import { changesOf, consequences, forecastOf, GROUPS, groupOf, ofGroup, optionsOf, same } from "./options.js";
import { simulated, stepsOf } from "./summary.js";
import { reachedWords } from "./target.js";

const WARNINGS_MS = 20_000; // a trial takes a part of a second, the first one seconds
const TICK_MS = 1000;
const OPERATOR = "paceline.operator"; // the name that this browser's user gave last
const AT_PARAMETER = /^parameters\.(\w+): (.*)$/s; // the server's message about a wrong parameter

export class SwitchDialog {
  /**
   * @param {string} run its id
   * @param {import("./data.js").RunData} data
   * @param {import("./whatif.js").WhatIf} whatif
   * @param {(made: any) => void} switched called with the server's answer to a switch
   */
  constructor(run, data, whatif, switched) {
    this.path = `runs/${encodeURIComponent(run)}`;
    this.data = data;
    this.whatif = whatif;
    this.switched = switched;
    this.dialog = byId("switch-dialog");
    this.asked = 0; // how often warnings were asked for: only the newest answer counts
    this.seen = { revision: 0, version: 0 }; // of the run, when the operator last looked
    this.shown = ""; // what the list of options shows
    this.refusal = ""; // why the last confirmation was not taken: somebody was faster
    /** @type {any} */
    this.run = null; // the run's newest state
    /** @type {PresetInfo[]} */
    this.presets = [];
    /** @type {Option[]} */
    this.options = [];
    /** @type {any} */
    this.chosen = null; // the option whose parameters are shown
    /** @type {[string, ParameterSchema][]} */
    this.schemas = []; // of the parameters that are shown
    /** @type {Me | null} */
    this.me = null;
    this.accept = make("input", { type: "checkbox", id: "switch-accept" });
    byId("switch-accept-label").append(this.accept, make("span", { id: "switch-accept-words" }));
    this.operator = make("input", { type: "text", id: "switch-operator", maxLength: 200, autocomplete: "name" });
    this.why = make("input", { type: "text", id: "switch-why", maxLength: 500, autocomplete: "off" });
    byId("switch-words").append(
      make(
        "div",
        { className: "field", id: "switch-operator-field", hidden: true },
        make("label", { for: "switch-operator" }, "Your name", make("span", { className: "muted" }, "shown to other operators")),
        this.operator,
      ),
      make(
        "div",
        { className: "field" },
        make("label", { for: "switch-why" }, "Reason", make("span", { className: "muted", id: "switch-why-help" }, "kept in the history")),
        this.why,
      ),
    );
    this.#listen();
  }

  #listen() {
    byId("switch-form").noValidate = true; // our words at the field instead of the browser's
    byId("switch-form").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault(); // the form would close the dialog, also where nothing was switched
      this.#request();
    });
    for (const id of ["switch-close", "switch-cancel"]) byId(id).addEventListener("click", () => this.dialog.close());
    byId("switch-look").addEventListener("click", () => this.#lookAgain());
    byId("policy-presets").addEventListener("change", () => this.#choose(this.#checked));
    byId("policy-parameters").addEventListener("change", () => this.#edited());
    this.accept.addEventListener("change", () => this.#say(""));
    this.dialog.addEventListener("close", () => clearInterval(this.ticking));
    this.whatif.onAnswer(() => this.dialog.open && this.#answered());
  }

  /**
   * Opens the dialog with a chosen option: by default the recommended one, else the policy in force.
   * @param {string} [policy]
   * @param {Record<string, any>} parameters those that differ from the defaults
   * @param {string} why a reason to begin with
   */
  async open(policy, parameters = {}, why = "") {
    this.refusal = "";
    this.#see();
    this.why.value = why;
    this.accept.checked = false;
    this.#list(true);
    const named = policy === undefined ? null : this.#option(policy, parameters);
    const option = named ?? this.options.find((each) => each.recommended) ?? this.options.find((each) => each.inForce) ?? this.options[0];
    this.dialog.showModal();
    this.#choose(option, named ? parameters : {});
    this.#radio(option)?.focus();
    this.#radio(option)?.closest("label").scrollIntoView({ block: "nearest" });
    clearInterval(this.ticking);
    this.ticking = setInterval(() => this.refresh(), TICK_MS);
    this.whatif.ask();
    this.#askWho();
  }

  /**
   * Takes the run's newest state.
   * @param {Run} run
   */
  update(run) {
    this.run = run;
    if (this.dialog.open) this.refresh();
  }

  /** Says what is in force now, and whether somebody has switched since the operator looked. */
  refresh() {
    text("switch-run", `${this.run.name || this.run.id}, in force now:`);
    const { active, following } = this.#policies();
    const step = this.#stepTime();
    text("switch-in-force", `${active}${step === null ? "" : ` ${seconds(step)} a step`}${following ? `, ${following} is to follow` : ""}`);
    text("switch-when", this.#when());
    this.#notice();
    this.#list();
  }

  /** The policy in force and the one that was asked for and has yet to plan. */
  #policies() {
    const { switches, segment } = this.data;
    const active = switches.find(({ version }) => version === segment?.version)?.policy ?? (segment ? "" : this.run.policy);
    const newest = switches.at(-1);
    const waiting = newest && newest.version > 0 && newest.effective_step === null;
    return { active: active || this.run.policy, following: waiting ? newest.policy : "" };
  }

  /** The operator sees the run as it is now. */
  #see() {
    this.seen = { revision: this.run.revision, version: this.run.version };
  }

  #notice() {
    const others = this.data.switches.filter(({ version }) => version > this.seen.version);
    const newest = others.at(-1);
    const words = newest && `${newest.requested_by} switched to ${newest.policy} ${ago(newest.requested_at)}${newest.why ? `: “${newest.why}”` : ""}.`;
    const last = this.data.switches.findLast(({ version }) => version > 0);
    const quiet = last ? `Last switch: ${last.requested_by} to ${last.policy}, ${moment(last.requested_at)}.` : "";
    const notice = this.refusal || words;
    text("switch-notice-words", [this.refusal, this.refusal ? "" : words, !notice ? quiet : ""].filter(Boolean).join(" "));
    byId("switch-notice").className = `switch-notice${this.refusal ? " bad" : words ? " warn" : ""}`;
    show("switch-notice", Boolean(notice || quiet));
    show("switch-look", Boolean(notice));
  }

  async #lookAgain() {
    this.refusal = "";
    this.#say("");
    this.run = { ...(await get(this.path).catch(() => this.run)) };
    this.#see();
    this.whatif.ask(true);
    this.#choose(this.chosen, this.#legal() ?? {});
    this.refresh();
    this.#radio(this.chosen)?.focus();
  }

  /** Asks once who the operator is; a shared token does not say. */
  async #askWho() {
    this.operator.value = localStorage.getItem(OPERATOR) ?? "";
    try {
      this.me ??= await get("me");
    } catch (error) {
      if (error.status === undefined) throw error;
      return; // without an answer, the token's name is kept in the history
    }
    show("switch-operator-field", Boolean(this.me?.shared));
    text("switch-why-help", this.me?.shared ? "kept in the history" : `kept in the history, as ${this.me?.name}`);
  }

  #answered() {
    this.#list();
    this.#describe();
  }

  /**
   * Draws the options, if they are others than before; keeps choice and focus.
   * @param {boolean} anew
   */
  #list(anew = false) {
    const fitting = this.#answer;
    this.options = optionsOf(this.presets, fitting, { policy: this.run.policy, parameters: this.inForce });
    text("switch-forecast", this.#forecastWords(fitting));
    const shown = JSON.stringify(this.options);
    if (shown === this.shown && !anew) return;
    this.shown = shown;
    const focused = byId("policy-presets").contains(document.activeElement);
    const scale = scaleOf(this.options.map(({ forecast }) => forecast && estimateOf(forecast)));
    byId("policy-presets").replaceChildren(...GROUPS.flatMap((group) => this.#group(group, scale)));
    const left = this.options.filter(({ left: reason }) => reason);
    const reasons = [...new Map(left.map(({ label, left: reason }) => [label, `${label}: ${reason}`])).values()];
    text("switch-left-out", reasons.length ? `Not forecast: ${reasons.join("; ")}.` : "");
    show("switch-left-out", reasons.length > 0);
    if (anew || !this.chosen) return;
    this.chosen = this.options.find(({ label }) => label === this.chosen.label) ?? this.#option(this.chosen.policy, {}) ?? this.options[0];
    const radio = this.#radio(this.chosen);
    if (radio) radio.checked = true;
    if (focused) radio?.focus();
  }

  /** @param {WhatIfAnswer | null} answer */
  #forecastWords(answer) {
    if (this.whatif.problem) return `No forecasts: ${this.whatif.problem}`;
    if (!answer) return "Forecasting the time per step under each preset…";
    if (answer.reason) return `No forecasts: ${answer.reason}`;
    return `Forecast of the time per step, from ${plural(answer.steps, "step")} up to step ${integer(answer.step)}; bars bound 95 %`;
  }

  /**
   * @param {typeof GROUPS[number]} group
   * @param {[number, number]} scale
   */
  #group(group, scale) {
    const options = ofGroup(this.options, group.changes);
    if (!options.length) return [];
    const id = `switch-group-${group.changes}`;
    const head = make("div", { className: `group-head ${group.changes}`, id }, make("h3", {}, group.title), make("span", { className: "muted small" }, group.about));
    const reached = group.changes === "training" ? reachedWords(this.run) : "";
    const quality = reached ? [make("p", { className: "muted small" }, reached)] : [];
    const rows = options.map((option) => this.#row(option, scale));
    return [make("div", { role: "group", "aria-labelledby": id, className: `group ${group.changes}` }, head, ...quality, ...rows)];
  }

  /**
   * @param {Option} option
   * @param {[number, number]} scale
   */
  #row(option, scale) {
    const id = radioId(option);
    const badges = [
      ...(option.recommended ? [make("span", { className: "badge recommended" }, "recommended")] : []),
      ...(option.inForce ? [make("span", { className: "badge accent" }, this.#policies().following ? "requested" : "in force")] : []),
    ];
    const name = make("span", { className: "option-name" }, make("b", {}, option.label), ...badges);
    const about = make("span", { className: "option-about muted small", id: `${id}-about` }, option.summary);
    const estimate = option.forecast && estimateOf(option.forecast);
    const colour = option.changes === "training" || option.forecast?.harmful ? "bad" : option.recommended ? "brand" : "accent";
    const words = option.inForce ? "now" : option.forecast ? forecastWords(option.forecast) : "–";
    return make(
      "label",
      { className: `preset ${option.changes}`, for: id },
      make("input", { type: "radio", name: "policy", id, value: option.label, "aria-describedby": `${id}-about ${id}-figure` }),
      make("span", { className: "option-text" }, name, about),
      estimate ? interval(estimate, scale, colour) : make("span", { className: "interval-none" }),
      make("span", { className: `option-figure${option.recommended ? " best" : ""}`, id: `${id}-figure` }, words),
    );
  }

  /**
   * Shows an option and its parameters.
   * @param {Option} option
   * @param {Record<string, any>} parameters that differ from the option's
   */
  #choose(option, parameters = {}) {
    this.chosen = option;
    const radio = this.#radio(option);
    if (radio) radio.checked = true;
    const values = { ...option.parameters, ...(option.inForce ? this.inForce : {}), ...parameters };
    this.schemas = effective(this.#preset, this.run.dif);
    const fields = this.schemas.map(([name, schema]) => fieldOf(name, schema, values[name] ?? schema.default));
    byId("policy-parameters").replaceChildren(...fields);
    byId("policy-parameters").parentElement.scrollTop = 0;
    this.#say("");
    this.#edited();
  }

  /** Follows what the parameters' fields hold now. */
  #edited() {
    this.#describe();
    this.#tellWarnings();
  }

  /** What the switch would be: its group, its forecast, what it changes. */
  #describe() {
    const preset = this.#preset;
    const values = this.#legal();
    const changes = changesOf(preset, values ?? this.chosen.parameters);
    const group = groupOf(changes);
    text("policy-chosen", this.chosen.label === preset.name ? preset.name : this.chosen.label);
    text("switch-tag", group.tag);
    byId("switch-tag").className = `badge ${TAGS[changes]}`;
    byId("switch-summary").replaceChildren(preset.summary, ...(preset.source ? [make("span", { className: "muted" }, ` ${preset.source}`)] : []));
    this.#figures(values);
    const again = preset.name === this.run.policy;
    text("switch-confirm", again ? `Restart ${preset.name} with these parameters` : `Switch to ${preset.name}`);
    byId("switch-confirm").classList.toggle("grave", changes === "training");
    const points = consequences(changes).map(({ good, words }) => make("li", { className: good ? "good" : "careful" }, words));
    byId("switch-changes").replaceChildren(...points);
    show("switch-accept-label", changes === "training");
    text("switch-accept-words", `I know that ${preset.name} trains another model than now: accuracy may differ, and a switch back does not undo it.`);
    text("switch-when", this.#when());
  }

  /**
   * The time per step and for the rest of the run, now and under these parameters.
   * @param {Record<string, any> | null} values null: a field holds no legal value
   */
  #figures(values) {
    const answer = this.#answer;
    const forecast = values ? forecastOf(answer, this.#preset, values) : null;
    const now = this.#stepTime() ?? answer?.current?.step_time_s ?? null;
    const holder = byId("switch-figures");
    if (!forecast || forecast.in_force || now === null) {
      const why = this.chosen.left ?? (this.chosen.inForce ? "" : answer && !answer.reason ? "No forecast for these parameters." : "");
      holder.replaceChildren(...(why ? [make("p", { className: "muted small" }, why)] : []));
      return;
    }
    const steps = stepsLeft(this.run, this.data.latest);
    const better = forecast.saving_low > 0 ? "ok" : forecast.saving_high < 0 ? "bad" : "";
    const half = (forecast.saving_high - forecast.saving_low) / 2;
    const after = now * (1 - forecast.saving);
    const rows = [["Time per step", seconds(now), `${seconds(after)} ± ${seconds(now * half)}`]];
    if (steps) rows.push(["Rest of the run", seconds(steps * now), `${seconds(steps * after)} ± ${seconds(steps * now * half)}`]);
    rows.push(["Change", "", forecastWords(forecast)]);
    const body = rows.map(([name, before, then]) =>
      make("tr", {}, make("th", { scope: "row" }, name), make("td", {}, before), make("td", { className: better }, then)),
    );
    const head = make("tr", {}, make("td", {}), make("th", { scope: "col" }, `${this.run.policy} now`), make("th", { scope: "col" }, this.#preset.name));
    holder.replaceChildren(make("table", {}, make("thead", {}, head), make("tbody", {}, ...body)));
  }

  /** What to know before this switch, by what the run has measured. Without an answer nothing is shown. */
  async #tellWarnings() {
    const asked = ++this.asked;
    const values = this.#legal();
    this.#warn(this.#known(values));
    if (values === null) return; // the confirmation says what is wrong
    try {
      const given = { policy: this.#preset.name, parameters: JSON.stringify(values) };
      const { warnings } = await get(`${this.path}/policy/warnings`, given, WARNINGS_MS);
      if (asked === this.asked && byId("switch-warnings")) this.#warn(warnings);
    } catch (error) {
      if (error.status === undefined) throw error; // else the server refuses these values
    }
  }

  /**
   * Warnings that the forecast has brought.
   * @param {Record<string, any> | null} values
   */
  #known(values) {
    return (values && forecastOf(this.#answer, this.#preset, values)?.warnings) || [];
  }

  /** @param {string[]} warnings */
  #warn(warnings) {
    const list = byId("switch-warnings");
    if (list.dataset.shown !== JSON.stringify(warnings)) {
      list.dataset.shown = JSON.stringify(warnings);
      list.replaceChildren(...warnings.map((words) => make("li", {}, words)));
    }
    show("switch-warnings", warnings.length > 0);
  }

  #when() {
    if (!simulated(this.run) && !this.run.controller?.alive) return "No controller plans this run now: the switch waits until one does.";
    const { segment, latest } = this.data;
    const step = this.#stepTime();
    const left = segment ? Math.max(1, segment.first_step + segment.steps - latest - 1) : 4;
    const at = segment ? ` at about step ${integer(latest + 1 + left)}` : " with the next segment";
    return `Takes effect${at}, at one step for all ranks${step === null ? "" : `, within ${seconds(left * step)}`}.`;
  }

  /** Mean time of the newest steps, or null. */
  #stepTime() {
    return mean(this.data.rowsBetween(this.data.latest - 19, this.data.latest).map((row) => row.step_s));
  }

  /** The chosen preset's parameters; throws FieldError if a value is not legal. @returns {Record<string, any>} */
  #values() {
    return Object.fromEntries(this.schemas.map(([name, schema]) => [name, valueOf(name, schema, this.run.world ?? this.run.nproc)]));
  }

  /** The same, or null if a value is not legal. */
  #legal() {
    try {
      return this.#values();
    } catch (error) {
      if (error instanceof FieldError) return null;
      throw error;
    }
  }

  /** The same; the field of a value that is not legal shows why. */
  #blamed() {
    try {
      return this.#values();
    } catch (error) {
      if (!(error instanceof FieldError)) throw error;
      blame(error.field, error.message);
      return null;
    }
  }

  /** Requests the switch that the dialog describes; closes the dialog if the server takes it. */
  async #request() {
    const parameters = this.#blamed();
    const button = byId("switch-confirm");
    if (parameters === null || button.disabled) return;
    const policy = this.#preset.name;
    if (changesOf(this.#preset, parameters) === "training" && !this.accept.checked) {
      this.#say(`${policy} changes the training: tick the box first.`);
      this.accept.focus();
      return;
    }
    const operator = this.me?.shared ? this.operator.value.trim() : "";
    button.disabled = true; // a double click must not switch twice
    try {
      const body = { policy, parameters, by: "dashboard", why: this.why.value, ...(operator ? { operator } : {}) };
      const made = await change("POST", `${this.path}/policy`, body, this.seen.revision);
      if (operator) localStorage.setItem(OPERATOR, operator);
      this.dialog.close();
      this.switched(made);
    } catch (error) {
      if (error.status === undefined) throw error;
      this.#refused(error);
    } finally {
      button.disabled = false;
    }
  }

  /**
   * Shows the server's message at the field that it names, otherwise above the buttons.
   * @param {import("./api.js").ApiError} error
   */
  #refused(error) {
    if (error.status === 412) {
      this.seen.revision = error.problem.revision; // the operator knows now: the next confirmation goes ahead
      this.refusal = `${overtakenWords(error)} Your switch was not made. Confirm again to make it all the same, or`;
      this.refresh();
      byId("switch-confirm").focus();
      return;
    }
    const [, name, words] = error.fields[0]?.message.match(AT_PARAMETER) ?? [];
    if (!name || !blame(name, `${name}: ${words}`)) this.#say(error.message);
  }

  /** @param {string} words */
  #say(words) {
    problem("switch-problem", words);
  }

  /** @returns {PresetInfo} */
  get #preset() {
    return /** @type {PresetInfo} */ (this.presets.find(({ name }) => name === this.chosen.policy));
  }

  /** The newest forecast, if it is about the policy that the operator has seen; null: none is. */
  get #answer() {
    const { answer } = this.whatif;
    return answer?.current?.version === this.seen.version ? answer : null;
  }

  /** Parameters of the policy that was asked for last. @returns {Record<string, any>} */
  get inForce() {
    return this.data.switches.at(-1)?.parameters ?? {};
  }

  get #checked() {
    const label = byId("policy-presets").querySelector("input:checked").value;
    return /** @type {Option} */ (this.options.find((option) => option.label === label));
  }

  /**
   * The option of a preset with these parameters; without such a one, that with its defaults.
   * @param {string} policy
   * @param {Record<string, any>} parameters
   */
  #option(policy, parameters) {
    const own = this.options.filter((option) => option.policy === policy);
    return own.find((option) => same(option.parameters, { ...own[0].parameters, ...parameters })) ?? own[0];
  }

  /** @param {Option} option */
  #radio(option) {
    return byId(radioId(option));
  }
}

/** @type {Record<Changes, string>} */
const TAGS = { nothing: "ok", batches: "warn", training: "bad" };

/** @param {Option} option */
const radioId = ({ label }) => `policy-preset-${label.replace(/[^\w-]+/g, "-").replace(/-+$/, "")}`;

/**
 * Steps until the run's last epoch ends, or null if that is unknown.
 * @param {Run} run
 * @param {number} latest step
 */
export function stepsLeft(run, latest) {
  const steps = stepsOf(run);
  return steps === null ? null : Math.max(0, steps - latest - 1) || null;
}
