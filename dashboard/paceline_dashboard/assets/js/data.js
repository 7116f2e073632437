// The data of a run on its page: the newest steps, and the marks of every chart.
export const MOST_STEPS = 2000;
const MOST_CELLS = 400_000; // workers × steps; with many workers, fewer steps are kept
const MOST_CHOICES = 20;
const MOST_RECENT = 20; // segments: loaders read ahead, so some have not begun
/** @type {CellName[]} */
export const CELLS = ["compute_s", "ett_s", "share"];

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
    /** @type {ChosenSynchroniser[]} */
    this.chosen = []; // steps where policies chose another synchroniser, from `GET synchronisation`
    this.clear();
  }

  clear() {
    /** @type {Map<number, Row>} */
    this.steps = new Map(); // by step: rows of `GET steps`
    /** @type {Map<number, Cell>} */
    this.cells = new Map(); // step → {compute_s, ett_s, share}: arrays by rank, NaN where unknown
    /** @type {Set<number>} */
    this.known = new Set();
    /** @type {number[]} */
    this.ranks = []; // ranks with cells, ascending; of very many workers, only some
    /** @type {Switch[]} */
    this.switches = [];
    /** @type {Span[]} */
    this.coasts = []; // [first step, one past the last) of steps without a controller; disjoint, ascending; not older than `steps`
    /** @type {Segment | null} */
    this.segment = null; // the newest
    /** @type {Segment[]} */
    this.recent = []; // the newest segments, ascending
    /** @type {number | undefined} */
    this.current = undefined; // the step that came last: a restarted run trains steps again
    /** @type {SynchroniserChoice[]} */
    this.choices = []; // the newest choices of synchronisers by policies, ascending
    /** @type {number | undefined} */
    this.newest = undefined;
    /** @type {number} */
    this.begins = 0; // the run's first step; above 0 for a resumed run
  }

  /** The newest complete step's number, or -1. */
  get latest() {
    return this.newest ?? -1;
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
   * Takes flat columns from an event: one entry per rank and step.
   * @param {Record<string, any>} columns
   */
  addFlat(columns) {
    const length = columns.step?.length ?? 0;
    for (let i = 0; i < length; i++) {
      const cell = this.#cell(columns.step[i], columns.rank[i]);
      for (const name of CELLS) cell[name][columns.rank[i]] = columns[name][i] ?? NaN;
    }
    this.#forget(this.cells, this.#mostCells());
  }

  /**
   * Takes tables name[rank][step], from an answer of `GET worker-steps`.
   * @param {WorkerColumns} table
   */
  addTable(table) {
    for (const [step, cell] of cellsOf(table)) this.cells.set(step, cell);
    this.#know(table.ranks);
    this.#forget(this.cells, this.#mostCells());
  }

  /** @param {Segment} segment */
  addSegment(segment) {
    if (!this.segment || segment.first_step >= this.segment.first_step) this.segment = segment;
    this.#remember(segment);
    if (segment.why) this.#choose(segment);
    if (segment.source !== "coast") return;
    /** @type {Span} */
    const span = [segment.first_step, segment.first_step + segment.steps];
    const apart = this.coasts.filter(([from, to]) => to < span[0] || from > span[1]);
    for (const [from, to] of this.coasts) {
      if (to < span[0] || from > span[1]) continue;
      span[0] = Math.min(span[0], from);
      span[1] = Math.max(span[1], to);
    }
    this.coasts = [...apart, span].sort((x, y) => x[0] - y[0]);
  }

  /** @param {Switch} change */
  addSwitch(change) {
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
   * Whether step `from` and all later steps are here; with `cells`, those of each worker, too.
   * @param {number} from
   * @param {boolean} cells
   */
  reachesBackTo(from, cells = false) {
    return [this.steps, ...(cells ? [this.cells] : [])].every(
      (map) => sorted(map)[0] <= Math.max(from, this.begins),
    );
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
    const cellStep = sorted(this.cells).filter((step) => step >= from && step <= to);
    return {
      bucket: 1,
      cellBucket: 1,
      step: rows.map((row) => row.step),
      metrics,
      cellStep,
      cells: cellStep.map((step) => /** @type {Cell} */ (this.cells.get(step))),
      ranks: this.ranks,
      world,
      coasts: this.coasts,
    };
  }

  /**
   * Why gradients are all-reduced in spite of the synchroniser, in the newest segment that has begun; empty: they are not.
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

  #mostCells() {
    return Math.max(100, Math.min(MOST_STEPS, Math.floor(MOST_CELLS / Math.max(1, this.ranks.length))));
  }

  /**
   * @param {number} step
   * @param {number} rank
   */
  #cell(step, rank) {
    this.#know([rank]);
    let cell = this.cells.get(step);
    if (!cell) this.cells.set(step, (cell = /** @type {Cell} */ ({}))); // filled below
    for (const name of CELLS) {
      if (cell[name]?.length > rank) continue;
      const wider = new Float32Array(/** @type {number} */ (this.ranks.at(-1)) + 1).fill(NaN);
      if (cell[name]) wider.set(cell[name]);
      cell[name] = wider;
    }
    cell.quantiles = undefined;
    return cell;
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
 * step → cell of the tables of `GET worker-steps`.
 * @param {WorkerColumns} table
 * @returns {Map<number, Cell>}
 */
function cellsOf(table) {
  const cells = new Map();
  const width = 1 + Math.max(-1, ...table.ranks);
  table.step.forEach((step, at) => {
    const cell = /** @type {Cell} */ ({});
    for (const name of CELLS) {
      cell[name] = new Float32Array(width).fill(NaN);
      table.ranks.forEach((rank, row) => {
        cell[name][rank] = table[name]?.[row]?.[at] ?? NaN;
      });
    }
    cells.set(step, cell);
  });
  return cells;
}

/**
 * The view for charts from the answers of `GET steps`, `GET worker-steps` and `GET coasts`.
 * @param {StepColumns} steps
 * @param {WorkerColumns} table
 * @param {[number, number][]} coasts
 * @param {number} world
 * @returns {View}
 */
export function historyView(steps, table, coasts, world) {
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
    coasts: coasts.map(([first, last]) => [first, last + 1]),
  };
}
