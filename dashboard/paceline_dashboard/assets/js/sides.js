// What the page that compares runs has in its address, and how its lines are aligned and smoothed.
import { quantile } from "./format.js";

export const LETTERS = "ABCDEF";
const ALIGNED = ["step", "sample", "time"];

/**
 * The state of the page, from the query of its address.
 * @param {string} query
 * @returns {CompareState}
 */
export function stateOf(query) {
  const values = new URLSearchParams(query);
  const align = values.get("align") ?? "";
  const smooth = Number(values.get("smooth"));
  return {
    sides: values.getAll("side").slice(0, LETTERS.length),
    align: /** @type {CompareState["align"]} */ (ALIGNED.includes(align) ? align : "step"),
    smooth: [1, 50, 200].includes(smooth) ? smooth : 50,
  };
}

/**
 * The query of the address for a state; what is as ever is left out.
 * @param {CompareState} state
 */
export function queryOf({ sides, align, smooth }) {
  const values = new URLSearchParams();
  for (const side of sides) values.append("side", side);
  if (align !== "step") values.set("align", align);
  if (smooth !== 50) values.set("smooth", String(smooth));
  return values.toString();
}

/**
 * A side's run and part: "@1" a version of its policy, ":100-499" some steps, "" the whole run.
 * @param {string} side
 */
export function partsOf(side) {
  const at = side.search(/[:@]/);
  return at < 0 ? { run: side, part: "" } : { run: side.slice(0, at), part: side.slice(at) };
}

/**
 * What tells sides apart, shortest first: their policies, else the runs' names, else the runs.
 * @param {{policy: string, name: string, run: string}[]} sides
 * @returns {string[]}
 */
export function namesOf(sides) {
  for (const field of /** @type {("policy" | "name" | "run")[]} */ (["policy", "name", "run"])) {
    const names = sides.map((side) => side[field]);
    if (names.every(Boolean) && new Set(names).size === names.length) return names;
  }
  return sides.map(({ policy, name }) => policy || name);
}

/**
 * Where each point of a side is on the common axis: steps or seconds from the side's first step, or the samples that
 * its run had trained on by then.
 * @param {StepColumns} columns
 * @param {CompareState["align"]} align
 * @param {[number, number][]} trained steps and the samples trained before them, ascending
 * @returns {Column} null: not known
 */
export function positions(columns, align, trained) {
  const first = columns.step[0] ?? 0;
  if (align === "time") return columns.ended_at.map((/** @type {number} */ at) => at - columns.ended_at[0]);
  if (align === "sample") return columns.step.map((step) => samplesAt(trained, step));
  return columns.step.map((step) => step - first);
}

/**
 * Samples before a step, by a straight line between the steps around it. Before the first known step and after the last
 * the nearest line goes on. null: fewer than two steps are known, and not this one.
 * @param {[number, number][]} trained
 * @param {number} step
 */
function samplesAt(trained, step) {
  if (trained.length < 2) return trained[0]?.[0] === step ? trained[0][1] : null;
  const after = trained.findIndex(([known]) => known > step);
  const next = after < 0 ? trained.length - 1 : Math.max(1, after);
  const [[from, low], [to, high]] = [trained[next - 1], trained[next]];
  return Math.max(0, low + ((step - from) / (to - from)) * (high - low));
}

/**
 * The median of the points around each, and the quantiles between which most of them lie.
 * @param {Column} values
 * @param {number} width points
 */
export function smoothed(values, width) {
  const half = Math.floor(width / 2);
  /** @type {{middle: Column, low: Column, high: Column}} */
  const lines = { middle: [], low: [], high: [] };
  for (let at = 0; at < values.length; at++) {
    const near = values.slice(Math.max(0, at - half), at + half + 1);
    lines.middle.push(quantile(near, 0.5));
    lines.low.push(quantile(near, 0.1));
    lines.high.push(quantile(near, 0.9));
  }
  return lines;
}

/**
 * A row's name as programs read it: a metric's begins with the metric, a target's with the target.
 * @param {Pick<ComparedFigure, "figure" | "metric" | "target">} row
 */
export function rowName({ figure, metric, target }) {
  if (metric) return `${metric} ${figure}`;
  return target ? `${target.metric}${target.direction}${target.value} ${figure}` : figure;
}

/**
 * The comparison as CSV.
 * @param {Comparison} answer
 */
export function csvOf({ sides, differences }) {
  const names = sides.map((_, at) => LETTERS[at]);
  const head = ["figure", "unit", ...names, ...names.slice(1).flatMap((name) => [`${name}-A`, `${name}-A low`, `${name}-A high`])];
  const lines = differences.map(({ unit, values, changes, ...row }) => [
    rowName(row), unit, ...values, ...changes.flatMap((change) => (change ? [change.value, change.low, change.high] : [null, null, null])),
  ]);
  return [head, ...lines].map((line) => line.map((value) => value ?? "").join(",")).join("\n") + "\n";
}
