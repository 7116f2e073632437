// The panel of the policy: what is in force and why, the last switch with its forecast beside its effect, and Revert.
import { byId, make, show, text } from "./dom.js";
import { integer, moment, seconds } from "./format.js";
import { changeWords, interval, scaleOf } from "./interval.js";
import { changesOf, groupOf, same } from "./options.js";
import { ENDED, observed, simulated } from "./summary.js";
import { SwitchDialog } from "./switchdialog.js";

/** @type {Record<Changes, string>} */
const TAGS = { nothing: "ok", batches: "warn", training: "bad" };
const OBSERVED = "An observed run cannot be switched: its script divides its batches itself. With a paceline.Session it could be.";

export class PolicyPanel {
  /**
   * @param {string} run
   * @param {import("./data.js").RunData} data
   * @param {import("./effect.js").Effects} effects
   * @param {import("./whatif.js").WhatIf} whatif
   * @param {(revision: number) => void} switched called after a switch with the run's new revision
   */
  constructor(run, data, effects, whatif, switched) {
    this.data = data;
    this.effects = effects;
    this.whatif = whatif;
    /** @type {any} */
    this.run = null; // the run's newest state
    /** @type {PresetInfo[]} */
    this.presets = [];
    this.dialog = new SwitchDialog(run, data, whatif, (made) => {
      this.data.addSwitch(made);
      switched(made.revision);
      this.draw();
    });
    byId("switch-open").addEventListener("click", () => this.openDialog());
    byId("switch-revert").addEventListener("click", () => this.#revert());
  }

  /** @param {any[]} presets all that there are, from `GET policies` */
  take(presets) {
    this.presets = presets;
    this.whatif.presets = presets;
    this.dialog.presets = presets;
  }

  /**
   * Takes the run's newest state. An answer on its way from before a switch does not bring the old revision back.
   * @param {Run} run
   */
  update(run) {
    this.run = { ...run, revision: Math.max(run.revision, this.run?.revision ?? 0) };
    const ended = ENDED.includes(run.state);
    const cannot = observed(run) ? OBSERVED : "";
    const why = ended ? `The run has ${run.state === "finished" ? "finished" : "ended"}` : cannot;
    for (const id of ["switch-open", "switch-revert"]) {
      byId(id).disabled = ended || cannot !== "" || !this.presets.length;
      byId(id).title = why;
    }
    this.dialog.update(this.run);
  }

  /**
   * Opens the dialog with a chosen preset, by default the recommended one.
   * @param {string} [policy]
   * @param {Record<string, any>} [parameters]
   * @param {string} [why]
   */
  openDialog(policy, parameters, why) {
    this.dialog.open(policy, parameters, why);
  }

  /** Draws the policy in force, the newest switch with its forecast and effect, and the earlier switches below. */
  draw() {
    const preset = this.presets.find((known) => known.name === this.run.policy);
    text("policy-current", this.run.policy);
    text("policy-summary", preset?.summary ?? (observed(this.run) ? OBSERVED : ""));
    const parameters = this.data.switches.at(-1)?.parameters ?? {};
    const set = Object.entries(parameters).filter(([name, value]) => !same([value], [preset?.parameters[name]?.default]));
    text("policy-changed", set.map(([name, value]) => `${name} = ${brief(value)}`).join(", "));
    show("policy-changed", set.length > 0);
    this.#tag(preset, parameters);
    this.#explain();
    const [newest, ...earlier] = this.data.switches.filter((change) => change.version > 0).reverse();
    show("switch-last", newest !== undefined);
    text("switch-status", newest ? this.#words(newest) : "No switch yet.");
    this.#figures(newest);
    fill("switch-history", earlier.map((change) => this.#words(change)));
    const before = this.#before(newest);
    show("switch-revert", before !== undefined);
    text("switch-revert", before ? `Revert to ${before.policy}…` : "");
    this.dialog.update(this.run);
  }

  /**
   * @param {PresetInfo | undefined} preset
   * @param {Record<string, any>} parameters
   */
  #tag(preset, parameters) {
    show("policy-tag", preset !== undefined);
    if (!preset) return;
    const changes = changesOf(preset, parameters);
    text("policy-tag", groupOf(changes).tag);
    byId("policy-tag").className = `badge ${TAGS[changes]}`;
    const since = this.data.switches.find(({ version }) => version === this.run.version)?.effective_step;
    text("policy-since", since === null || since === undefined ? "" : `in force since step ${integer(since)}`);
  }

  /**
   * Forecast and effect of a switch, one below the other on one scale.
   * @param {Switch | undefined} change
   */
  #figures(change) {
    const effect = change && this.effects.of(change);
    const rows = [];
    if (effect && !effect.unchanged) {
      const { forecast } = effect;
      const scale = scaleOf([forecast, effect]);
      if (forecast) rows.push(figure("forecast", forecast, scale, "open"));
      rows.push(figure("effect", effect, scale, effect.known && Number(effect.saving) < 0 ? "bad" : "accent"));
    }
    const shown = rows.map((row) => row.outerHTML).join("");
    const list = byId("switch-effect");
    if (list.dataset.shown === shown) return;
    list.dataset.shown = shown;
    list.replaceChildren(...rows);
  }

  /**
   * The policy that a switch took the place of; undefined if that is not known.
   * @param {Switch | undefined} change
   */
  #before(change) {
    if (!change) return undefined;
    const earlier = this.data.switches.filter(({ version, effective_step: step }) => version < change.version && step !== null);
    return earlier.findLast(({ policy, parameters }) => policy !== change.policy || !same(parameters, change.parameters));
  }

  #revert() {
    const newest = this.data.switches.at(-1);
    const before = this.#before(newest);
    if (newest && before) this.openDialog(before.policy, before.parameters, `back from ${newest.policy}`);
  }

  /** Draws why the policy in force chose its synchronisation, if it chooses one, and why ranks all-reduce in spite of it. */
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

  /** @param {Switch} change */
  #words(change) {
    const before = this.data.switches.findLast(({ version }) => version < change.version)?.policy;
    const why = change.why ? `: “${change.why}”` : "";
    const asked = `${before ? `${before} → ` : ""}${change.policy}: requested ${moment(change.requested_at)} by ${change.requested_by}${why}`;
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
 * The notice that ranks do not follow the policy's synchronisation.
 * @param {string} fallback
 */
export function fallbackWords(fallback) {
  return fallback && `Gradients are all-reduced, because ${fallback}.`;
}

/**
 * @param {string} name
 * @param {import("./interval.js").Estimate} estimate
 * @param {[number, number]} scale
 * @param {string} colour
 */
function figure(name, estimate, scale, colour) {
  const words = make("span", { className: "effect-figure" }, changeWords(estimate));
  return make("div", { className: `effect ${name}` }, make("span", { className: "muted" }, name), interval(estimate, scale, colour), words);
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
 * A short text for a value; a long list is cut.
 * @param {any} value
 */
function brief(value) {
  if (!Array.isArray(value)) return String(value);
  return value.length > 8 ? `${value.slice(0, 6).join(" ")} … (${value.length})` : value.join(" ");
}
