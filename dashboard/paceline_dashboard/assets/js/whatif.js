// Forecasts of other policies: asked for here, shown in the panel and in the dialog that switches.
import { get } from "./api.js";
import { byId, make, problem, show, text } from "./dom.js";
import { integer, moment, percent, seconds } from "./format.js";
import { estimateOf, forecastWords, interval, scaleOf } from "./interval.js";
import { GROUPS, ofGroup, optionsOf } from "./options.js";
import { ENDED, observed } from "./summary.js";

const LONGEST_MS = 120_000; // the server simulates: seconds, more on a busy machine
const LISTED = 4; // options in the panel; the dialog has all

export class WhatIf {
  /**
   * @param {string} path
   * @param {OpenSwitchDialog} openDialog
   */
  constructor(path, openDialog) {
    this.path = `${path}/whatif`;
    this.openDialog = openDialog;
    /** @type {any} */
    this.run = null;
    /** @type {WhatIfAnswer | null} */
    this.answer = null; // the newest answer
    this.problem = ""; // why there is none
    /** @type {PresetInfo[]} */
    this.presets = [];
    /** @type {Promise<void> | null} */
    this.asking = null;
    /** @type {(() => void)[]} */
    this.listeners = [];
    /** @type {Option[]} */
    this.options = []; // those that the panel shows
    /** @type {Option | undefined} */
    this.best = undefined; // the one that is recommended
    byId("whatif-ask").addEventListener("click", () => this.ask(this.answer !== null));
    byId("whatif-all").addEventListener("click", () => openDialog());
    byId("whatif-look").addEventListener("click", (/** @type {Event} */ { currentTarget }) => this.#open(/** @type {any} */ (currentTarget).value));
  }

  /** @param {() => void} listener called when an answer has come, or a refusal */
  onAnswer(listener) {
    this.listeners.push(listener);
  }

  /**
   * Takes the run's newest state.
   * @param {Run} run
   */
  update(run) {
    const changed = this.run?.version !== run.version || this.run?.state !== run.state;
    this.run = run;
    show("whatif-old", this.#old);
    if (changed && this.answer) this.#draw();
  }

  /** Whether another policy is in force than the answer is about. */
  get #old() {
    return this.answer !== null && this.answer.current.version !== this.run.version;
  }

  /**
   * Asks the server, if it is not being asked already.
   * @param {boolean} refresh also if the server keeps a fresh answer
   */
  ask(refresh = false) {
    this.asking ??= this.#ask(refresh).finally(() => {
      this.asking = null;
    });
    return this.asking;
  }

  /** @param {boolean} refresh */
  async #ask(refresh) {
    const button = byId("whatif-ask");
    button.setAttribute("aria-disabled", "true"); // `disabled` would take the keyboard's focus away
    problem("whatif-problem", "");
    text("whatif-words", "Simulating the next steps under each preset…");
    try {
      this.answer = await get(this.path, { refresh }, LONGEST_MS);
      this.problem = "";
    } catch (error) {
      if (error.status === undefined) throw error;
      this.problem = error.message;
    } finally {
      button.setAttribute("aria-disabled", "false");
    }
    if (!byId("whatif-forecasts")) return; // the page was left meanwhile
    text("whatif-words", "");
    problem("whatif-problem", this.problem);
    if (!this.problem) this.#draw();
    for (const listener of this.listeners) listener();
  }

  #draw() {
    const answer = /** @type {WhatIfAnswer} */ (this.answer);
    const inForce = { policy: answer.current.policy, parameters: answer.current.parameters };
    const all = optionsOf(this.presets, answer, inForce);
    const best = (this.best = this.#old ? undefined : all.find((option) => option.recommended));
    const others = GROUPS.slice(0, 2)
      .flatMap(({ changes }) => ofGroup(all, changes))
      .filter((option) => option.forecast && !option.inForce && option.label !== best?.label)
      .sort((one, other) => (other.forecast?.saving ?? 0) - (one.forecast?.saving ?? 0))
      .slice(0, LISTED);
    this.options = [...(best ? [best] : []), ...others];
    const scale = scaleOf(this.options.map(({ forecast }) => forecast && estimateOf(forecast)));
    text("whatif-ask", "Ask again");
    text("whatif-words", answer.reason ?? `${answer.current.policy} takes ${seconds(answer.current.step_time_s)} a step.`);
    this.#recommend(best, scale);
    byId("whatif-forecasts").replaceChildren(...others.map((option) => this.#row(option, scale)));
    show("whatif-all", answer.forecasts.length > 0 && !observed(this.run));
    text("whatif-all", `All ${integer(all.length)} options…`);
    const rest = `From steps ${integer(answer.first_step)}–${integer(answer.step)}, ${moment(answer.made_at)}. Bars bound 95 %. The models are off by ${percent(answer.fit_error)}.`;
    const assumed = answer.assumes ? ` Assumed: ${answer.assumes}.` : "";
    text("whatif-note", answer.reason ? "" : rest + assumed);
    show("whatif-old", this.#old);
  }

  /**
   * @param {Option | undefined} best
   * @param {[number, number]} scale
   */
  #recommend(best, scale) {
    show("whatif-recommended", best !== undefined);
    if (!best?.forecast) return;
    text("whatif-best", best.label);
    text("whatif-best-figure", forecastWords(best.forecast));
    byId("whatif-best-interval").replaceChildren(interval(estimateOf(best.forecast), scale, "brand"));
    text("whatif-best-about", `${best.summary} ${best.changes === "nothing" ? "Training identical." : "Batches composed differently."}`);
    byId("whatif-look").value = best.label;
    byId("whatif-look").disabled = ENDED.includes(this.run.state) || observed(this.run);
  }

  /**
   * @param {Option} option
   * @param {[number, number]} scale
   */
  #row(option, scale) {
    const forecast = /** @type {PresetForecast} */ (option.forecast);
    const button = make(
      "button",
      { type: "button", className: "forecast", value: option.label, title: forecast.words, "aria-label": `${forecast.words}: switch to ${option.label}…` },
      make("span", { className: "forecast-name" }, option.label),
      interval(estimateOf(forecast), scale, forecast.harmful ? "bad" : "accent"),
      make("span", { className: "forecast-figure" }, forecastWords(forecast)),
    );
    const looks = byId("run-body").classList.contains("only-looks"); // a viewer, who cannot switch
    button.disabled = looks || ENDED.includes(this.run.state) || observed(this.run) || this.#old;
    button.addEventListener("click", () => this.#open(option.label));
    const warning = forecast.harmful ? [make("span", { className: "saving-warning" }, forecast.warnings[0])] : [];
    return make("li", {}, button, ...warning);
  }

  /** @param {string} label */
  #open(label) {
    const option = this.options.find((each) => each.label === label);
    if (option) this.openDialog(option.policy, option.parameters);
  }
}
