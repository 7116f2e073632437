// What every chart shows besides its lines: policy switches, time without a controller, missing telemetry.

/** Spans of steps that not all workers reported, between those that they did: [first, one past the last). */
export function gaps(step, bucket) {
  const found = [];
  for (let i = 1; i < step.length; i++) {
    if (step[i] - step[i - 1] > 1.5 * bucket) found.push([step[i - 1] + bucket, step[i]]);
  }
  return found;
}

/** Plotly shapes and annotations for the steps [from, to]. */
export function marks(switches, coasts, missing, from, to, colours) {
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
    // A label wider than its span would cover its neighbours; the key above the charts explains the rest.
    if (x1 - x0 > 0.12 * (to - from)) annotations.push(note(label, (x0 + x1) / 2, 0.04, "center", colours.muted));
  }
  for (const change of switches) {
    const x = change.effective_step;
    if (change.version === 0 || x === null || x < from || x > to) continue;
    shapes.push({
      type: "line", xref: "x", yref: "paper", x0: x - 0.5, x1: x - 0.5, y0: 0, y1: 1,
      line: { color: colours.mark, width: 1.5, dash: "dash" },
    });
    const right = x - from > 0.8 * (to - from);
    annotations.push(note(`▸ ${change.policy}`, x - 0.5, 1, right ? "right" : "left", colours.mark));
  }
  return { shapes, annotations };
}

function note(text, x, y, xanchor, color) {
  return {
    text, x, y, xref: "x", yref: "paper", xanchor, yanchor: "bottom",
    showarrow: false, font: { size: 11, color }, captureevents: false,
  };
}
