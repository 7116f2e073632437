// The rows of the heat map: which ranks they hold, in which order they stand, and the groups they form.
import { integer } from "./format.js";
import { why } from "./workers.js";

const QUIET = 1.1; // times the typical rank's time: from here on a row counts as slow
const MANY_ROWS = 64; // so many do not fit on a screen
const MOST_HEADED = 24; // groups with names; more are too close to each other

/**
 * @typedef {object} HeatRow
 * @property {number} at its row in `Heat`
 * @property {number} first rank
 * @property {number} last rank
 * @property {string} group its name; empty: it belongs to none
 * @property {number} ratio its slow rank's factor, else the median over the columns of time ÷ the typical rank's; NaN: unknown
 */

/**
 * @typedef {object} HeatGroup
 * @property {string} name
 * @property {HeatRow[]} rows
 * @property {number} ratio the greatest of its rows'
 */

/**
 * Each cell ÷ the typical rank's time in that step: the lower median of the ranks that the verdict does not name as
 * slow. Of a row with several ranks the slowest counts.
 * @param {Heat} heat
 * @param {Map<number, WorkerCause>} causes rank → what is known of it
 * @returns {Float32Array} as `heat.values`
 */
export function ratios(heat, causes) {
  const { values, rows, step } = heat;
  const typical = typicalOf(heat, causes);
  const width = step.length;
  const ratio = new Float32Array(values.length).fill(NaN);
  for (let at = 0; at < width; at++) {
    for (let row = 0; row < rows && typical[at] > 0; row++) ratio[row * width + at] = values[row * width + at] / typical[at];
  }
  return ratio;
}

/**
 * The typical rank's time in each column; NaN: unknown.
 * @param {Heat} heat
 * @param {Map<number, WorkerCause>} causes
 * @returns {number[]}
 */
export function typicalOf({ values, rows, step, together }, causes) {
  const slow = new Set([...causes.values()].filter(({ cause }) => cause === "node").map(({ rank }) => Math.floor(rank / together)));
  const others = Array.from({ length: rows }, (_, row) => row).filter((row) => slow.size >= rows || !slow.has(row));
  return step.map((_, at) => medianOf(others.map((row) => values[row * step.length + at]).filter((value) => value >= 0)));
}

/**
 * The order of rows that shows most where the reader has chosen none: of more rows than a screen shows, those with a
 * cause come first.
 * @param {Heat} heat
 * @param {Map<number, WorkerCause>} causes
 * @returns {"rank" | "cause"}
 */
export function orderOf({ rows }, causes) {
  return rows > MANY_ROWS && [...causes.values()].some(({ cause }) => cause !== "none") ? "cause" : "rank";
}

/**
 * The rows in order, in groups.
 * @param {Heat} heat
 * @param {Float32Array} ratio
 * @param {"rank" | "node" | "cause"} order
 * @param {Map<number, WorkerCause>} causes rank → what is known of it
 * @returns {HeatGroup[]}
 */
export function grouped(heat, ratio, order, causes) {
  const rows = Array.from({ length: heat.rows }, (_, at) => rowOf(heat, ratio, at, order, causes));
  if (order === "cause") {
    const caused = new Map(rows.map((row) => [row, worst(row, causes)?.caused ?? 0]));
    rows.sort((x, y) => Number(x.group === "") - Number(y.group === "") || Number(caused.get(y)) - Number(caused.get(x)) || x.first - y.first);
  }
  /** @type {Map<string, HeatGroup>} */
  const groups = new Map();
  for (const row of rows) {
    const group = groups.get(row.group) ?? { name: row.group, rows: [], ratio: NaN };
    group.rows.push(row);
    if (!(group.ratio >= row.ratio)) group.ratio = row.ratio;
    groups.set(row.group, group);
  }
  const made = [...groups.values()];
  if (order === "cause") {
    for (const group of made) {
      group.name ||= made.length > 1 ? "others" : "no cause";
      group.rows.sort((x, y) => x.first - y.first);
    }
  }
  return made;
}

/**
 * @param {Heat} heat
 * @param {Float32Array} ratio
 * @param {number} at
 * @param {"rank" | "node" | "cause"} order
 * @param {Map<number, WorkerCause>} causes
 * @returns {HeatRow}
 */
function rowOf(heat, ratio, at, order, causes) {
  const first = at * heat.together;
  const last = Math.min(heat.world, first + heat.together) - 1;
  const width = heat.step.length;
  const known = Array.from(ratio.subarray(at * width, (at + 1) * width)).filter((value) => !Number.isNaN(value));
  const row = { at, first, last, group: "", ratio: medianOf(known) };
  const cause = worst(row, causes);
  // The verdict's factor is that of now, at equal load; a rank may have been slow in a part of the range only.
  if (cause?.cause === "node" && cause.factor !== null) row.ratio = cause.factor;
  if (order === "node") row.group = nodesOf(row, causes);
  if (order === "cause" && cause && cause.cause !== "none") row.group = why({ ...cause, factor: null });
  return row;
}

/**
 * The rank of a row for which others wait most.
 * @param {{first: number, last: number}} row
 * @param {Map<number, WorkerCause>} causes
 */
function worst({ first, last }, causes) {
  /** @type {WorkerCause | undefined} */
  let most;
  for (let rank = first; rank <= last; rank++) {
    const cause = causes.get(rank);
    if (cause && (!most || (cause.cause !== "none") > (most.cause !== "none") || ((cause.cause !== "none") === (most.cause !== "none") && cause.caused > most.caused))) most = cause;
  }
  return most;
}

/**
 * @param {{first: number, last: number}} row
 * @param {Map<number, WorkerCause>} causes
 */
function nodesOf({ first, last }, causes) {
  const [begin, end] = [causes.get(first)?.on_node ?? "", causes.get(last)?.on_node ?? ""];
  return begin === end ? begin : `${begin} – ${end}`;
}

/**
 * The ranks of a row in words: "rank 3", "ranks 8–11".
 * @param {{first: number, last: number}} row
 */
export function ranksOf({ first, last }) {
  return first === last ? `rank ${integer(first)}` : `ranks ${integer(first)}–${integer(last)}`;
}

/**
 * A row's or group's verdict: "1.9× slower", "even", or nothing while it is unknown.
 * @param {number} ratio
 */
export function verdictOf(ratio) {
  if (Number.isNaN(ratio)) return "";
  return ratio >= QUIET ? `${ratio.toFixed(1)}× slower` : "even";
}

/** @param {number} ratio */
export const isSlow = (ratio) => ratio >= QUIET;

/**
 * Whether the groups have names, and room for them.
 * @param {HeatGroup[]} groups
 */
export const headed = (groups) => groups.length <= MOST_HEADED && groups.some(({ name }) => name !== "");

/**
 * The lower median, as in verdicts: of two halves, the faster is the typical one.
 * @param {number[]} values
 */
function medianOf(values) {
  if (!values.length) return NaN;
  values.sort((x, y) => x - y);
  return values[(values.length - 1) >> 1];
}
