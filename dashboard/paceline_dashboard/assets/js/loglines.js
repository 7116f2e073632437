// The lines of a log that the page holds, and where in the log each begins.
const BYTES = new TextEncoder();

/**
 * A part of a log, as `GET logs/{rank}` and its stream give it.
 * @typedef {{text: string, offset: number, attempt?: number | null}} LogPart
 */

export class LogLines {
  /** @param {number} most lines that are kept; the oldest go */
  constructor(most) {
    this.most = most;
    this.clear();
  }

  clear() {
    /** @type {{line: string, attempt: number, offset: number}[]} */
    this.ended = []; // lines with an end
    /** @type {{line: string, attempt: number, offset: number} | null} */
    this.open = null; // the newest line, while it has no end
    /** @type {{attempt: number, offset: number}} */
    this.first = { attempt: 0, offset: 0 }; // where what is here begins
  }

  get all() {
    return [...this.ended, ...(this.open?.line ? [this.open] : [])].map(({ line }) => line);
  }

  /**
   * Takes what follows the lines that are here.
   * @param {LogPart} part
   */
  add({ text, offset, attempt }) {
    const of = attempt ?? 0;
    if (this.open && this.open.attempt !== of) this.#endAttempt();
    if (!this.ended.length && !this.open) this.first = { attempt: of, offset };
    for (const [at, piece] of text.split("\n").entries()) {
      if (at > 0) this.#end();
      if (this.open) this.open.line += piece;
      else this.open = { line: piece, attempt: of, offset };
      offset += BYTES.encode(piece).length + 1; // with the line's end
    }
    const many = this.ended.length - this.most;
    if (many <= 0) return;
    this.ended.splice(0, many);
    const { attempt: kept, offset: from } = this.ended[0];
    this.first = { attempt: kept, offset: from };
  }

  /** The newest line has its end. */
  #end() {
    if (this.open) this.ended.push(this.open);
    this.open = null;
  }

  /** Another attempt has another log. What follows the last line's end is no line. */
  #endAttempt() {
    if (this.open?.line) this.#end();
    else this.open = null;
  }

  /**
   * Takes what precedes the lines that are here.
   * @param {LogPart} part that ends at `first`
   */
  addEarlier({ text, offset, attempt }) {
    const pieces = text.split("\n");
    const last = /** @type {string} */ (pieces.pop());
    const next = this.ended[0] ?? this.open;
    const of = attempt ?? 0;
    let at = offset;
    const earlier = pieces.map((line) => {
      const made = { line, attempt: of, offset: at };
      at += BYTES.encode(line).length + 1;
      return made;
    });
    if (next && last) Object.assign(next, { line: last + next.line, offset: at });
    this.ended.unshift(...earlier);
    this.first = { attempt: of, offset };
  }
}
