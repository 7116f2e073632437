// Rows of a table that come again and again: only what changed is replaced, so that the focus stays where it is.
import { make } from "./dom.js";

/**
 * A cell: `key` says whether it changed; `node` makes its content; `words`: a long text.
 * @typedef {{key: string, node?: () => any, words?: boolean}} Cell
 */

export class KeyedRows {
  /** @param {HTMLElement} body the table's `tbody` */
  constructor(body) {
    this.body = body;
    /** @type {Map<string, {element: any, cells: {key: string, element: any}[]}>} */
    this.rows = new Map();
  }

  /** @param {{id: string, cells: Cell[]}[]} items in the order of the table */
  show(items) {
    const wanted = new Set(items.map(({ id }) => id));
    for (const [id, row] of this.rows) {
      if (wanted.has(id)) continue;
      row.element.remove();
      this.rows.delete(id);
    }
    items.forEach(({ id, cells }, at) => {
      const row = this.#row(id, cells);
      if (this.body.children[at] !== row.element) this.body.insertBefore(row.element, this.body.children[at] ?? null);
    });
  }

  /**
   * @param {string} id
   * @param {Cell[]} cells
   */
  #row(id, cells) {
    let row = this.rows.get(id);
    if (!row) {
      const made = cells.map(({ words }, at) => make(at ? "td" : "th", at ? (words ? { className: "words" } : {}) : { scope: "row" }));
      row = { element: make("tr", {}, ...made), cells: made.map((element) => ({ key: "", element })) };
      this.rows.set(id, row);
    }
    for (const [at, { key, node }] of cells.entries()) {
      const cell = row.cells[at];
      if (cell.key === key) continue;
      cell.element.replaceChildren(node ? node() : key);
      cell.key = key;
    }
    return row;
  }
}
