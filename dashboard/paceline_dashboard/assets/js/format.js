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

/**
 * "3 h 05 min": how long something lasted, in words.
 * @param {number} value seconds
 */
export function duration(value) {
  if (value < 90) return `${Math.max(1, Math.round(value))} s`;
  const minutes = Math.round(value / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.round(minutes / 1440)} days`;
}

/** @param {number} hours */
export function workerHours(hours) {
  if (hours * 60 < 1) return `${Math.max(1, Math.round(hours * 3600))} worker-seconds`;
  if (hours < 1) return plural(Math.round(hours * 60), "worker-minute");
  return `${number(hours)} worker-hours`;
}

/**
 * What worker-hours cost: "7.75 EUR".
 * @param {number} hours
 * @param {{amount: number, currency: string}} price of one
 */
export function money(hours, { amount: ofOne, currency }) {
  return amount(hours * ofOne, currency);
}

/**
 * An amount of money: "7.75 EUR".
 * @param {number} value
 * @param {string} currency
 */
export function amount(value, currency) {
  return `${value.toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 })} ${currency}`;
}

/**
 * A Unix time as "16:21"; with the weekday if it is not today.
 * @param {number} value
 */
export function clock(value) {
  const at = new Date(value * 1000);
  const time = at.toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
  return at.toDateString() === new Date().toDateString() ? time : `${at.toLocaleDateString("en-GB", { weekday: "short" })} ${time}`;
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
 * A rank's device in a few words: of a CPU its cores, of which threads may use fewer.
 * @param {RankDevice | null | undefined} value of `GET workers`
 */
export function device(value) {
  if (!value) return "–";
  const used = value.threads > 0 ? Math.min(value.threads, value.cores) : value.cores;
  const cores = used < value.cores ? `${used} of ${plural(value.cores, "core")}` : plural(value.cores, "core");
  const words = value.kind === "cpu" ? `CPU, ${cores}` : value.name;
  return value.emulated ? `${words} (emulated)` : words;
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
 * How long ago a Unix time was: "5 s ago".
 * @param {number} value
 */
export function ago(value) {
  const past = Math.max(0, Date.now() / 1000 - value);
  if (past < 60) return `${Math.round(past)} s ago`;
  return past < 3600 ? `${Math.round(past / 60)} min ago` : `at ${moment(value)}`;
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
