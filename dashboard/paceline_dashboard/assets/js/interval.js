// An estimate with its interval: in words, and as a dot between two bars on a line that shows where nothing would change.
import { make } from "./dom.js";

/** @typedef {{saving: number | null, low: number | null, high: number | null}} Estimate */

/**
 * A forecast's saving as an estimate.
 * @param {{saving: number, saving_low: number, saving_high: number}} forecast
 * @returns {Estimate}
 */
export const estimateOf = ({ saving, saving_low: low, saving_high: high }) => ({ saving, low, high });

/**
 * "−26 % ± 4": the change of the time per step. "not yet known" while the interval holds zero.
 * @param {Estimate | null | undefined} estimate
 */
export function changeWords(estimate) {
  if (!estimate || estimate.saving === null || estimate.low === null || estimate.high === null) return "not yet known";
  if (estimate.low <= 0 && estimate.high >= 0) return "not yet known";
  return range(estimate);
}

/**
 * The same of a forecast: one that may as well be none says so.
 * @param {PresetForecast} forecast
 */
export function forecastWords(forecast) {
  return forecast.saving_low <= 0 && forecast.saving_high >= 0 ? `none shown (± ${half(estimateOf(forecast))})` : range(estimateOf(forecast));
}

/** @param {Estimate} estimate */
function range(estimate) {
  const change = Math.round(-100 * Number(estimate.saving));
  return `${change > 0 ? "+" : change < 0 ? "−" : ""}${Math.abs(change)} % ± ${half(estimate)}`;
}

/** @param {Estimate} estimate */
const half = ({ low, high }) => Math.max(1, Math.round(50 * (Number(high) - Number(low))));

/**
 * The scale that holds all estimates and zero: changes of the time, from shorter to longer.
 * @param {(Estimate | null | undefined)[]} estimates
 * @returns {[number, number]}
 */
export function scaleOf(estimates) {
  const ends = estimates.flatMap((estimate) => (estimate && estimate.low !== null && estimate.high !== null ? [-estimate.low, -estimate.high] : []));
  const [least, most] = [Math.min(-0.02, ...ends), Math.max(0.02, ...ends)];
  const room = 0.04 * (most - least);
  return [least - room, most + room];
}

/**
 * The graphic; the text beside it says the same.
 * @param {Estimate | null | undefined} estimate
 * @param {[number, number]} scale
 * @param {string} colour a class: "accent", "brand", "bad" or "open"
 */
export function interval(estimate, [least, most], colour = "accent") {
  const at = (/** @type {number} */ change) => `${(100 * (change - least)) / (most - least)}%`;
  /** @type {(className: string, left: string, right?: string) => HTMLElement} */
  const part = (className, left, right) => {
    const element = make("span", { className });
    element.style.left = left;
    if (right) element.style.width = `calc(${right} - ${left})`;
    return element;
  };
  const parts = [part("interval-line", "0%", "100%"), part("interval-zero", at(0))];
  if (estimate && estimate.saving !== null && estimate.low !== null && estimate.high !== null) {
    parts.push(part("interval-bar", at(-estimate.high), at(-estimate.low)), part("interval-dot", at(-estimate.saving)));
  }
  return make("span", { className: `interval ${colour}`, "aria-hidden": "true" }, ...parts);
}
