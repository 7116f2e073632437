// What ranks did within a few steps: a bar for each phase, drawn as SVG.
import { round } from "./axis.js";
import { byId, text } from "./dom.js";
import { integer, seconds } from "./format.js";

/** @type {[phase: string, column: string][]} */
const PHASES = [["data", "data_s"], ["compute", "compute_s"], ["wait", "wait_s"], ["reduce", "reduce_s"], ["rest", "rest_s"]];
const [LEFT, RIGHT, TOP, ROW, BELOW] = [74, 12, 20, 22, 22]; // px
const NODE_PX = 5; // between ranks of different nodes
const LEAST_WORDS_PX = 46; // a bar that is narrower has no room for its time
const SVG = "http://www.w3.org/2000/svg";

/**
 * The bars of an answer of `GET timeline`, in seconds since its first step began.
 * @param {any} answer
 * @returns {{rank: number, step: number, phase: string, from: number, to: number}[]}
 */
export function bars(answer) {
  const zero = Math.min(...answer.began_at.flat().filter((/** @type {number | null} */ at) => at !== null));
  return answer.ranks.flatMap((/** @type {number} */ rank, /** @type {number} */ row) =>
    answer.step.flatMap((/** @type {number} */ step, /** @type {number} */ at) => {
      const began = answer.began_at[row][at];
      if (began === null) return [];
      let end = began - zero;
      return PHASES.flatMap(([phase, column]) => {
        const from = end;
        end += answer[column][row][at];
        return end > from ? [{ rank, step, phase, from, to: end }] : [];
      });
    }));
}

/**
 * Draws an answer of `GET timeline`.
 * @param {any} answer
 * @param {number} rank the page's
 * @param {(rank: number) => string} nodeOf
 */
export function drawGantt(answer, rank, nodeOf) {
  const place = byId("gantt");
  const made = bars(answer);
  text("gantt-empty", made.length ? "" : "No records of these steps.");
  if (!made.length) return place.replaceChildren();
  const width = place.clientWidth;
  const last = Math.max(...made.map(({ to }) => to));
  const x = (/** @type {number} */ at) => LEFT + (at / last) * (width - LEFT - RIGHT);
  const tops = topsOf(answer.ranks, nodeOf);
  const height = Math.max(...tops.values()) + ROW + BELOW;
  const svg = node("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  svg.append(hatching());
  for (const step of answer.step) {
    const begins = Math.min(...made.filter((bar) => bar.step === step).map(({ from }) => from));
    if (Number.isFinite(begins)) svg.append(node("path", { d: `M${x(begins)} 4V${height - BELOW}`, class: "gantt-step" }), words(x(begins) + 4, 13, `step ${integer(step)}`, "gantt-head"));
  }
  for (const bar of made) svg.append(...barOf(bar, x, /** @type {number} */ (tops.get(bar.rank)), bar.rank === rank));
  for (const [other, top] of tops) svg.append(words(LEFT - 8, top + 15, `rank ${integer(other)}`, other === rank ? "gantt-rank own" : "gantt-rank"));
  const own = tops.get(rank);
  if (own !== undefined) svg.append(node("rect", { x: 4, y: own + 1, width: width - 8, height: ROW - 2, rx: 3, class: "gantt-own" }));
  const ticks = round(0, last, 8);
  const unit = last < 1 ? 1000 : 1;
  ticks.forEach((at, i) => svg.append(words(x(at), height - 5, `${integer(at * unit * 1000) === "0" ? "0" : Number((at * unit).toPrecision(6)).toLocaleString("en")}${i === ticks.length - 1 ? (unit === 1 ? " s" : " ms") : ""}`, "gantt-tick")));
  place.replaceChildren(svg);
  place.setAttribute("aria-label", sentence(answer, rank));
}

/**
 * Where each rank's row begins, with a space where another node begins.
 * @param {number[]} ranks
 * @param {(rank: number) => string} nodeOf
 */
function topsOf(ranks, nodeOf) {
  /** @type {Map<number, number>} */
  const tops = new Map();
  let top = TOP;
  ranks.forEach((rank, at) => {
    if (at > 0 && nodeOf(rank) !== nodeOf(ranks[at - 1])) top += NODE_PX;
    tops.set(rank, top);
    top += ROW;
  });
  return tops;
}

/**
 * @param {{rank: number, step: number, phase: string, from: number, to: number}} bar
 * @param {(at: number) => number} x
 * @param {number} top
 * @param {boolean} own
 */
function barOf({ rank, step, phase, from, to }, x, top, own) {
  const wide = Math.max(0.5, x(to) - x(from) - 0.7);
  const rect = node("rect", { x: x(from), y: top + 3, width: wide, height: ROW - 7, rx: 1.5, class: `phase ${phase}` });
  const title = node("title", {});
  title.textContent = `rank ${rank}, step ${step}: ${phase} ${seconds(to - from)}`;
  rect.append(title);
  if (!own || phase !== "compute" || wide < LEAST_WORDS_PX) return [rect];
  return [rect, words(x(from) + wide / 2, top + 15, seconds(to - from), "gantt-own-time")];
}

function hatching() {
  const defs = node("defs", {});
  const pattern = node("pattern", { id: "gantt-hatching", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  pattern.append(node("rect", { width: 2.5, height: 6, class: "gantt-line" }));
  defs.append(pattern);
  return defs;
}

/**
 * For screen readers: what the rank did in the newest of the steps.
 * @param {any} answer
 * @param {number} rank
 */
function sentence(answer, rank) {
  const row = answer.ranks.indexOf(rank);
  const at = answer.step.length - 1;
  const parts = PHASES.map(([phase, column]) => `${phase} ${seconds(answer[column][row]?.[at])}`);
  return `Rank ${rank} in step ${answer.step[at]}: ${parts.join(", ")}`;
}

/**
 * @param {number} x
 * @param {number} y
 * @param {string} value
 * @param {string} name
 */
function words(x, y, value, name) {
  const made = node("text", { x, y, class: name });
  made.textContent = value;
  return made;
}

/**
 * @param {string} tag
 * @param {Record<string, any>} attributes
 */
function node(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  return made;
}
