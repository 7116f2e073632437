// What is chosen on a run's page, in its address: a link shows what its sender saw, and so does a reload.

const WINDOWS = ["100", "300", "1000", "2000", "all"];
const SMOOTHINGS = [1, 50, 200];

/**
 * What the reader chose; null: the default.
 * @typedef {object} Chosen
 * @property {string | null} window steps to show
 * @property {[number, number] | null} zoom steps that were dragged across
 * @property {number} smoothing steps of the rolling median
 * @property {"steps" | "clock"} axis
 * @property {number | null} rank in colour
 * @property {"rank" | "node" | "cause" | null} order of the heat map's rows
 */

/**
 * What an address says; what makes no sense is left out.
 * @param {string} query
 * @returns {Chosen}
 */
export function chosenOf(query) {
  const values = new URLSearchParams(query);
  const whole = (/** @type {string} */ name) => (/^\d{1,15}$/.test(values.get(name) ?? "") ? Number(values.get(name)) : null);
  const [from, to, smoothing] = [whole("from"), whole("to"), whole("smoothing")];
  const [window, order] = [values.get("show"), values.get("order")];
  return {
    window: window !== null && WINDOWS.includes(window) ? window : null,
    zoom: from !== null && to !== null && from < to ? [from, to] : null,
    smoothing: smoothing !== null && SMOOTHINGS.includes(smoothing) ? smoothing : 50,
    axis: values.get("axis") === "clock" ? "clock" : "steps",
    rank: whole("rank"),
    order: order === "rank" || order === "node" || order === "cause" ? order : null,
  };
}

/**
 * The query of a choice: without defaults, so that most addresses have none.
 * @param {Chosen} chosen
 */
export function queryOf({ window, zoom, smoothing, axis, rank, order }) {
  const values = new URLSearchParams();
  if (window !== null) values.set("show", window);
  if (zoom) [["from", zoom[0]], ["to", zoom[1]]].forEach(([name, step]) => values.set(String(name), String(step)));
  if (smoothing !== 50) values.set("smoothing", String(smoothing));
  if (axis !== "steps") values.set("axis", axis);
  if (rank !== null) values.set("rank", String(rank));
  if (order !== null) values.set("order", order);
  return values.toString();
}
