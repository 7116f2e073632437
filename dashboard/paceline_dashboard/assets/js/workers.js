// The table of workers: what they did in the last steps, and why others wait for them.
const PAGE = 25;

const WHY = {
  data: () => "large samples",
  node: (worker) => `slow node, ${worker.factor.toFixed(1)}×`,
  transient: () => "passing slowness",
  input: () => "data loading",
  none: () => "",
};

export class WorkersTable {
  async open() {
    this.grid = await window.dash_ag_grid.getApiAsync("workers-grid");
    this.causes = new Map(); // rank → of `GET attribution`
    this.workers = [];
  }

  /** Takes an answer of `GET workers`. */
  update(workers) {
    if (workers.length > PAGE && this.workers.length <= PAGE) {
      // Of many workers, first those for which others wait most.
      this.grid.applyColumnState({ state: [{ colId: "slowest_share", sort: "desc" }], defaultState: { sort: null } });
    }
    this.grid.setGridOption("pagination", workers.length > PAGE);
    this.workers = workers;
    this.#draw();
  }

  /** Takes the workers of an answer of `GET attribution`. */
  explain(workers) {
    this.causes = new Map(workers.map((worker) => [worker.rank, worker]));
    this.#draw();
  }

  #draw() {
    const rows = this.workers.map((worker) => {
      const cause = this.causes.get(worker.rank);
      const why = cause && { why: WHY[cause.cause](cause), words: cause.words, caused: cause.caused };
      return { ...worker, id: String(worker.rank), ...why };
    });
    this.grid.setGridOption("rowData", rows);
  }
}
