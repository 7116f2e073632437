// Answers of `GET view`, as the server makes them.
export const range = (from, to) => Array.from({ length: Math.max(0, to - from + 1) }, (_, i) => from + i);

/** Columns of single steps: SE is the step's number, the loss is lost of every fifth step. */
export const stepsOf = (numbers) => ({
  step: numbers, epoch: numbers.map(() => 0), ended_at: numbers.map((step) => step / 2),
  se: numbers, loss: numbers.map((step) => (step % 5 ? step : null)), compute_max: numbers.map((step) => step / 10),
});

const NAMES = ["se", "loss", "compute_max"];
const known = (values) => values.filter((value) => value !== null);
const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null);

/** The answer for these steps, in buckets; one rank, whose time is 1 s in each step but the `spikes`: there it is 3 s. */
export function answerOf(numbers, bucket, spikes = []) {
  const starts = [...new Set(numbers.map((step) => step - (step % bucket)))];
  const within = (start) => numbers.filter((step) => step - (step % bucket) === start);
  const single = stepsOf(numbers);
  const values = (name, start) => known(within(start).map((step) => single[name][numbers.indexOf(step)]));
  const steps = { bucket, step: starts.map((start) => within(start)[0]), epoch: starts.map(() => 0), ended_at: starts.map((start) => within(start).at(-1) / 2) };
  for (const name of NAMES) {
    steps[name] = starts.map((start) => mean(values(name, start)));
    if (bucket === 1) continue;
    steps[`${name}_min`] = starts.map((start) => (values(name, start).length ? Math.min(...values(name, start)) : null));
    steps[`${name}_max`] = starts.map((start) => (values(name, start).length ? Math.max(...values(name, start)) : null));
  }
  const times = (start) => within(start).map((step) => (spikes.includes(step) ? 3 : 1));
  const each = (of) => [starts.map((start) => of(...times(start)))];
  const average = each((...all) => mean(all));
  const bands = Object.fromEntries(["compute_p10", "compute_p50", "compute_p90"].map((name) => [name, average[0]]));
  for (const name of ["share_min", "share_p50", "share_p90", "share_max"]) bands[name] = starts.map(() => 1);
  const high = Math.max(...each(Math.max)[0], 1);
  const codes = each(Math.max)[0].map((value) => (value === 3 ? 255 : 1));
  return {
    run: { step: numbers.at(-1) ?? null }, begins: 0, steps, coasts: [], switches: [], segments: [],
    worker_steps: { bucket, ranks: [0], step: starts, compute_s: average, ett_s: average, share: each(() => 1), compute_s_min: each(Math.min), compute_s_max: each(Math.max) },
    heat: { world: 1, together: 1, rows: 1, bucket, step: starts, low: 1, high, cells: btoa(String.fromCharCode(...codes)), ...bands },
  };
}
