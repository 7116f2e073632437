// Saves what a chart shows: as a picture (PNG, SVG) or as numbers (CSV). Each card's menu says which chart, and in which form.
import { make } from "./dom.js";

const SCALE = 2; // pixels of a PNG for each of the page's
const LEAST = { width: 900, height: 300 }; // of a picture: a chart of a phone would be too small to hand on
const TITLE_PX = 36;
/** @type {Map<string, () => string>} */
const tables = new Map(); // element → its CSV, for what Plotly does not draw

/**
 * Says how the numbers of an element that Plotly does not draw are told.
 * @param {string} id
 * @param {() => string} csv
 */
export function offer(id, csv) {
  tables.set(id, csv);
}

/** Heeds the menus of all cards, also of pages that open later. */
export function heedMenus() {
  document.addEventListener("click", (event) => {
    const target = /** @type {Element} */ (event.target);
    const button = /** @type {HTMLElement | null} */ (target.closest("button[data-save]"));
    for (const menu of document.querySelectorAll("details.save[open]")) {
      if (button || !menu.contains(target)) menu.removeAttribute("open");
    }
    if (button) save(/** @type {string} */ (button.dataset.chart), /** @type {string} */ (button.dataset.save));
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    const menu = /** @type {Element} */ (event.target).closest?.("details.save[open]");
    menu?.removeAttribute("open");
    menu?.querySelector("summary")?.focus();
  });
}

/**
 * @param {string} id of the chart's element
 * @param {string} form "png", "svg" or "csv"
 */
async function save(id, form) {
  /** @type {any} */
  const element = document.getElementById(id);
  if (!element) return;
  const name = `${fileName(location.pathname, id)}.${form}`;
  if (form === "csv") store(new Blob([tables.get(id)?.() ?? csvOf(element.data ?? [], element.layout?.xaxis?.title?.text)], { type: "text/csv" }), name);
  else if (element instanceof HTMLCanvasElement) element.toBlob((blob) => blob && store(blob, name));
  else {
    const drawn = await picture(element);
    if (form === "svg") store(new Blob([drawn.svg], { type: "image/svg+xml" }), name);
    else store(await painted(drawn), name);
  }
}

/**
 * A chart as SVG that needs nothing of the page.
 * @param {any} element
 */
async function picture(element) {
  const family = getComputedStyle(element).fontFamily;
  const width = Math.max(LEAST.width, element.clientWidth);
  const height = Math.max(LEAST.height, element.clientHeight + TITLE_PX);
  const { layout } = element;
  const title = { text: element.getAttribute("aria-label") ?? "", x: 0.01, xanchor: "left", y: 1, yanchor: "top", pad: { t: 10 }, font: { size: 14, color: layout.hoverlabel?.font?.color } };
  const font = { ...layout.font, family };
  const margin = { ...layout.margin, t: (layout.margin?.t ?? 0) + TITLE_PX };
  const figure = { data: element.data, layout: { ...layout, width, height, autosize: false, title, font, margin } };
  // The text itself: as an address of an object, our content security policy would refuse it.
  const svg = await window.Plotly.toImage(figure, { format: "svg", width, height, imageDataOnly: true });
  return { svg, width, height };
}

/**
 * @param {{svg: string, width: number, height: number}} drawn
 * @returns {Promise<Blob>}
 */
async function painted({ svg, width, height }) {
  const image = new Image();
  image.src = `data:image/svg+xml,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = make("canvas", { width: width * SCALE, height: height * SCALE });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done));
}

/**
 * @param {Blob} blob
 * @param {string} name
 */
function store(blob, name) {
  const link = make("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  URL.revokeObjectURL(link.href);
}

/**
 * The name of a file: the page's address and the chart.
 * @param {string} path
 * @param {string} id
 */
export function fileName(path, id) {
  const words = path.split("/").filter((word) => word && word !== "runs");
  return ["paceline", ...words, id.replace(/^(chart|compare|fleet)-/, "")].join("-").replace(/[^\w.-]+/g, "_");
}

/**
 * What traces show, as CSV: a row for each x, a column for each line, two for each band.
 * @param {any[]} traces Plotly's
 * @param {string} [across] what the x axis shows, where it has a title
 */
export function csvOf(traces, across = "step") {
  /** @type {{name: string, values: Map<any, any>}[]} */
  const columns = [];
  /** @type {[Map<any, any>, Map<any, any>] | null} */
  let band = null; // bounds of the line that follows; an area with gaps has several traces
  for (const trace of traces) {
    if (trace.fill === "toself") {
      band ??= [new Map(), new Map()];
      const half = trace.x.length / 2;
      for (let at = 0; at < half; at++) {
        band[0].set(trace.x[at], trace.y[at]);
        band[1].set(trace.x[at], trace.y[trace.x.length - 1 - at]);
      }
      continue;
    }
    if (!trace.name && trace.line?.width === 0) { // an edge of an area that is filled between two lines
      band ??= [new Map(), new Map()];
      const edge = band[trace.fill ? 1 : 0];
      trace.y.forEach((/** @type {any} */ y, /** @type {number} */ at) => edge.set(trace.x[at], y));
      continue;
    }
    const name = trace.name || "value";
    if (band) columns.push({ name: `${name}, lower bound`, values: band[0] }, { name: `${name}, upper bound`, values: band[1] });
    band = null;
    const values = new Map();
    trace.y.forEach((/** @type {any} */ y, /** @type {number} */ at) => y !== null && values.set(trace.x[at], y));
    columns.push({ name, values });
  }
  const all = [...new Set(columns.flatMap(({ values }) => [...values.keys()]))];
  if (all.every((x) => typeof x === "number")) all.sort((a, b) => a - b);
  else if (isTime(all)) all.sort();
  const head = [isTime(all) ? "time" : across, ...columns.map(({ name }) => name)];
  return rowsOf([head, ...all.map((x) => [x, ...columns.map(({ values }) => values.get(x))])]);
}

/**
 * Whether an axis shows times, as Plotly takes them.
 * @param {any[]} values
 */
function isTime(values) {
  return values.length > 0 && values.every((value) => typeof value === "string" && /^\d{4}-\d\d-\d\d/.test(value));
}

/**
 * The heat map's times in s: a row for each rank, or for the slowest of some ranks; a column for each step.
 * @param {Heat} heat
 */
export function heatCsv({ world, together, rows, step, values }) {
  const table = Array.from({ length: rows }, (_, row) => {
    const [first, last] = [row * together, Math.min(world, (row + 1) * together) - 1];
    const times = Array.from(values.subarray(row * step.length, (row + 1) * step.length), (value) => (Number.isNaN(value) ? null : Number(value.toPrecision(4))));
    return [first === last ? first : `${first}–${last}`, ...times];
  });
  return rowsOf([["rank", ...step.map((first) => `step ${first}`)], ...table]);
}

/**
 * Rows as CSV. A text that a spreadsheet would take for a formula has a ' before it.
 * @param {any[][]} rows
 */
export function rowsOf(rows) {
  const cell = (/** @type {any} */ value) => {
    const isFormula = typeof value === "string" && /^[=+\-@\t\r]/.test(value);
    const words = value === null || value === undefined ? "" : `${isFormula ? "'" : ""}${value}`;
    return /[",\n\r]/.test(words) ? `"${words.replaceAll('"', '""')}"` : words;
  };
  return `${rows.map((row) => row.map(cell).join(",")).join("\n")}\n`;
}
