// A row of the alert rules: what an admin changed of it is sent, and nothing else.
import { change } from "./api.js";
import { make } from "./dom.js";
import { moment } from "./format.js";

/** @type {Record<string, string>} */
const NUMBERS = { threshold: "Threshold", raise_after_s: "Raised after", resolve_after_s: "Resolved after" };

/**
 * What differs between the values of a rule's fields and the rule as it was shown.
 * @param {Record<string, any>} rule
 * @param {Record<string, any>} values
 */
export const differences = (rule, values) => Object.fromEntries(Object.entries(values).filter(([name, value]) => rule[name] !== value));

export class RuleRow {
  /**
   * @param {any} rule of `GET alerts/rules`
   * @param {boolean} may change it
   * @param {(task: () => Promise<void>) => void} tried reports errors
   * @param {() => {by: string, operator?: string}} who asks
   */
  constructor(rule, may, tried, who) {
    this.rule = rule;
    this.who = who;
    const field = (/** @type {string} */ name) =>
      make("input", { type: "number", min: "0", step: "any", disabled: !may, "aria-label": `${name} of ${rule.name}` });
    const severities = ["critical", "warning", "info"].map((name) => make("option", { value: name }, name));
    /** @type {Record<string, any>} */
    this.fields = {
      ...Object.fromEntries(Object.keys(NUMBERS).map((name) => [name, field(name)])),
      severity: make("select", { disabled: !may, "aria-label": `Severity of ${rule.name}` }, ...severities),
      enabled: make("input", { type: "checkbox", disabled: !may, "aria-label": `${rule.name} is on` }),
    };
    this.save = make("button", { type: "button", className: "smaller", "aria-label": `Save ${rule.name}` }, "Save");
    this.words = make("span");
    this.problem = make("span", { className: "problem", role: "alert", hidden: true });
    this.save.addEventListener("click", () => tried(() => this.#save()));
    const { threshold, ...others } = this.fields;
    const limit = make("span", {}, threshold, make("span", { className: "of" }, rule.unit));
    this.cells = [rule.name, { words: make("span", {}, this.words, " ", this.problem) }, limit, ...Object.values(others), may ? this.save : ""];
    this.#take(rule, Object.keys(this.fields));
  }

  get values() {
    const { severity, enabled } = this.fields;
    /** @type {[string, any][]} */
    const numbers = Object.keys(NUMBERS).map((name) => [name, Number(this.fields[name].value)]);
    return { ...Object.fromEntries(numbers), severity: severity.value, enabled: enabled.checked };
  }

  /**
   * The rule as it is now. Fields that an admin is changing keep what was typed.
   * @param {any} rule
   * @param {string[]} names of fields that show it
   */
  #take(rule, names) {
    for (const name of names) {
      if (name === "enabled") this.fields.enabled.checked = rule.enabled;
      else this.fields[name].value = String(rule[name]);
    }
    this.rule = rule;
    this.words.textContent = `${rule.words}.${rule.changed_by ? ` Changed by ${rule.changed_by}.` : ""}`;
  }

  /** @param {string} words empty: none */
  #say(words) {
    this.problem.textContent = words;
    this.problem.hidden = words === "";
  }

  async #save() {
    // A field whose text is empty or no number has the value "", and that would be sent as 0.
    const wrong = Object.keys(NUMBERS).find((name) => this.fields[name].value === "" || Number(this.fields[name].value) < 0);
    if (wrong) return this.#say(`${NUMBERS[wrong]}: give a number that is 0 or more. Nothing was saved.`);
    const edited = differences(this.rule, this.values);
    if (!Object.keys(edited).length) return this.#say("Nothing has been changed here.");
    try {
      const rule = await change("PUT", `alerts/rules/${this.rule.name}`, { ...edited, ...this.who() }, this.rule.revision);
      this.#take(rule, Object.keys(this.fields));
      this.#say("");
    } catch (error) {
      if (error.status !== 412) throw error;
      const { rule, who, at } = error.problem;
      this.#take(rule, Object.keys(this.fields).filter((name) => !(name in edited)));
      const by = who ? `${who} changed this rule at ${moment(at)}` : "This rule got its defaults back";
      this.#say(`${by}, since it was shown. Nothing was saved. Save again to change it all the same.`);
    }
  }
}
