// What the page knows of a run: the newest steps, one entry each, and what is marked on every chart.
export const MOST_STEPS = 2000;
const MOST_CELLS = 400_000; // workers × steps: with many workers, theirs of fewer steps
const MOST_CHOICES = 20;
export const CELLS = ["compute_s", "ett_s", "share"];

/** Rows of an object of columns. */
export function* rows(columns) {
  const names = Object.keys(columns).filter((name) => Array.isArray(columns[name]));
  const length = columns.step?.length ?? 0;
  for (let i = 0; i < length; i++) {
    const row = {};
    for (const name of names) row[name] = columns[name][i];
    yield row;
  }
}

export class RunData {
  constructor() {
    this.chosen = []; // where policies chose another synchroniser, as `GET synchronisation` told last
    this.clear();
  }

  clear() {
    this.steps = new Map(); // step → row of `GET steps`
    this.cells = new Map(); // step → {compute_s, ett_s, share}: arrays by rank, NaN where unknown
    this.known = new Set();
    this.ranks = []; // whose cells are here: of very many workers, only some; ascending
    this.switches = [];
    this.coasts = []; // [first step, one past the last): planned by no controller; disjoint, ascending; none older than `steps`
    this.segment = null; // the newest
    this.choices = []; // of synchronisers, by policies that choose: the newest, ascending
    this.newest = undefined;
    this.begins = 0; // the run's first step: later than 0 where it was resumed
  }

  /** The newest complete step's number, or -1. */
  get latest() {
    return this.newest ?? -1;
  }

  addSteps(columns) {
    for (const row of rows(columns)) {
      this.steps.set(row.step, row);
      if (!(row.step <= this.newest)) this.newest = row.step;
    }
    if (!this.#forget(this.steps, MOST_STEPS)) return;
    const oldest = sorted(this.steps)[0];
    this.coasts = this.coasts.filter(([, end]) => end > oldest);
  }

  /** Flat columns, as events bring them: one entry per rank and step. */
  addFlat(columns) {
    const length = columns.step?.length ?? 0;
    for (let i = 0; i < length; i++) {
      const cell = this.#cell(columns.step[i], columns.rank[i]);
      for (const name of CELLS) cell[name][columns.rank[i]] = columns[name][i] ?? NaN;
    }
    this.#forget(this.cells, this.#mostCells());
  }

  /** Tables name[rank][step], as `GET worker-steps` answers. */
  addTable(table) {
    for (const [step, cell] of cellsOf(table)) this.cells.set(step, cell);
    this.#know(table.ranks);
    this.#forget(this.cells, this.#mostCells());
  }

  addSegment(segment) {
    if (!this.segment || segment.first_step >= this.segment.first_step) this.segment = segment;
    if (segment.why) this.#choose(segment);
    if (segment.source !== "coast") return;
    const span = [segment.first_step, segment.first_step + segment.steps];
    const apart = this.coasts.filter(([from, to]) => to < span[0] || from > span[1]);
    for (const [from, to] of this.coasts) {
      if (to < span[0] || from > span[1]) continue;
      span[0] = Math.min(span[0], from);
      span[1] = Math.max(span[1], to);
    }
    this.coasts = [...apart, span].sort((x, y) => x[0] - y[0]);
  }

  addSwitch(change) {
    this.switches = [...this.switches.filter((known) => known.version !== change.version), change];
    this.switches.sort((x, y) => x.version - y.version);
  }

  /** Steps [from, to] that are here, ascending. */
  rowsBetween(from, to) {
    return sorted(this.steps).filter((step) => step >= from && step <= to).map((step) => this.steps.get(step));
  }

  /** Whether all that there is of step `from` and later ones is here; with `cells`, of each worker too. */
  reachesBackTo(from, cells = false) {
    return [this.steps, ...(cells ? [this.cells] : [])].every(
      (map) => sorted(map)[0] <= Math.max(from, this.begins),
    );
  }

  /** What charts draw, of steps [from, to] of a run of `world` workers. */
  view(from, to, world) {
    const found = this.rowsBetween(from, to);
    const metrics = {};
    for (const name of found.length ? Object.keys(found[0]) : []) metrics[name] = found.map((row) => row[name]);
    const cellStep = sorted(this.cells).filter((step) => step >= from && step <= to);
    return {
      bucket: 1,
      cellBucket: 1,
      step: found.map((row) => row.step),
      metrics,
      cellStep,
      cells: cellStep.map((step) => this.cells.get(step)),
      ranks: this.ranks,
      world,
      coasts: this.coasts,
    };
  }

  #choose({ attempt, version, synchroniser_digest: digest, first_step: step, why }) {
    const last = this.choices.at(-1);
    if (last && (attempt < last.attempt || (attempt === last.attempt && step < last.newest))) return; // told before
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

  #cell(step, rank) {
    this.#know([rank]);
    let cell = this.cells.get(step);
    if (!cell) this.cells.set(step, (cell = {}));
    for (const name of CELLS) {
      if (cell[name]?.length > rank) continue;
      const wider = new Float32Array(this.ranks.at(-1) + 1).fill(NaN);
      if (cell[name]) wider.set(cell[name]);
      cell[name] = wider;
    }
    cell.quantiles = undefined;
    return cell;
  }

  #know(ranks) {
    if (ranks.every((rank) => this.known.has(rank))) return;
    for (const rank of ranks) this.known.add(rank);
    this.ranks = [...this.known].sort((x, y) => x - y);
  }

  #forget(map, most) {
    if (map.size <= most) return false;
    for (const step of sorted(map).slice(0, map.size - most)) map.delete(step);
    return true;
  }
}

function sorted(map) {
  return Array.from(map.keys()).sort((x, y) => x - y);
}

/** step → cell of the tables of `GET worker-steps`. */
function cellsOf(table) {
  const found = new Map();
  const width = 1 + Math.max(-1, ...table.ranks);
  table.step.forEach((step, at) => {
    const cell = {};
    for (const name of CELLS) {
      cell[name] = new Float32Array(width).fill(NaN);
      table.ranks.forEach((rank, row) => {
        cell[name][rank] = table[name]?.[row]?.[at] ?? NaN;
      });
    }
    found.set(step, cell);
  });
  return found;
}

/** What charts draw, from the answers of `GET steps`, `GET worker-steps` and `GET coasts`. */
export function historyView(steps, table, coasts, world) {
  const cells = cellsOf(table);
  return {
    bucket: steps.bucket,
    cellBucket: table.bucket,
    step: steps.step,
    metrics: steps,
    cellStep: table.step,
    cells: table.step.map((step) => cells.get(step)),
    ranks: table.ranks,
    world,
    coasts: coasts.map(([first, last]) => [first, last + 1]),
  };
}
