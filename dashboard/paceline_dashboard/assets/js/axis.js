// The x axis that all charts over steps and the heat map share: steps, or the wall clock.
import { integer } from "./format.js";

const WIDE_PX = 560; // a narrower chart has no room for names beside its lines
const MOST_TICKS = 9;
const EPOCHS_SHARE = 0.5; // epochs are ticked if their starts lie as far apart, as a share of the axis
const DURATIONS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400];

/**
 * The space beside the plot, in px: the same for all charts, so that a step lies on one line from top to bottom.
 * @param {number} width of the whole chart
 */
export function margins(width) {
  return width < WIDE_PX ? { left: 50, right: 10 } : { left: 74, right: 92 };
}

/** Steps from `from` to `to`, both shown in full. */
export class StepAxis {
  /**
   * @param {number} from
   * @param {number} to
   * @param {{step: number[], metrics: Record<string, any>}} view with the epochs of its steps
   */
  constructor(from, to, view = { step: [], metrics: {} }) {
    this.from = from;
    this.to = to;
    this.view = view;
    this.even = true; // each step is as wide as any other
  }

  /** @returns {[number, number]} */
  get range() {
    return [this.from - 0.5, this.to + 0.5];
  }

  /**
   * Where a step is on the axis; parts of steps, too.
   * @param {number} step
   */
  at(step) {
    return step;
  }

  /**
   * Which step is at a place.
   * @param {number | string} x
   */
  step(x) {
    return Number(x);
  }

  /**
   * Round numbers, or the first steps of epochs if there are some.
   * @returns {{values: number[], words: string[], title: string}}
   */
  get ticks() {
    const epochs = this.#epochs();
    const wide = epochs.length > 1 && /** @type {number} */ (epochs.at(-1)) - epochs[0] >= EPOCHS_SHARE * (this.to - this.from);
    const values = wide ? thinned(epochs, (this.to - this.from) / MOST_TICKS) : round(this.from, this.to).filter(Number.isInteger);
    return { values, words: values.map(integer), title: wide ? "step, by epoch" : "step" };
  }

  /** First steps of the epochs that begin in the range. */
  #epochs() {
    const { step, metrics } = this.view;
    const epoch = metrics.epoch ?? [];
    return step.filter((at, i) => at >= this.from && at <= this.to && (i > 0 ? epoch[i] !== epoch[i - 1] : at === 0));
  }
}

/** The same steps by the time at which they ended, in ms of the reader's clock, as Plotly's date axes take them. */
export class ClockAxis extends StepAxis {
  /**
   * @param {number} from
   * @param {number} to
   * @param {{step: number[], metrics: Record<string, any>}} view with the ends of its steps
   */
  constructor(from, to, view) {
    super(from, to, view);
    this.even = false;
    const shiftMs = new Date(view.metrics.ended_at[0] * 1000).getTimezoneOffset() * 60_000;
    /** @type {number[]} */
    this.ends = [];
    // Steps that were trained again have ended later than some that follow.
    for (const end of view.metrics.ended_at) this.ends.push(Math.max(end * 1000 - shiftMs, this.ends.at(-1) ?? -Infinity));
  }

  get range() {
    return /** @type {[number, number]} */ ([this.at(this.from - 0.5), this.at(this.to + 0.5)]);
  }

  /** @param {number} step */
  at(step) {
    return between(this.view.step, this.ends, step);
  }

  /** @param {number | string} x ms, or a date as Plotly gives it back */
  step(x) {
    return between(this.ends, this.view.step, typeof x === "string" ? Date.parse(`${x.replace(" ", "T")}Z`) : x);
  }

  get ticks() {
    const [first, last] = this.range;
    const lengthS = (last - first) / 1000;
    const every = 1000 * (DURATIONS_S.find((length) => lengthS / length <= MOST_TICKS) ?? 86_400 * Math.ceil(lengthS / 86_400 / MOST_TICKS));
    const values = [];
    for (let at = Math.ceil(first / every) * every; at <= last; at += every) values.push(at);
    return { values, words: values.map((at) => clock(at, every)), title: "time" };
  }
}

/**
 * The axis of a view: the wall clock if it is asked for and the view has times.
 * @param {"steps" | "clock"} kind
 * @param {number} from
 * @param {number} to
 * @param {View} view
 * @returns {StepAxis}
 */
export function axisOf(kind, from, to, view) {
  const timed = kind === "clock" && view.step.length > 1 && Number(view.metrics.ended_at?.at(-1)) > Number(view.metrics.ended_at?.[0]);
  return timed ? new ClockAxis(from, to, view) : new StepAxis(from, to, view);
}

/**
 * Interpolated; beyond the ends with the mean slope.
 * @param {number[]} xs ascending, at least 2
 * @param {number[]} ys
 * @param {number} x
 */
function between(xs, ys, x) {
  const last = xs.length - 1;
  if (x <= xs[0] || x >= xs[last]) {
    const end = x <= xs[0] ? 0 : last;
    return ys[end] + ((x - xs[end]) * (ys[last] - ys[0])) / (xs[last] - xs[0]);
  }
  let [low, high] = [0, last];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (xs[middle] <= x) low = middle;
    else high = middle;
  }
  return ys[low] + ((x - xs[low]) * (ys[high] - ys[low])) / (xs[high] - xs[low] || 1);
}

/**
 * Round numbers of a range, about as many as there is room for.
 * @param {number} from
 * @param {number} to
 * @param {number} most
 * @returns {number[]}
 */
export function round(from, to, most = MOST_TICKS) {
  const rough = Math.max(to - from, 1e-12) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const every = power * /** @type {number} */ ([1, 2, 5, 10].find((part) => part * power >= rough * (1 - 1e-9)));
  const values = [];
  for (let at = Math.ceil(from / every - 1e-9); at * every <= to + every * 1e-9; at++) values.push(Number((at * every).toPrecision(12)));
  return values;
}

/**
 * Each so many-th value, so that they are `least` apart.
 * @param {number[]} values
 * @param {number} least
 */
function thinned(values, least) {
  const every = Math.ceil((least * (values.length - 1)) / (values[values.length - 1] - values[0]));
  return values.filter((_, at) => at % every === 0);
}

/**
 * @param {number} at ms
 * @param {number} every ms
 */
function clock(at, every) {
  const words = new Date(at).toISOString();
  return every >= 86_400_000 ? words.slice(0, 10) : words.slice(11, every < 60_000 ? 19 : 16);
}
