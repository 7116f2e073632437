// Views of long ranges: from an answer of `GET view`, brought up to date with the page's newest steps.
import { cellsOf, CELLS } from "./data.js";
import { BANDS, heatAt, heatOf, heatTable } from "./heat.js";
import { mean } from "./format.js";

/**
 * The view of an answer of `GET view`.
 * @param {ViewAnswer} answer
 * @param {number} world
 * @returns {View}
 */
export function viewOf({ steps, worker_steps: table, heat, coasts }, world) {
  const cells = cellsOf(table);
  return {
    bucket: steps.bucket,
    cellBucket: table.bucket,
    step: steps.step,
    metrics: steps,
    cellStep: table.step,
    cells: table.step.map((step) => /** @type {Cell} */ (cells.get(step))),
    ranks: table.ranks,
    world,
    heat: heatOf(heat),
    coasts: coasts.map(([first, last]) => [first, last + 1]),
  };
}

/**
 * A view with the steps after `end`, its last one, from a run's data: no step is lost or counted twice.
 * Of a bucket that goes on, least and greatest values are exact, and means are weighed by steps.
 * @param {View} view
 * @param {number} end
 * @param {import("./data.js").RunData} data
 * @param {number} to the last step to show
 * @returns {View}
 */
export function extended(view, end, data, to) {
  const tail = data.view(end + 1, to, view.world);
  if (!tail.step.length && !tail.heat?.step.length) return view;
  const metrics = withSteps(view, end, tail);
  const [cellStep, cells] = withCells(view, end, tail);
  const coasts = [...view.coasts, ...tail.coasts.filter(([, last]) => last > end + 1)];
  return { ...view, step: metrics.step, metrics, cellStep, cells, heat: withHeat(view, end, tail), coasts };
}

/**
 * Places of ascending steps by bucket.
 * @param {number[]} steps
 * @param {number} bucket
 */
function groups(steps, bucket) {
  /** @type {Map<number, number[]>} */
  const places = new Map();
  steps.forEach((step, at) => {
    const start = step - (step % bucket);
    const known = places.get(start);
    if (known) known.push(at);
    else places.set(start, [at]);
  });
  return places;
}

/**
 * The mean of `before` values, of which `old` is the mean, and of further ones.
 * @param {number | null | undefined} old
 * @param {number} before
 * @param {(number | null)[]} values
 */
function weighed(old, before, values) {
  const more = mean(values);
  if (old === null || old === undefined || Number.isNaN(old) || !before) return more;
  return more === null ? old : (old * before + more * values.length) / (before + values.length);
}

/**
 * @param {View} view
 * @param {number} end
 * @param {View} tail
 */
function withSteps({ metrics: columns, bucket }, end, tail) {
  const names = Object.keys(columns).filter((name) => Array.isArray(columns[name]));
  const metrics = { ...columns };
  for (const name of names) metrics[name] = [...columns[name]];
  for (const [start, places] of groups(tail.step, bucket)) {
    const last = metrics.step.length - 1;
    const joins = last >= 0 && metrics.step[last] >= start;
    const at = joins ? last : last + 1;
    const before = joins ? end - metrics.step[last] + 1 : 0;
    for (const name of names) {
      const old = joins ? metrics[name][at] : null;
      metrics[name][at] = joinedMetric(name, old, before, tail.metrics, places);
    }
  }
  return metrics;
}

/**
 * @param {string} name of a column of `GET view`: one of a single step's, or with `_min` or `_max` after it
 * @param {number | null} old the value of the bucket's first steps
 * @param {number} before their number
 * @param {Record<string, any>} columns of single steps
 * @param {number[]} places which of them follow
 */
function joinedMetric(name, old, before, columns, places) {
  const own = columns[name] ? name : name.slice(0, -"_min".length);
  const values = places.map((place) => columns[own]?.[place] ?? null);
  if (name === "step" || name === "epoch") return before ? old : values[0];
  if (name === "ended_at") return values.at(-1);
  if (own === name) return weighed(old, before, values);
  const known = [old, ...values].filter((value) => value !== null && value !== undefined);
  if (!known.length) return null;
  return name.endsWith("_min") ? Math.min(...known) : Math.max(...known);
}

/**
 * @param {View} view
 * @param {number} end
 * @param {View} tail
 * @returns {[number[], Cell[]]}
 */
function withCells({ cellStep, cells, cellBucket }, end, tail) {
  const steps = [...cellStep];
  const all = [...cells];
  for (const [start, places] of groups(tail.cellStep, cellBucket)) {
    const joins = steps.at(-1) === start;
    const old = joins ? all.at(-1) : undefined;
    const cell = joinedCell(old, end - start + 1, places.map((place) => tail.cells[place]));
    if (joins) all[all.length - 1] = cell;
    else {
      steps.push(start);
      all.push(cell);
    }
  }
  return [steps, all];
}

/**
 * @param {Cell | undefined} old
 * @param {number} before
 * @param {Cell[]} further
 */
function joinedCell(old, before, further) {
  const cell = /** @type {Cell} */ ({});
  const width = Math.max(...[old, ...further].map((each) => each?.compute_s.length ?? 0));
  const known = (/** @type {number | undefined} */ value) => (value === undefined || Number.isNaN(value) ? null : value);
  const each = (/** @type {(rank: number) => number | null} */ of) => Float32Array.from({ length: width }, (_, rank) => of(rank) ?? NaN);
  for (const name of CELLS) {
    cell[name] = each((rank) => weighed(old?.[name][rank], before, further.map((part) => known(part[name][rank]))));
  }
  const extreme = (/** @type {"compute_s_min" | "compute_s_max"} */ name, /** @type {(...values: number[]) => number} */ of) =>
    each((rank) => {
      const values = [known(old?.[name]?.[rank]), ...further.map((part) => known(part.compute_s[rank]))];
      const there = values.filter((value) => value !== null);
      return there.length ? of(...there) : null;
    });
  cell.compute_s_min = extreme("compute_s_min", Math.min);
  cell.compute_s_max = extreme("compute_s_max", Math.max);
  return cell;
}

/**
 * @param {View} view
 * @param {number} end
 * @param {View} tail
 * @returns {Heat | null}
 */
function withHeat({ heat }, end, { heat: tail, world }) {
  if (!heat || !tail?.step.length) return heat;
  /** @type {[number, HeatColumn][]} */
  const columns = [];
  let kept = heat.step.length;
  for (const [start, places] of groups(tail.step, heat.bucket)) {
    const joins = heat.step.at(-1) === start;
    if (joins) kept = heat.step.length - 1;
    const old = joins ? heatAt(heat, kept) : undefined;
    columns.push([start, joinedColumn(old, end - start + 1, places.map((place) => heatAt(tail, place)))]);
  }
  return beside(heat, kept, heatTable(world, heat.bucket, columns));
}

/**
 * @param {HeatColumn | undefined} old
 * @param {number} before
 * @param {HeatColumn[]} further
 */
function joinedColumn(old, before, further) {
  const all = old ? [old, ...further] : further;
  const column = /** @type {HeatColumn} */ ({ values: Float32Array.from(all[0].values) });
  for (const { values } of all) {
    values.forEach((value, row) => {
      if (!(column.values[row] >= value) && !Number.isNaN(value)) column.values[row] = value;
    });
  }
  for (const name of BANDS) column[name] = weighed(old?.[name], before, further.map((each) => each[name]));
  return column;
}

/**
 * The first `kept` columns of a heat map, and then those of another one.
 * @param {Heat} first
 * @param {number} kept
 * @param {Heat} second
 * @returns {Heat}
 */
function beside(first, kept, second) {
  const width = kept + second.step.length;
  const rows = Math.max(first.rows, second.rows);
  const values = new Float32Array(rows * width).fill(NaN);
  const put = (/** @type {Heat} */ heat, /** @type {number} */ count, /** @type {number} */ at) => {
    for (let row = 0; row < heat.rows; row++) {
      const start = row * heat.step.length;
      values.set(heat.values.subarray(start, start + count), row * width + at);
    }
  };
  put(first, kept, 0);
  put(second, second.step.length, kept);
  const bands = /** @type {Bands} */ ({});
  for (const name of BANDS) bands[name] = [...first.bands[name].slice(0, kept), ...second.bands[name]];
  return { ...first, rows, step: [...first.step.slice(0, kept), ...second.step], values, bands };
}
