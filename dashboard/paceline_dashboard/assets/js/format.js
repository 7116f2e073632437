// Numbers with units. A missing number is an en dash, never 0 or NaN.
/**
 * @param {number | null | undefined} value
 * @returns {value is number}
 */
const known = (value) => typeof value === "number" && Number.isFinite(value);

/**
 * Three significant digits, with thousands separators and without an exponent.
 * @param {number | null | undefined} value
 */
export function number(value) {
  if (!known(value)) return "–";
  const size = Math.abs(value);
  const digits = size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  return value.toLocaleString("en", { minimumFractionDigits: 0, maximumFractionDigits: digits });
}

/** @param {number | null | undefined} value */
export function integer(value) {
  return known(value) ? Math.round(value).toLocaleString("en") : "–";
}

/**
 * A duration in a suitable unit, always with three significant digits so that its width stays the same.
 * @param {number | null | undefined} value
 */
export function seconds(value) {
  if (!known(value)) return "–";
  if (Math.abs(value) < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (Math.abs(value) < 0.1) return `${(value * 1e3).toFixed(1)} ms`;
  if (Math.abs(value) < 1) return `${(value * 1e3).toFixed(0)} ms`;
  if (Math.abs(value) < 120) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  if (Math.abs(value) < 7200) return `${(value / 60).toFixed(1)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

/** @param {number | null | undefined} value */
export function ratio(value) {
  return known(value) ? value.toFixed(2) : "–";
}

/** @param {number | null | undefined} value */
export function percent(value) {
  if (!known(value)) return "–";
  const shown = value * 100;
  const digits = shown.toFixed(Math.abs(shown) < 10 ? 1 : 0);
  return `${digits === "-0.0" ? "0.0" : digits} %`;
}

/** @param {number | null | undefined} value */
export function factor(value) {
  return known(value) ? `${value.toFixed(2)}×` : "–";
}

/** @param {number | null | undefined} value */
export function bytes(value) {
  if (!known(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  for (; value >= 1024 && unit < units.length - 1; unit++) value /= 1024;
  return `${value.toFixed(value < 10 && unit > 0 ? 1 : 0)} ${units[unit]}`;
}

/**
 * A Unix time in the reader's time zone; with the date if it is not today.
 * @param {number | null | undefined} value
 */
export function moment(value) {
  if (!known(value)) return "–";
  const at = new Date(value * 1000);
  const time = at.toLocaleTimeString("en-GB");
  return at.toDateString() === new Date().toDateString()
    ? time
    : `${at.toLocaleDateString("en-CA")} ${time.slice(0, 5)}`;
}

/**
 * @param {number} count
 * @param {string} noun
 * @param {string} many the noun of several
 */
export function plural(count, noun, many = `${noun}s`) {
  return `${integer(count)} ${count === 1 ? noun : many}`;
}

/** @param {(number | null | undefined)[]} values */
export function mean(values) {
  const good = values.filter(known);
  return good.length ? good.reduce((sum, value) => sum + value, 0) / good.length : null;
}

/** @param {ArrayLike<number | null | undefined>} values */
export function median(values) {
  return quantile(values, 0.5);
}

/**
 * Quantile q of the known values, interpolated; null when there is none.
 * @param {ArrayLike<number | null | undefined>} values
 * @param {number} q
 */
export function quantile(values, q) {
  const sorted = Array.from(values).filter(known).sort((x, y) => x - y);
  if (!sorted.length) return null;
  const at = (sorted.length - 1) * q;
  const low = Math.floor(at);
  return sorted[low] + ((sorted[low + 1] ?? sorted[low]) - sorted[low]) * (at - low);
}
