// Every worker at every step, on a canvas: Plotly's heat map takes thirty times as long.
import { margins } from "./axis.js";
import { choices, press } from "./controls.js";
import { byId, make, show, text } from "./dom.js";
import { heatCsv, offer } from "./exports.js";
import { factor, integer, seconds } from "./format.js";
import { grouped, headed, isSlow, orderOf, ranksOf, ratios, verdictOf } from "./rows.js";

const MOST_PX = 360; // of all rows together, if they are at least 2 px high
const [LEAST_ROW_PX, MOST_ROW_PX] = [2, 14];
const LABEL_PX = 14; // a label needs so much height
const [HEADED_PX, PLAIN_PX] = [8, 1]; // between groups: with names, and without
const QUIET = 0.1; // octaves around the typical rank's time that have no colour: 7 %
const SHADES = 201; // from half the typical rank's time to twice

/** @typedef {import("./rows.js").HeatGroup} HeatGroup */
/** @typedef {import("./rows.js").HeatRow} HeatRow */
/** @typedef {{row: HeatRow, top: number}} Placed a row, and its upper edge in px */

export class HeatMap {
  /**
   * @param {(first: number, last: number) => void} open shows the page of the slowest of these ranks
   * @param {() => void} changed another order was chosen: draw again
   */
  constructor(open, changed) {
    this.open = open;
    this.changed = changed;
    /** @type {"rank" | "node" | "cause" | null} */
    this.order = null; // that the reader chose
    /** @type {"rank" | "node" | "cause"} */
    this.shown = "rank"; // order of the rows
    /** @type {Heat | null} */
    this.heat = null;
    this.ratio = new Float32Array();
    /** @type {Placed[]} */
    this.placed = [];
    this.rowPx = MOST_ROW_PX;
    /** @type {import("./axis.js").StepAxis | null} */
    this.axis = null;
    /** @type {[number, number] | null} */
    this.cursor = null; // [place in `placed`, column]: where the pointer or the keyboard is
    this.cells = typeof document === "undefined" ? null : document.createElement("canvas"); // a pixel for each cell
    this.wired = false;
  }

  /**
   * @param {Heat | null} heat
   * @param {import("./axis.js").StepAxis} axis
   * @param {Map<number, WorkerCause>} causes
   * @param {number | null} focus the rank that the chart shows in colour
   * @param {Colours} colours
   */
  draw(heat, axis, causes, focus, colours) {
    const canvas = byId("heatmap");
    if (!canvas) return;
    if (!this.wired) this.#wire(canvas);
    const empty = !heat?.step.length;
    canvas.hidden = empty;
    text("heatmap-empty", empty ? "Comes with the first step that all workers have ended." : "");
    if (!heat || empty) return;
    const width = canvas.parentElement.clientWidth;
    if (!width) return;
    const { left, right } = margins(width);
    const inner = Math.max(20, width - left - right);
    Object.assign(this, { heat, axis, ratio: ratios(heat, causes), shown: this.order ?? orderOf(heat, causes) });
    press("heatmap-order", this.shown);
    const groups = grouped(heat, this.ratio, this.shown, causes);
    const height = this.#place(groups);
    this.#paint(canvas, inner, height, colours);
    canvas.style.marginLeft = `${left}px`;
    this.#label(groups, focus, left, left + inner, height);
    if (!this.cursor) this.#caption(groups);
    canvas.setAttribute("aria-label", this.#words(groups));
  }

  /**
   * Marks the step at which the pointer is on a chart; null: it is on none.
   * @param {number | null} step
   */
  point(step) {
    const [line, canvas] = [byId("heatmap-cursor"), byId("heatmap")];
    if (!line || !this.axis) return;
    show("heatmap-cursor", step !== null);
    if (step === null) return;
    const [low, high] = this.axis.range;
    const part = (this.axis.at(step) - low) / (high - low);
    line.style.left = `${canvas.offsetLeft + part * canvas.clientWidth}px`;
    line.style.height = `${canvas.clientHeight}px`;
  }

  /**
   * Finds each row's place. Returns the height of all.
   * @param {HeatGroup[]} groups
   */
  #place(groups) {
    const count = groups.reduce((sum, { rows }) => sum + rows.length, 0);
    this.rowPx = Math.min(MOST_ROW_PX, Math.max(LEAST_ROW_PX, Math.floor(MOST_PX / count)));
    const gap = headed(groups) ? HEADED_PX : this.rowPx > LEAST_ROW_PX ? PLAIN_PX : 0;
    this.placed = [];
    let top = 0;
    for (const { rows } of groups) {
      for (const row of rows) {
        this.placed.push({ row, top });
        top += this.rowPx;
      }
      top += gap;
    }
    return top - gap;
  }

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {number} width
   * @param {number} height
   * @param {Colours} colours
   */
  #paint(canvas, width, height, colours) {
    const sharp = window.devicePixelRatio || 1;
    canvas.dataset.rows = String(this.placed.length);
    canvas.width = Math.round(width * sharp);
    canvas.height = Math.round(height * sharp);
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    const cells = this.cells;
    if (!context || !cells || !this.heat) return;
    const runs = this.#columns(width);
    cells.width = runs.reduce((sum, { steps }) => sum + steps.length, 0);
    cells.height = this.placed.length;
    cells.getContext("2d")?.putImageData(this.#image(runs, colours), 0, 0);
    context.imageSmoothingEnabled = false;
    const share = this.rowPx > 4 ? 1 : 0; // a line between rows, where they are high enough
    let x = 0;
    for (const { steps, from, to } of runs) {
      const wide = Math.max(1, (to - from) * sharp); // steps that are all a run has of a range are seen, however few
      const left = Math.min(from * sharp, canvas.width - wide);
      for (const { at, count, top } of this.#blocks(share > 0)) {
        const tall = count * this.rowPx - share;
        context.drawImage(cells, x, at, steps.length, count, left, top * sharp, wide, tall * sharp);
      }
      x += steps.length;
    }
  }

  /**
   * Rows that are drawn together: neighbours, or each by itself.
   * @param {boolean} single
   */
  #blocks(single) {
    /** @type {{at: number, count: number, top: number}[]} */
    const blocks = [];
    this.placed.forEach(({ top }, at) => {
      const last = blocks.at(-1);
      if (!single && last && last.top + last.count * this.rowPx === top) last.count += 1;
      else blocks.push({ at, count: 1, top });
    });
    return blocks;
  }

  /**
   * Columns that follow each other at equal distances: their places in `heat.step`, several for a column narrower
   * than a pixel, and where they are in px.
   * @param {number} width
   */
  #columns(width) {
    const { step, bucket } = /** @type {Heat} */ (this.heat);
    const axis = /** @type {import("./axis.js").StepAxis} */ (this.axis);
    const [low, high] = axis.range;
    const px = (/** @type {number} */ at) => ((axis.at(at - 0.5) - low) / (high - low)) * width;
    const merged = Math.max(1, Math.ceil(bucketsIn(axis, bucket) / width));
    /** @type {{steps: number[][], from: number, to: number}[]} */
    const runs = [];
    let end = NaN; // the step that would go on with the last run
    for (let at = 0; at < step.length; at++) {
      const part = step.slice(at, at + merged).filter((start) => start < step[at] + merged * bucket);
      const first = step[at];
      at += part.length - 1;
      if (first + part.length * bucket <= axis.from || first > axis.to) continue;
      const places = part.map((_, i) => at - part.length + 1 + i);
      const last = runs.at(-1);
      const [from, to] = [px(first), px(first + merged * bucket)];
      if (last && end === first && axis.even) Object.assign(last, { to, steps: [...last.steps, places] });
      else runs.push({ steps: [places], from, to });
      end = first + merged * bucket;
    }
    return runs;
  }

  /**
   * @param {{steps: number[][]}[]} runs
   * @param {Colours} colours
   */
  #image(runs, colours) {
    const columns = runs.flatMap(({ steps }) => steps);
    const shades = shadesOf(colours.heat);
    const width = /** @type {Heat} */ (this.heat).step.length;
    const image = new ImageData(Math.max(1, columns.length), this.placed.length);
    this.placed.forEach(({ row }, y) => {
      columns.forEach((places, x) => {
        let ratio = NaN;
        for (const place of places) {
          const value = this.ratio[row.at * width + place];
          if (!(ratio >= value) && !Number.isNaN(value)) ratio = value;
        }
        if (!Number.isNaN(ratio)) image.data.set(shades[shade(ratio)], (y * columns.length + x) * 4);
      });
    });
    return image;
  }

  /**
   * Names of groups and ranks at the left, verdicts at the right, the axis below.
   * @param {HeatGroup[]} groups
   * @param {number | null} focus
   * @param {number} left
   * @param {number} right
   * @param {number} height
   */
  #label(groups, focus, left, right, height) {
    const labels = [...this.#ranks(groups, focus, left), ...this.#verdicts(groups, right), ...this.#ticks(left, right, height)];
    if (headed(groups)) labels.push(...this.#names(groups, left));
    const key = JSON.stringify(labels);
    const place = byId("heatmap-labels");
    if (place.dataset.shown === key) return;
    place.dataset.shown = key;
    place.replaceChildren(...labels.map(({ words, className, ...style }) => {
      const label = make("span", { className, title: words }, words);
      Object.assign(label.style, Object.fromEntries(Object.entries(style).map(([name, px]) => [name, `${px}px`])));
      return label;
    }));
  }

  /**
   * @param {HeatGroup[]} groups
   * @param {number | null} focus
   * @param {number} left
   */
  #ranks(groups, focus, left) {
    const named = headed(groups);
    let free = -Infinity; // from here on there is room
    /** @type {any[]} */
    const labels = [];
    const add = (/** @type {Placed} */ { row, top }) => {
      const marked = focus !== null && focus >= row.first && focus <= row.last;
      const words = integer(row.first);
      labels.push({ words, className: marked ? "heat-rank marked" : "heat-rank", top: top + this.rowPx / 2 - LABEL_PX / 2, left: 0, width: left - 6 });
    };
    const chosen = this.placed.find(({ row }) => focus !== null && focus >= row.first && focus <= row.last);
    for (const place of this.placed) {
      const near = chosen && place !== chosen && Math.abs(place.top - chosen.top) < LABEL_PX;
      if (place !== chosen && (near || place.top < free)) continue;
      if (named && left < 70 && place !== chosen) continue; // names and numbers do not both have room
      add(place);
      free = place.top + LABEL_PX;
    }
    return labels;
  }

  /**
   * @param {HeatGroup[]} groups
   * @param {number} left
   */
  #names(groups, left) {
    const wide = left < 70 ? left - 4 : left - 36;
    return this.#extents(groups).map(({ group, top, height }) => {
      const lines = height >= 2 * LABEL_PX ? " lines" : ""; // a long name is cut where there is one line only
      const tall = lines ? height : LABEL_PX;
      const className = `heat-name${isSlow(group.ratio) ? " slow" : ""}${lines}`;
      return { words: group.name, className, top: top + (height - tall) / 2, left: 0, width: wide, height: tall };
    });
  }

  /** @param {HeatGroup[]} groups */
  #extents(groups) {
    let at = 0;
    return groups.map((group) => {
      const top = this.placed[at].top;
      at += group.rows.length;
      return { group, top, height: group.rows.length * this.rowPx };
    });
  }

  /**
   * Of each group with a name; otherwise of the rows that are slow, the slowest first while there is room.
   * @param {HeatGroup[]} groups
   * @param {number} right
   */
  #verdicts(groups, right) {
    const label = (/** @type {string} */ words, /** @type {number} */ middle, /** @type {boolean} */ slow) => ({
      words, className: slow ? "heat-verdict slow" : "heat-verdict", top: middle - LABEL_PX / 2, left: right + 8,
    });
    const slow = this.placed.filter(({ row }) => isSlow(row.ratio)).sort((x, y) => y.row.ratio - x.row.ratio);
    /** @type {number[]} */
    const taken = [];
    const labels = [];
    for (const { row, top } of slow) {
      const middle = top + this.rowPx / 2;
      if (taken.some((other) => Math.abs(other - middle) < LABEL_PX)) continue;
      taken.push(middle);
      labels.push(label(verdictOf(row.ratio), middle, true));
    }
    if (!headed(groups)) return labels;
    for (const { group, top, height } of this.#extents(groups)) {
      const words = verdictOf(group.ratio);
      if (words && !isSlow(group.ratio)) labels.push(label(words, top + height / 2, false));
    }
    return labels;
  }

  /**
   * @param {number} left
   * @param {number} right
   * @param {number} height
   */
  #ticks(left, right, height) {
    const axis = /** @type {import("./axis.js").StepAxis} */ (this.axis);
    const { values, words, title } = axis.ticks;
    const [low, high] = axis.range;
    const labels = values.map((at, i) => ({
      words: words[i], className: "heat-tick", top: height + 4, left: left + ((at - low) / (high - low)) * (right - left),
    }));
    return [...labels, { words: title, className: "heat-verdict", top: height + 4, left: right + 8 }];
  }

  /** @param {HTMLCanvasElement} canvas */
  #wire(canvas) {
    this.wired = true;
    choices("heatmap-order", (order) => {
      this.order = /** @type {"rank" | "node" | "cause"} */ (order);
      this.changed();
    });
    offer("heatmap", () => (this.heat ? heatCsv(this.heat) : ""));
    canvas.addEventListener("pointermove", (event) => this.#point(this.#cellAt(canvas, event)));
    canvas.addEventListener("pointerleave", () => this.#point(null));
    canvas.addEventListener("click", (event) => this.#enter(this.#cellAt(canvas, event)));
    canvas.addEventListener("blur", () => this.#point(null));
    canvas.addEventListener("keydown", (event) => this.#key(event));
  }

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {MouseEvent} event
   * @returns {[number, number] | null}
   */
  #cellAt(canvas, event) {
    const box = canvas.getBoundingClientRect();
    const y = event.clientY - box.top;
    const place = this.placed.findLastIndex(({ top }) => top <= y);
    const axis = this.axis;
    if (place < 0 || !axis || !this.heat) return null;
    const [low, high] = axis.range;
    const step = axis.step(low + ((event.clientX - box.left) / box.width) * (high - low)) + 0.5;
    return [place, Math.max(0, this.heat.step.findLastIndex((first) => first <= step))];
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (!this.heat) return;
    const [place, at] = this.cursor ?? [0, this.heat.step.length - 1];
    /** @type {Record<string, [number, number]>} */
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.key === "Enter") this.#enter([place, at]);
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const bound = (/** @type {number} */ value, /** @type {number} */ count) => Math.min(count - 1, Math.max(0, value));
    this.#point([bound(place + move[0], this.placed.length), bound(at + move[1], this.heat.step.length)]);
  }

  /** @param {[number, number] | null} cell */
  #enter(cell) {
    if (!cell) return;
    const { first, last } = this.placed[cell[0]].row;
    this.open(first, last);
  }

  /** @param {[number, number] | null} cell */
  #point(cell) {
    this.cursor = cell;
    if (!cell || !this.heat) {
      text("heatmap-readout", this.caption ?? "");
      return;
    }
    const { row } = this.placed[cell[0]];
    const { step, bucket, values } = this.heat;
    const place = row.at * step.length + cell[1];
    const [value, ratio] = [values[place], this.ratio[place]];
    const steps = bucket === 1 ? `step ${integer(step[cell[1]])}` : `steps ${integer(step[cell[1]])}–${integer(step[cell[1]] + bucket - 1)}`;
    const who = row.first === row.last ? ranksOf(row) : `slowest of ${ranksOf(row)}`;
    const measured = Number.isNaN(value) ? "no record" : `${seconds(value)}${bucket === 1 ? "" : " at most"}, ${factor(ratio)} the typical rank's time`;
    text("heatmap-readout", `${who}, ${steps}: ${measured}`);
  }

  /** @param {HeatGroup[]} groups */
  #caption(groups) {
    const heat = /** @type {Heat} */ (this.heat);
    const shared = heat.together > 1 ? `a row is the slowest of ${heat.together} ranks` : "";
    const columns = heat.bucket > 1 ? `a cell is the slowest of ${integer(heat.bucket)} steps` : "";
    const unknown = this.shown === "node" && !headed(groups) && groups.length === 1 ? "the ranks' nodes are not known" : "";
    this.caption = [unknown, shared, columns, "click a row to open its rank"].filter(Boolean).join(" · ");
    text("heatmap-readout", this.caption);
  }

  /** @param {HeatGroup[]} groups */
  #words(groups) {
    const slow = groups.flatMap(({ rows }) => rows).filter((row) => isSlow(row.ratio)).sort((x, y) => y.ratio - x.ratio);
    const told = slow.slice(0, 3).map((row) => `${ranksOf(row)} ${verdictOf(row.ratio)}`).join(", ");
    return `Heat map of time ÷ the typical rank's, every worker and step: ${told || "all even"}. Arrow keys move, Enter opens the rank.`;
  }
}

/**
 * @param {import("./axis.js").StepAxis} axis
 * @param {number} bucket
 */
const bucketsIn = (axis, bucket) => (axis.to - axis.from + 1) / bucket;

/** @param {number} ratio */
function shade(ratio) {
  const octaves = Math.max(-1, Math.min(1, Math.log2(ratio)));
  return Math.round(((octaves + 1) / 2) * (SHADES - 1));
}

/**
 * RGBA of each shade: quiet around the typical rank's time, full at half and at twice.
 * @param {[number[], number[], number[]]} heat colours of half the typical rank's time, that time and twice
 */
function shadesOf([low, middle, high]) {
  return Array.from({ length: SHADES }, (_, at) => {
    const octaves = (at / (SHADES - 1)) * 2 - 1;
    const part = Math.max(0, Math.abs(octaves) - QUIET) / (1 - QUIET);
    const end = octaves < 0 ? low : high;
    return [...middle.map((value, i) => Math.round(value + (end[i] - value) * part)), 255];
  });
}
