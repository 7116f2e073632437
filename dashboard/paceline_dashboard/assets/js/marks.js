// The marks of every chart: policy switches, synchronisations that policies chose, time without a
// controller, missing telemetry.
const LABEL = 0.24; // share of the axis that a name may need
const WORDS = 60; // most characters of a line in a label's tooltip

/**
 * Spans of missing steps between steps that all workers reported: [first, one past the last).
 * @param {number[]} step
 * @param {number} bucket
 * @returns {Span[]}
 */
export function gaps(step, bucket) {
  /** @type {Span[]} */
  const spans = [];
  for (let i = 1; i < step.length; i++) {
    if (step[i] - step[i - 1] > 1.5 * bucket) spans.push([step[i - 1] + bucket, step[i]]);
  }
  return spans;
}

/**
 * Plotly shapes and annotations for the steps [from, to]. A switch is marked at once: until its first step is trained,
 * at the right end.
 * @param {{switches: Switch[], chosen: ChosenSync[], latest: number, going: boolean}} data
 * @param {Span[]} coasts
 * @param {Span[]} missing
 * @param {number} from
 * @param {number} to
 * @param {Colours} colours
 * @returns {{shapes: object[], annotations: object[]}}
 */
export function marks({ switches, chosen, latest, going }, coasts, missing, from, to, colours) {
  const shapes = [];
  const annotations = [];
  const spans = [
    ...coasts.map((span) => ({ span, label: "no controller", fill: colours.coast, dash: "solid" })),
    ...missing.map((span) => ({ span, label: "no data", fill: "rgba(0,0,0,0)", dash: "dot" })),
  ];
  for (const { span, label, fill, dash } of spans) {
    const [x0, x1] = [Math.max(span[0] - 0.5, from), Math.min(span[1] - 0.5, to + 0.5)];
    if (x1 <= x0) continue;
    shapes.push({
      type: "rect", xref: "x", yref: "paper", x0, x1, y0: 0, y1: 1, layer: "below",
      fillcolor: fill, line: { color: colours.muted, width: 0.7, dash },
    });
    // A label wider than its span would cover its neighbours, so it is left out. The key explains the mark.
    if (x1 - x0 > 0.12 * (to - from)) annotations.push(note(label, (x0 + x1) / 2, 0.04, "center", colours.muted));
  }
  /** @type {(x: number, dash: string, width: number) => object} */
  const mark = (x, dash, width) => ({
    type: "line", xref: "x", yref: "paper", x0: x - 0.5, x1: x - 0.5, y0: 0, y1: 1,
    line: { color: colours.mark, width, dash },
  });
  const right = (/** @type {number} */ x) => x - from > 0.8 * (to - from);
  /** @type {(words: string, x: number) => object} */
  const label = (words, x) => note(words, x - 0.5, 1, right(x) ? "right" : "left", colours.mark);
  const room = LABEL * (to - from);
  const begins = (/** @type {number} */ x) => (right(x) ? x - room : x); // of its label
  /** @type {number[]} */
  const labelled = [];
  const crowded = (/** @type {number} */ x) => labelled.some((other) => Math.abs(begins(other) - begins(x)) < room);
  const last = switches.at(-1);
  /** @type {{x: number, words: string}[]} */
  const began = [];
  for (const change of switches) {
    const ahead = change.effective_step === null || change.effective_step > latest;
    if (ahead && (!going || change !== last || to < latest)) continue; // it never began, or the end is not shown
    const x = ahead ? Math.min(latest + 1, to) : /** @type {number} */ (change.effective_step);
    if (change.version === 0 || x < from || x > to) continue;
    shapes.push(mark(x, ahead ? "dot" : "dash", 1.5));
    began.push({ x, words: `▸ ${change.policy}${ahead ? " from the next steps on" : ""}` });
  }
  // The newest switches get labels while there is room; the panel "Policy" lists all.
  const named = began.reverse().filter(({ x }) => !crowded(x) && labelled.push(x));
  for (const { x, words } of named.reverse()) annotations.push(label(words, x));
  for (const { from: x, before, synchroniser, why } of [...chosen].reverse()) {
    if (before === null || x < from || x > to) continue; // a policy's first choice: its switch is marked already
    shapes.push(mark(x, "dot", 1.2));
    if (crowded(x)) continue;
    const hovertext = lines(`From step ${x} ${why}.`);
    annotations.push({ ...label(`▹ ${synchroniser}`, x), captureevents: true, hovertext });
    labelled.push(x);
  }
  return { shapes, annotations };
}

/**
 * @param {string} text
 * @param {number} x
 * @param {number} y
 * @param {string} xanchor
 * @param {string} color
 */
function note(text, x, y, xanchor, color) {
  return {
    text, x, y, xref: "x", yref: "paper", xanchor, yanchor: "bottom",
    showarrow: false, font: { size: 11, color }, captureevents: false,
  };
}

/**
 * Breaks a text into lines of about equal length.
 * @param {string} words
 */
function lines(words) {
  return words.replace(new RegExp(`(.{${WORDS},}?) `, "g"), "$1<br>");
}
