// The data of a run on its page: the newest steps, each by itself, and the marks of every chart.
//
//   data.start(answer)                  takes `GET view?last=`
//   data.add(answer)                    takes `GET view?since=`; what comes twice counts once
//   data.view(from, to, world)          a `View` to draw (types.d.ts), with its heat map
//
// views.js makes the same `View` of a long range, and brings it up to date with the steps here.
import { heatAt, heatOf, heatTable } from "./heat.js";

export const MOST_STEPS = 2000;
export const MOST_LINES = 16; // with more workers, the heat map and its quantiles tell of them
const MOST_COLUMNS = 512; // steps of the heat map and of workers' lines
const MOST_CHOICES = 20;
const MOST_RECENT = 20; // segments: loaders read ahead, so some have not begun
/** @type {CellName[]} */
export const CELLS = ["compute_s", "ett_s", "share"];
/** @type {("compute_s_min" | "compute_s_max")[]} */
const EXTREMES = ["compute_s_min", "compute_s_max"];

/**
 * Rows of an object of columns.
 * @param {Partial<StepColumns>} columns
 * @returns {Generator<Row>}
 */
export function* rows(columns) {
  const names = Object.keys(columns).filter((name) => Array.isArray(columns[name]));
  const length = columns.step?.length ?? 0;
  for (let i = 0; i < length; i++) {
    const row = /** @type {Row} */ ({});
    for (const name of names) row[name] = columns[name][i];
    yield row;
  }
}

export class RunData {
  constructor() {
    this.going = true; // the run has not ended
    /** @type {ChosenSync[]} */
    this.chosen = []; // steps where policies chose another synchronisation, from `GET synchronisation`
    this.clear();
  }

  clear() {
    /** @type {Map<number, Row>} */
    this.steps = new Map(); // by step: rows of `GET steps`
    /** @type {Map<number, Cell>} */
    this.cells = new Map(); // step → {compute_s, ett_s, share}: arrays by rank, NaN where unknown; of at most 16 workers
    /** @type {Map<number, HeatColumn>} */
    this.heat = new Map(); // step → its column of the heat map
    /** @type {Set<number>} */
    this.known = new Set();
    /** @type {number[]} */
    this.ranks = []; // ranks with cells, ascending
    /** @type {Switch[]} */
    this.switches = [];
    /** @type {Span[]} */
    this.coasts = []; // [first step, one past the last) of steps without a controller; disjoint, ascending; not older than `steps`
    /** @type {Segment | null} */
    this.segment = null; // the newest
    /** @type {Segment[]} */
    this.recent = []; // the newest segments, ascending
    /** @type {number | undefined} */
    this.current = undefined; // the newest step that counts: a restarted run trains steps again
    /** @type {SyncChoice[]} */
    this.choices = []; // the newest choices of synchronisations by policies, ascending
    /** @type {number | undefined} */
    this.newest = undefined;
    /** @type {number} */
    this.begins = 0; // the run's first step; above 0 for a resumed run
  }

  /** The newest complete step's number, or -1. */
  get latest() {
    return this.newest ?? -1;
  }

  /**
   * Takes the newest steps, from `GET view?last=`.
   * @param {ViewAnswer} answer
   */
  start(answer) {
    this.clear();
    this.begins = answer.begins ?? 0;
    this.add(answer);
  }

  /**
   * Takes what has been new since an earlier answer.
   * @param {ViewAnswer} answer
   */
  add(answer) {
    this.addSteps(answer.steps);
    this.current = answer.run.step ?? this.current;
    this.addTable(answer.worker_steps);
    this.addHeat(answer.heat);
    for (const [first, last] of answer.coasts) this.#addCoast(first, last + 1);
    for (const segment of answer.segments) this.addSegment(segment);
    for (const change of answer.switches) this.addSwitch(change);
  }

  /** @param {Partial<StepColumns>} columns */
  addSteps(columns) {
    for (const row of rows(columns)) {
      this.steps.set(row.step, row);
      if (this.newest === undefined || row.step > this.newest) this.newest = row.step;
      this.current = row.step;
    }
    if (!this.#forget(this.steps, MOST_STEPS)) return;
    const oldest = sorted(this.steps)[0];
    this.coasts = this.coasts.filter(([, end]) => end > oldest);
  }

  /**
   * Takes columns of the heat map.
   * @param {HeatAnswer} answer
   */
  addHeat(answer) {
    const heat = heatOf(answer);
    heat.step.forEach((step, at) => this.heat.set(step, heatAt(heat, at)));
    this.#forget(this.heat, MOST_COLUMNS);
  }

  /**
   * Takes tables name[rank][step], as `worker_steps` of `GET view`.
   * @param {WorkerColumns} table
   */
  addTable(table) {
    for (const [step, cell] of cellsOf(table)) this.cells.set(step, cell);
    this.#know(table.ranks);
    this.#forget(this.cells, MOST_STEPS);
  }

  /** @param {Segment} segment */
  addSegment(segment) {
    if (!this.segment || segment.first_step >= this.segment.first_step) this.segment = segment;
    this.#remember(segment);
    if (segment.why && segment.source === "controller") this.#choose(segment);
    if (segment.source === "coast" || segment.source === "local") this.#addCoast(segment.first_step, segment.first_step + segment.steps);
  }

  /**
   * @param {number} first
   * @param {number} end one past the last step
   */
  #addCoast(first, end) {
    /** @type {Span} */
    const span = [first, end];
    const apart = this.coasts.filter(([from, to]) => to < span[0] || from > span[1]);
    for (const [from, to] of this.coasts) {
      if (to < span[0] || from > span[1]) continue;
      span[0] = Math.min(span[0], from);
      span[1] = Math.max(span[1], to);
    }
    this.coasts = [...apart, span].sort((x, y) => x[0] - y[0]);
  }

  /**
   * The answer to a switch may arrive after the event that says since which step the switch is in force.
   * @param {Switch} change
   */
  addSwitch(change) {
    const known = this.switches.find(({ version }) => version === change.version);
    if (typeof known?.effective_step === "number" && typeof change.effective_step !== "number") return;
    this.switches = [...this.switches.filter((known) => known.version !== change.version), change];
    this.switches.sort((x, y) => x.version - y.version);
  }

  /**
   * The steps of [from, to] that are here, ascending.
   * @param {number} from
   * @param {number} to
   * @returns {Row[]}
   */
  rowsBetween(from, to) {
    return sorted(this.steps).filter((step) => step >= from && step <= to).map((step) => /** @type {Row} */ (this.steps.get(step)));
  }

  /**
   * Whether step `from` and all later steps are here, in the heat map, too.
   * @param {number} from
   */
  reachesBackTo(from) {
    return [this.steps, this.heat].every((map) => sorted(map)[0] <= Math.max(from, this.begins));
  }

  /**
   * The view for charts of steps [from, to] of a run of `world` workers.
   * @param {number} from
   * @param {number} to
   * @param {number} world
   * @returns {View}
   */
  view(from, to, world) {
    const rows = this.rowsBetween(from, to);
    /** @type {Record<string, any>} */
    const metrics = {};
    for (const name of rows.length ? Object.keys(rows[0]) : []) metrics[name] = rows.map((row) => row[name]);
    const inside = (/** @type {Map<number, any>} */ map) => sorted(map).filter((step) => step >= from && step <= to);
    const cellStep = inside(this.cells);
    return {
      bucket: 1,
      cellBucket: 1,
      step: rows.map((row) => row.step),
      metrics,
      cellStep,
      cells: cellStep.map((step) => /** @type {Cell} */ (this.cells.get(step))),
      ranks: this.ranks,
      world,
      heat: heatTable(world, 1, inside(this.heat).map((step) => [step, /** @type {HeatColumn} */ (this.heat.get(step))])),
      coasts: this.coasts,
    };
  }

  /**
   * Why gradients are all-reduced in spite of the synchronisation, in the newest segment that has begun; empty: they are not.
   * Of segments that have not begun, it is not known.
   * @returns {string}
   */
  get fallback() {
    const begun = this.recent.filter((segment) => segment.first_step <= (this.current ?? -1));
    return (begun.at(-1) ?? this.recent.at(-1))?.fallback ?? "";
  }

  /** @param {Segment} segment */
  #remember(segment) {
    const others = this.recent.filter((known) => known.attempt !== segment.attempt || known.first_step !== segment.first_step);
    others.push(segment);
    this.recent = others.sort((x, y) => x.attempt - y.attempt || x.first_step - y.first_step).slice(-MOST_RECENT);
  }

  /** @param {Segment} segment */
  #choose({ attempt, version, synchroniser_digest: digest, first_step: step, why }) {
    const last = this.choices.at(-1);
    if (last && (attempt < last.attempt || (attempt === last.attempt && step < last.newest))) return; // known already
    if (last && attempt === last.attempt && version === last.version && digest === last.digest) {
      Object.assign(last, { newest: step, why });
    } else {
      const choice = { attempt, version, digest, step, newest: step, began: why, why };
      this.choices = [...this.choices, choice].slice(-MOST_CHOICES);
    }
  }

  /** @param {number[]} ranks */
  #know(ranks) {
    if (ranks.every((rank) => this.known.has(rank))) return;
    for (const rank of ranks) this.known.add(rank);
    this.ranks = [...this.known].sort((x, y) => x - y);
  }

  /**
   * @param {Map<number, unknown>} map
   * @param {number} most
   */
  #forget(map, most) {
    if (map.size <= most) return false;
    for (const step of sorted(map).slice(0, map.size - most)) map.delete(step);
    return true;
  }
}

/** @param {Map<number, unknown>} map */
function sorted(map) {
  return Array.from(map.keys()).sort((x, y) => x - y);
}

/**
 * step → cell of tables name[rank][step]; where a column holds several steps, also `compute_s_min` and `compute_s_max`.
 * @param {WorkerColumns} table
 * @returns {Map<number, Cell>}
 */
export function cellsOf(table) {
  const cells = new Map();
  const width = 1 + Math.max(-1, ...table.ranks);
  const names = [...CELLS, ...(table.bucket > 1 ? EXTREMES : [])];
  table.step.forEach((step, at) => {
    const cell = /** @type {Cell} */ ({});
    for (const name of names) {
      const values = (cell[name] = new Float32Array(width).fill(NaN));
      table.ranks.forEach((rank, row) => {
        values[rank] = table[name]?.[row]?.[at] ?? NaN;
      });
    }
    cells.set(step, cell);
  });
  return cells;
}
