// A rank's log: its end, earlier lines on demand, what is added, and a search in what is there.
import { get, url } from "./api.js";
import { byId, make, show, text } from "./dom.js";
import { choices } from "./controls.js";
import { plural } from "./format.js";
import { LogLines } from "./loglines.js";

const TAIL = 500; // lines at first
const CHUNK = 65_536; // bytes of earlier lines
const MOST_LINES = 20_000; // kept; older ones go
const WARNING = /\b(warn(ing)?|error|exception|traceback|critical|fatal)\b/i;
const NEAR_PX = 40; // from the end: whoever is there follows

/**
 * Which lines are shown, and how many of them hold what is searched for.
 * @param {string[]} lines
 * @param {string} sought
 * @param {boolean} warnings only these
 * @returns {{line: string, warning: boolean, hit: boolean}[]}
 */
export function shown(lines, sought, warnings) {
  const needle = sought.toLowerCase();
  const all = lines.map((line) => ({ line, warning: WARNING.test(line), hit: needle !== "" && line.toLowerCase().includes(needle) }));
  return warnings ? all.filter(({ warning, hit }) => warning || hit) : all;
}

export class Log {
  /**
   * @param {string} path of the run
   * @param {number} rank
   * @param {string} whose in words
   */
  constructor(path, rank, whose = `rank ${rank}`) {
    this.path = `${path}/logs/${rank}`;
    this.rank = rank;
    this.whose = whose;
    this.output = "stdout";
    this.lines = new LogLines(MOST_LINES);
    this.loading = false; // earlier lines are on their way
    this.sought = "";
    this.warnings = false;
    this.follows = true;
    /** @type {EventSource | null} */
    this.source = null;
    this.closed = false;
    this.drawing = false;
  }

  open() {
    const search = make("input", { id: "log-search", type: "text", size: 14 });
    byId("log-search-place").replaceChildren(search);
    search.addEventListener("input", () => this.#set({ sought: search.value }));
    search.addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => event.key === "Enter" && this.#next());
    choices("log-lines", (value) => this.#set({ warnings: value === "warnings" }));
    byId("log-output").addEventListener("change", (/** @type {any} */ event) => this.#show(event.target.value));
    byId("log-follow").addEventListener("click", () => this.#follow(!this.follows));
    byId("log-more").addEventListener("click", () => this.#earlier());
    byId("log-copy").addEventListener("click", () => navigator.clipboard?.writeText(this.#text()));
    byId("log-download").addEventListener("click", () => this.#download());
    const box = byId("log-text");
    box.addEventListener("scroll", () => {
      const near = box.scrollHeight - box.scrollTop - box.clientHeight < NEAR_PX;
      if (near !== this.follows) this.#follow(near);
    });
    this.#show(this.output);
  }

  close() {
    this.closed = true;
    this.source?.close();
  }

  /** @param {Partial<Log>} change */
  #set(change) {
    Object.assign(this, change);
    this.#draw();
  }

  /** @param {string} output */
  async #show(output) {
    this.source?.close();
    this.output = output;
    this.lines.clear();
    try {
      const part = await get(this.path, { output, tail: TAIL });
      if (this.closed || output !== this.output) return;
      text("log-where", `${this.whose}, ${output}${part.attempt ? `, attempt ${part.attempt}` : ""}, on ${part.node}`);
      text("log-problem", part.size ? "" : "It has printed nothing yet.");
      this.#add(part);
      this.#listen(part);
    } catch (error) {
      if (error.status === undefined) throw error;
      text("log-problem", error.message);
      this.#draw();
    }
  }

  /** @param {any} part of the log that is here */
  #listen(part) {
    const target = url(`${this.path}/stream`);
    for (const [name, value] of Object.entries({ output: this.output, attempt: part.attempt, offset: part.next })) {
      if (value !== null) target.searchParams.set(name, String(value));
    }
    this.source = new EventSource(target);
    this.source.onmessage = (message) => {
      const event = JSON.parse(message.data);
      if (event.type === "text") this.#add(event);
      text("log-problem", event.type === "problem" ? event.detail : "");
    };
    this.source.onerror = () => {
      if (this.source?.readyState === EventSource.CLOSED) show("log-follow", false); // the run has ended
    };
  }

  /** @param {import("./loglines.js").LogPart} part */
  #add(part) {
    this.lines.add(part);
    this.#draw();
  }

  async #earlier() {
    if (this.loading) return;
    this.loading = true;
    this.#draw();
    const { output, lines: { first } } = this;
    const offset = Math.max(0, first.offset - CHUNK);
    try {
      const part = await get(this.path, { output, attempt: first.attempt, offset, limit: Math.max(4, first.offset - offset) });
      // Meanwhile the oldest lines may have gone, or another output may be shown: then the part does not fit.
      if (this.closed || output !== this.output || first !== this.lines.first) return;
      this.lines.addEarlier(part);
      this.#follow(false);
    } catch (error) {
      if (error.status === undefined) throw error;
      text("log-problem", error.message);
    } finally {
      this.loading = false;
      this.#draw();
    }
  }

  #text() {
    return this.lines.all.join("\n");
  }

  #download() {
    const link = make("a", { href: URL.createObjectURL(new Blob([this.#text()], { type: "text/plain" })), download: `rank-${this.rank}-${this.output}.log` });
    link.click();
    URL.revokeObjectURL(link.href);
  }

  /** @param {boolean} follows */
  #follow(follows) {
    this.follows = follows;
    byId("log-follow").setAttribute("aria-pressed", String(follows));
    this.#draw();
  }

  /** Goes to the next line with what is searched for. */
  #next() {
    const box = byId("log-text");
    const hits = [...box.querySelectorAll(".hit")];
    const next = hits.find((line) => line.offsetTop > box.scrollTop + 4) ?? hits[0];
    if (!next) return;
    this.#follow(false);
    box.scrollTop = next.offsetTop - 2;
  }

  /** Once a frame, however much came. */
  #draw() {
    if (this.drawing) return;
    this.drawing = true;
    requestAnimationFrame(() => {
      this.drawing = false;
      if (!this.closed) this.#paint();
    });
  }

  #paint() {
    const box = byId("log-text");
    if (!box) return;
    const lines = shown(this.lines.all, this.sought, this.warnings);
    box.replaceChildren(...lines.map(({ line, warning, hit }) =>
      make("div", { className: `${warning ? "warning" : ""}${hit ? " hit" : ""}` }, ...(hit ? marked(line, this.sought) : [line || " "]))));
    const hits = lines.filter(({ hit }) => hit).length;
    text("log-hits", this.sought ? `${plural(hits, "line")} of those here` : "");
    byId("log-more").disabled = this.loading || this.lines.first.offset === 0;
    if (this.follows) box.scrollTop = box.scrollHeight;
  }
}

/**
 * A line with what is searched for marked.
 * @param {string} line
 * @param {string} sought
 */
function marked(line, sought) {
  /** @type {(Node | string)[]} */
  const parts = [];
  let at = 0;
  for (;;) {
    const next = line.toLowerCase().indexOf(sought.toLowerCase(), at);
    if (next < 0) return [...parts, line.slice(at)];
    parts.push(line.slice(at, next), make("mark", {}, line.slice(next, next + sought.length)));
    at = next + sought.length;
  }
}
