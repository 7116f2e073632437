// Compute time of every worker at every step, on a canvas: Plotly's heat map takes thirty times as long.
import { integer, seconds } from "./format.js";
import { byId, text } from "./dom.js";

const MOST_ROWS = 256; // with more workers, several share a row, which shows the slowest
const MOST_COLUMNS = 2500; // with more steps, several share a column

// Cividis: evenly increasing brightness, and equal for colour-blind readers.
const STOPS = [[0, 32, 77], [57, 73, 110], [112, 113, 118], [165, 155, 115], [219, 202, 91], [255, 234, 70]];
const TABLE = Array.from({ length: 256 }, (_, i) => {
  const at = (i / 255) * (STOPS.length - 1);
  const low = Math.min(Math.floor(at), STOPS.length - 2);
  return STOPS[low].map((value, part) => value + (STOPS[low + 1][part] - value) * (at - low));
});

export class HeatMap {
  constructor() {
    /** @type {any} */
    this.view = null; // the drawn `View`
    this.values = new Float32Array();
    this.from = 0; // first step
    this.columns = 0;
    this.bucket = 1; // steps per column
    this.together = 1; // ranks per row
    this.wired = false;
    this.hovered = false;
  }

  /**
   * Draws `view` of data.js over the steps [from, to].
   * @param {View} view
   * @param {number} from
   * @param {number} to
   */
  draw(view, from, to) {
    const canvas = byId("heatmap");
    if (!canvas || !view.cellStep.length) return;
    if (!this.wired) this.#wire(canvas);
    const steps = to - from + 1;
    this.bucket = Math.max(view.cellBucket, Math.ceil(steps / MOST_COLUMNS));
    Object.assign(this, { view, from, columns: Math.ceil(steps / this.bucket) });
    this.together = Math.ceil(view.ranks.length / MOST_ROWS);
    const height = Math.ceil(view.ranks.length / this.together);
    const [low, high] = this.#fill(height);
    // One pixel per cell; the style sheet enlarges the image without smoothing.
    canvas.width = this.columns;
    canvas.height = height;
    canvas.getContext("2d").putImageData(this.#image(height, low, high), 0, 0);
    if (!this.hovered) this.#caption();
    text("heatmap-scale", `dark ${seconds(low)} – bright ${seconds(high)}`);
  }

  /**
   * Fills `values` (NaN: unknown) and returns the least and the greatest value.
   * @param {number} height
   */
  #fill(height) {
    const { view, from, bucket, columns, together } = this;
    this.values = new Float32Array(columns * height).fill(NaN);
    let [low, high] = [Infinity, -Infinity];
    view.cellStep.forEach((/** @type {number} */ step, /** @type {number} */ at) => {
      const x = Math.floor((step - from) / bucket);
      if (x < 0 || x >= columns) return;
      view.ranks.forEach((/** @type {number} */ rank, /** @type {number} */ order) => {
        const value = view.cells[at].compute_s[rank];
        if (!(value >= 0)) return;
        const place = Math.floor(order / together) * columns + x;
        if (!(this.values[place] >= value)) this.values[place] = value;
        if (value < low) low = value;
        if (value > high) high = value;
      });
    });
    return [low, high];
  }

  /**
   * @param {number} height
   * @param {number} low
   * @param {number} high
   */
  #image(height, low, high) {
    const image = new ImageData(this.columns, height);
    const scale = 255 / Math.max(high - low, 1e-12);
    this.values.forEach((value, place) => {
      if (Number.isNaN(value)) return; // transparent
      const [r, g, b] = TABLE[Math.round((value - low) * scale)];
      image.data.set([r, g, b, 255], place * 4);
    });
    return image;
  }

  /** @param {HTMLCanvasElement} canvas */
  #wire(canvas) {
    this.wired = true;
    canvas.addEventListener("pointermove", (event) => {
      this.hovered = true;
      const box = canvas.getBoundingClientRect();
      const x = Math.min(this.columns - 1, Math.floor(((event.clientX - box.left) / box.width) * this.columns));
      const y = Math.min(canvas.height - 1, Math.floor(((event.clientY - box.top) / box.height) * canvas.height));
      const ranks = this.view.ranks.slice(y * this.together, (y + 1) * this.together);
      const who = ranks.length > 1 ? `slowest of ranks ${ranks[0]}–${ranks.at(-1)}` : `rank ${ranks[0]}`;
      const value = this.values[y * this.columns + x];
      text("heatmap-readout", `step ${this.from + x * this.bucket}, ${who}: ${seconds(value)}`);
    });
    canvas.addEventListener("pointerleave", () => {
      this.hovered = false;
      this.#caption();
    });
  }

  #caption() {
    const { ranks, world } = this.view;
    const some = ranks.length < world ? `, ${integer(ranks.length)} of ${integer(world)} workers` : "";
    text("heatmap-readout", `from rank ${ranks[0]} (top) to rank ${ranks.at(-1)} (bottom)${some}; steps as in the chart above`);
  }
}
