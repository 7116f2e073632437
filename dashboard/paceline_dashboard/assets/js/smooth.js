// Rolling medians and bands, and points that a chart can do without.

/** @typedef {{low: Column, middle: Column, high: Column}} Rolling p10, median and p90 around each place */

/**
 * The p10, the median and the p90 of the `window` values around each one; of fewer at the ends. Null where the value is.
 * @param {Column} values
 * @param {number} window
 * @returns {Rolling}
 */
export function rolling(values, window) {
  if (window <= 1) return { low: values, middle: values, high: values };
  const half = Math.floor(window / 2);
  /** @type {number[]} */
  const sorted = [];
  const enter = (/** @type {number | null | undefined} */ value) => {
    if (value !== null && value !== undefined) sorted.splice(place(sorted, value), 0, value);
  };
  const leave = (/** @type {number | null | undefined} */ value) => {
    if (value !== null && value !== undefined) sorted.splice(place(sorted, value), 1);
  };
  for (let i = 0; i < half; i++) enter(values[i]);
  const made = /** @type {Rolling} */ ({ low: [], middle: [], high: [] });
  values.forEach((value, at) => {
    enter(values[at + half]);
    if (at > half) leave(values[at - half - 1]);
    made.low.push(value === null ? null : quantileAt(sorted, 0.1));
    made.middle.push(value === null ? null : quantileAt(sorted, 0.5));
    made.high.push(value === null ? null : quantileAt(sorted, 0.9));
  });
  return made;
}

/**
 * The first place in ascending numbers whose value is not less.
 * @param {number[]} sorted
 * @param {number} value
 */
function place(sorted, value) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

/**
 * @param {number[]} sorted
 * @param {number} part
 */
function quantileAt(sorted, part) {
  const at = (sorted.length - 1) * part;
  const low = Math.floor(at);
  return sorted[low] + ((sorted[low + 1] ?? sorted[low]) - sorted[low]) * (at - low);
}

/**
 * Which places to draw, about `most`: of each group of neighbours those with the least and the greatest value, so that no
 * spike is lost, and one without a value, so that no gap is.
 * @param {Column} values
 * @param {number} most
 * @returns {number[]} ascending
 */
export function kept(values, most) {
  if (values.length <= most) return values.map((_, at) => at);
  const size = Math.ceil((2 * values.length) / most);
  /** @type {number[]} */
  const places = [];
  for (let start = 0; start < values.length; start += size) {
    let [low, high, gap] = [-1, -1, -1];
    for (let i = start; i < Math.min(start + size, values.length); i++) {
      const value = values[i];
      if (value === null || value === undefined) gap = i;
      else {
        if (low < 0 || value < Number(values[low])) low = i;
        if (high < 0 || value > Number(values[high])) high = i;
      }
    }
    const some = new Set([low, high, gap].filter((i) => i >= 0));
    places.push(...[...some].sort((x, y) => x - y));
  }
  return places;
}

/**
 * Places where steps are missing before one: a line must not bridge them.
 * @param {number[]} step
 * @param {number} bucket
 * @returns {Set<number>}
 */
export function breaks(step, bucket) {
  const places = new Set();
  for (let i = 1; i < step.length; i++) if (step[i] - step[i - 1] > 1.5 * bucket) places.add(i);
  return places;
}
