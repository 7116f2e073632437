// The panel of forecasts: what other policies would save; a click requests them.
import { get } from "./api.js";
import { byId, make, problem, show, text } from "./dom.js";
import { integer, moment, percent, plural, seconds } from "./format.js";
import { ENDED } from "./summary.js";

const LONGEST_MS = 120_000; // the server simulates: seconds, more on a busy machine

export class WhatIf {
  /**
   * @param {string} path
   * @param {import("./data.js").RunData} data
   * @param {OpenSwitchDialog} openDialog
   */
  constructor(path, data, openDialog) {
    this.path = `${path}/whatif`;
    this.data = data;
    this.openDialog = openDialog;
    /** @type {any} */
    this.run = null;
    /** @type {any} */
    this.answer = null; // the newest answer
    byId("whatif-ask").addEventListener("click", () => this.#ask());
  }

  /**
   * Takes the run's newest state.
   * @param {Run} run
   */
  update(run) {
    this.run = run;
    for (const button of byId("whatif-forecasts").querySelectorAll("button")) button.disabled = ENDED.includes(run.state) || this.#inForce(button.value);
    show("whatif-old", this.answer !== null && this.answer.current.version !== run.version);
  }

  async #ask() {
    const button = byId("whatif-ask");
    if (button.getAttribute("aria-disabled") === "true") return;
    button.setAttribute("aria-disabled", "true"); // `disabled` would take the keyboard's focus away
    problem("whatif-problem", "");
    text("whatif-words", "Simulating the next steps under each preset…");
    try {
      this.answer = await get(this.path, { refresh: this.answer !== null }, LONGEST_MS);
      if (byId("whatif-forecasts")) this.#draw();
    } catch (error) {
      if (error.status === undefined) throw error;
      text("whatif-words", "");
      problem("whatif-problem", error.message);
    } finally {
      button.setAttribute("aria-disabled", "false");
    }
  }

  #draw() {
    const { forecasts, left_out: leftOut, reason, fit_error: error, current } = this.answer;
    text("whatif-ask", "Ask again");
    text("whatif-words", reason ?? `${current.policy} takes ${seconds(current.step_time_s)} a step.`);
    /** @type {PresetForecast[]} */
    const others = forecasts.filter((/** @type {PresetForecast} */ preset) => !preset.in_force);
    const least = Math.min(0, ...others.map((preset) => preset.saving_low));
    const most = Math.max(0.01, ...others.map((preset) => preset.saving_high));
    byId("whatif-forecasts").replaceChildren(...others.map((preset) => this.#row(preset, least, most)));
    const left = leftOut.map((/** @type {{policy: string, reason: string}} */ preset) => `${preset.policy}: ${preset.reason}`);
    const rest = reason
      ? []
      : [`From steps ${integer(this.answer.first_step)}–${integer(this.answer.step)}, ${moment(this.answer.made_at)}.`,
          `Bars: expected saving of time; whiskers: 95 % of cases.`, `The models are off by ${percent(error)}.`];
    text("whatif-note", [...rest, ...(left.length ? [`Left out: ${plural(left.length, "preset")} (${left.join("; ")}).`] : [])].join(" "));
    this.update(this.run);
  }

  /**
   * @param {PresetForecast} preset
   * @param {number} least
   * @param {number} most
   */
  #row(preset, least, most) {
    const at = (/** @type {number} */ saving) => `${(100 * (saving - least)) / (most - least)}%`;
    /** @type {(className: string, from: number, to: number) => HTMLElement} */
    const part = (className, from, to) => {
      const element = make("span", { className });
      element.style.left = at(from);
      element.style.width = `calc(${at(to)} - ${at(from)})`;
      return element;
    };
    const [low, high] = [Math.min(0, preset.saving), Math.max(0, preset.saving)];
    const bar = make(
      "span",
      { className: "saving", "aria-hidden": "true" }, // the text beside says the same
      part(preset.saving < 0 ? "saving-bar worse" : "saving-bar", low, high),
      part("saving-zero", 0, 0),
      part("saving-whisker", preset.saving_low, preset.saving_high),
    );
    const button = make("button", { type: "button", value: preset.label, "aria-label": `Switch to ${preset.label}…` }, "Switch to it…");
    button.addEventListener("click", () => this.openDialog(preset.policy, preset.parameters));
    const words = make("span", { className: "saving-words", title: `${seconds(preset.step_time_s)} a step` }, preset.words);
    const warning = preset.harmful ? [make("span", { className: "saving-warning" }, preset.warnings[0])] : [];
    return make("li", {}, words, bar, button, ...warning);
  }

  /**
   * Whether somebody has switched to this option since.
   * @param {string} label
   */
  #inForce(label) {
    const preset = this.answer.forecasts.find((/** @type {PresetForecast} */ each) => each.label === label);
    const last = this.data.switches.at(-1);
    const parameters = last?.parameters ?? {};
    return preset.policy === this.run.policy && Object.entries(preset.parameters).every(([name, value]) => parameters[name] === value);
  }}

