// Colours of the page for charts and the heat map, which CSS does not reach.

/**
 * The current theme's variables, and `ranks`: the palette, each colour readable on the panel.
 * @param {string[]} palette
 * @returns {Colours}
 */
export function theme(palette) {
  const style = getComputedStyle(document.body);
  const colour = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
  const panel = rgb(colour("--panel"));
  return {
    text: colour("--text"),
    muted: colour("--muted"),
    line: colour("--line"),
    accent: colour("--accent"),
    panel: colour("--panel"),
    mark: colour("--switch"),
    coast: colour("--coast"),
    bad: colour("--bad"),
    badText: colour("--bad-text"),
    badBand: colour("--bad-band"),
    grey: colour("--grey"),
    greyBand: colour("--grey-band"),
    ok: colour("--ok"),
    grid: colour("--grid"),
    heat: [rgb(colour("--heat-low")), rgb(colour("--heat-middle")), rgb(colour("--heat-high"))],
    ranks: palette.map((entry) => css(readable(rgb(entry), panel))),
  };
}

/**
 * Calls back when the theme changes between light and dark. Returns a function that ends this.
 * @param {() => void} changed
 */
export function onTheme(changed) {
  const observer = new MutationObserver(changed);
  observer.observe(document.documentElement, { attributeFilter: ["data-mantine-color-scheme"] });
  return () => observer.disconnect();
}

/**
 * [r, g, b] of "#rrggbb" or "rgb(r, g, b)".
 * @param {string} text
 * @returns {number[]}
 */
function rgb(text) {
  if (text.startsWith("#")) return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
  return (text.match(/\d+/g) ?? []).slice(0, 3).map(Number);
}

const css = (/** @type {number[]} */ colour) => `rgb(${colour.map(Math.round).join(",")})`;

/**
 * WCAG 2 relative luminance.
 * @param {number[]} colour
 */
function luminance(colour) {
  const [r, g, b] = colour.map((value) => {
    const part = value / 255;
    return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/**
 * The colour, moved towards black or white until its contrast with the ground is 3:1 (WCAG 1.4.11).
 * @param {number[]} colour
 * @param {number[]} ground
 */
function readable(colour, ground) {
  const below = luminance(ground);
  const towards = below > 0.5 ? 0 : 255;
  for (let mix = 0; mix < 1; mix += 0.05) {
    const mixed = colour.map((value) => value + (towards - value) * mix);
    const above = luminance(mixed);
    if ((Math.max(above, below) + 0.05) / (Math.min(above, below) + 0.05) >= 3) return mixed;
  }
  return [towards, towards, towards];
}
