// The heat map's numbers: how the server sends them, and how further steps join them.
import { quantile } from "./format.js";

const ROWS = 256; // of a heat map, at most; as on the server
const CODES = 254; // steps of the server's logarithmic scale; code 0: unknown
/** @type {[BandName, number][]} */
const COMPUTE = [["compute_p10", 0.1], ["compute_p50", 0.5], ["compute_p90", 0.9]];
/** @type {[BandName, number][]} */
const SHARE = [["share_min", 0], ["share_p50", 0.5], ["share_p90", 0.9], ["share_max", 1]];
/** @type {BandName[]} */
export const BANDS = [...COMPUTE, ...SHARE].map(([name]) => name);

/**
 * Ranks in one row of the heat map of a run of `world` ranks.
 * @param {number} world
 */
export const togetherOf = (world) => Math.max(1, Math.ceil(world / ROWS));

/**
 * The heat map of an answer of `GET view`.
 * @param {HeatAnswer} answer
 * @returns {Heat}
 */
export function heatOf({ world, together, rows, bucket, step, low, high, cells, ...bands }) {
  const scale = Array.from({ length: 256 }, (_, code) => (code ? low * (high / low) ** ((code - 1) / CODES) : NaN));
  if (!(high > 0)) scale.fill(0, 1);
  const values = Float32Array.from(atob(cells), (letter) => scale[letter.charCodeAt(0)]);
  return { world, together, rows, bucket, step, values, bands: pick(bands) };
}

/**
 * The bands of an object that has more.
 * @param {Record<string, any>} from
 * @returns {Record<BandName, any>}
 */
function pick(from) {
  return /** @type {Record<BandName, any>} */ (Object.fromEntries(BANDS.map((name) => [name, from[name]])));
}

/**
 * One column of a heat map.
 * @param {Heat} heat
 * @param {number} at
 * @returns {HeatColumn}
 */
export function heatAt(heat, at) {
  const width = heat.step.length;
  const values = Float32Array.from({ length: heat.rows }, (_, row) => heat.values[row * width + at]);
  return { values, ...pick(Object.fromEntries(BANDS.map((name) => [name, heat.bands[name][at]]))) };
}

/**
 * A heat map of columns.
 * @param {number} world
 * @param {number} bucket steps in a column
 * @param {[number, HeatColumn][]} columns first step and column, ascending
 * @returns {Heat}
 */
export function heatTable(world, bucket, columns) {
  const together = togetherOf(world);
  const rows = Math.ceil(world / together);
  const width = columns.length;
  const values = new Float32Array(rows * width).fill(NaN);
  columns.forEach(([, column], at) => {
    const height = Math.min(rows, column.values.length);
    for (let row = 0; row < height; row++) values[row * width + at] = column.values[row];
  });
  const bands = /** @type {Bands} */ ({});
  for (const name of BANDS) bands[name] = columns.map(([, column]) => column[name]);
  return { world, together, rows, bucket, step: columns.map(([step]) => step), values, bands };
}
