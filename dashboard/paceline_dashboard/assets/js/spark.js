// Small charts without axes, for the tiles: a line, and a dashed scale that says where it should be.
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 38; // px, as in run.css
const LABEL = 74; // room for the scale's words at the right, px

/**
 * @param {string} tag
 * @param {Record<string, string | number>} attributes
 * @param {string} words
 */
function svg(tag, attributes, words = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  if (words) element.textContent = words;
  return element;
}

/**
 * Heights between 0 (bottom) and 1 (top), and where the scale is. The range always holds the scale.
 * @param {(number | null)[]} values
 * @param {number | null} scale
 */
export function heights(values, scale) {
  const known = /** @type {number[]} */ ([...values, scale].filter((value) => value !== null && Number.isFinite(value)));
  const [least, most] = [Math.min(...known), Math.max(...known)];
  const span = most - least || Math.abs(most) || 1;
  const low = Math.max(0, least - 0.25 * span);
  const at = (/** @type {number | null} */ value) => (value === null || !Number.isFinite(value) ? null : (value - low) / (most + 0.1 * span - low));
  return { values: values.map(at), scale: at(scale) };
}

/**
 * The line's pieces as path data: a gap where a value is unknown.
 * @param {(number | null)[]} ys heights
 * @param {number} width of all, px
 * @param {number} first of which
 */
export function path(ys, width, first = 0) {
  const x = (/** @type {number} */ at) => (width * at) / Math.max(1, ys.length - 1);
  let pen = "M";
  let data = "";
  for (let at = first; at < ys.length; at++) {
    const y = ys[at];
    if (y === null) {
      pen = "M";
      continue;
    }
    data += `${pen}${x(at).toFixed(1)} ${(HEIGHT - 2 - (HEIGHT - 4) * y).toFixed(1)}`;
    pen = "L";
  }
  return data;
}

/**
 * Draws into an element.
 * @param {HTMLElement} element
 * @param {(number | null)[]} values
 * @param {{ scale: number | null, words: string, from: number, level: string }} options `from`: the first value that is
 *   coloured by `level`
 */
export function drawSpark(element, values, { scale, words, from, level }) {
  const whole = element.clientWidth;
  const shown = JSON.stringify([whole, values, scale, words, from, level]);
  if (element.dataset.shown === shown) return;
  element.dataset.shown = shown;
  if (whole === 0 || values.filter((value) => value !== null).length < 2) {
    element.replaceChildren();
    return;
  }
  const width = Math.max(20, whole - (words ? LABEL : 0));
  const drawn = heights(values, scale);
  const picture = svg("svg", { width: whole, height: HEIGHT, "aria-hidden": "true" });
  const line = { fill: "none", "stroke-width": 1.4, "stroke-linejoin": "round" };
  const coloured = (level === "bad" || level === "warn") && from < values.length - 1;
  if (coloured) {
    const begin = (width * from) / Math.max(1, values.length - 1);
    picture.append(svg("path", { d: `${path(drawn.values, width, from)}L${width} ${HEIGHT}L${begin} ${HEIGHT}Z`, fill: `var(--${level}-bg)` }));
  }
  if (drawn.scale !== null) {
    const y = HEIGHT - 2 - (HEIGHT - 4) * drawn.scale;
    picture.append(
      svg("path", { d: `M0 ${y}H${width + 2}`, stroke: "var(--ok)", "stroke-dasharray": "3 2", fill: "none" }),
      svg("text", { x: width + 6, y: Math.min(HEIGHT - 2, Math.max(10, y + 4)), fill: "var(--ok-text)", "font-size": 11 }, words),
    );
  }
  const before = coloured ? drawn.values.map((y, at) => (at <= from ? y : null)) : drawn.values;
  picture.append(svg("path", { d: path(before, width), stroke: "var(--grey)", ...line }));
  if (coloured) picture.append(svg("path", { d: path(drawn.values, width, from), stroke: `var(--${level})`, ...line }));
  element.replaceChildren(picture);
}
