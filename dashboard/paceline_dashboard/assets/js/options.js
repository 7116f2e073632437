// What a run may be switched to: presets with their parameters, in groups by what they change in the training.

/** @type {{changes: Changes, title: string, about: string, tag: string}[]} */
export const GROUPS = [
  { changes: "nothing", title: "Training identical", about: "same samples in each global batch; same updates, except with dropout, bf16 or augmentation", tag: "training identical" },
  { changes: "batches", title: "Batches composed differently", about: "each sample still once an epoch, in other company", tag: "other batches" },
  {
    changes: "training",
    title: "Training changed",
    about: "updates do not wait for all ranks: accuracy may differ, ask the run's owner",
    tag: "training changed",
  },
];
/** @type {Changes[]} */
const SEVERITY = GROUPS.map((group) => group.changes);

/** @type {Record<Changes, {good: boolean, words: string}[]>} */
const CONSEQUENCES = {
  nothing: [
    { good: true, words: "Each global batch holds the samples that plain DDP would give it, and each sample is used once per epoch." },
    { good: true, words: "Training does not stop. A switch back leaves no trace in the model." },
  ],
  batches: [
    { good: true, words: "Training does not stop. Each sample is still used once per epoch, and global batches keep their size." },
    { good: false, words: "Other samples meet in a global batch than under plain DDP: accuracy may differ. Steps trained until a switch back stay as they are." },
  ],
  training: [
    { good: false, words: "Gradients may be old or dropped, and replicas may differ: accuracy may differ." },
    { good: false, words: "A switch back does not undo it: steps trained until then stay as they are." },
    { good: true, words: "The training does not stop." },
  ],
};

/**
 * What a switch means for the training, as points: good ones, and those to be careful about.
 * @param {Changes} changes
 */
export const consequences = (changes) => CONSEQUENCES[changes];

/** @param {Changes} changes */
export const groupOf = (changes) => GROUPS[SEVERITY.indexOf(changes)];

/**
 * What a preset changes in the training with these parameters. If several parameters change it, the gravest change counts.
 * @param {Pick<PresetInfo, "changes" | "changes_with">} preset
 * @param {Record<string, any>} parameters
 * @returns {Changes}
 */
export function changesOf({ changes, changes_with: changesWith }, parameters) {
  const values = Object.entries(changesWith).map(([name, byValue]) => byValue[String(parameters[name])]);
  const known = values.filter((value) => value !== undefined);
  return known.length ? known.reduce((gravest, next) => (SEVERITY.indexOf(next) > SEVERITY.indexOf(gravest) ? next : gravest)) : changes;
}

/**
 * All options: each preset with its defaults, and each further variant that has a forecast.
 * @param {PresetInfo[]} presets
 * @param {WhatIfAnswer | null} answer the newest forecast; null: there is none yet
 * @param {{policy: string, parameters: Record<string, any>}} inForce
 * @returns {Option[]}
 */
export function optionsOf(presets, answer, inForce) {
  const forecasts = answer?.forecasts ?? [];
  const options = presets.flatMap((preset) => {
    const defaults = defaultsOf(preset);
    const variants = forecasts.filter(({ policy, parameters }) => policy === preset.name && !same({ ...defaults, ...parameters }, defaults));
    const given = [{}, ...variants.map(({ parameters }) => parameters)];
    return given.map((parameters) => optionOf(preset, parameters, answer, inForce));
  });
  // Parameters that no row has: the row of the preset's defaults stands for the policy in force.
  const active = options.find((option) => option.inForce) ?? options.find(({ policy }) => policy === inForce.policy);
  return options.map((option) => ({ ...option, inForce: option === active }));
}

/**
 * @param {PresetInfo} preset
 * @param {Record<string, any>} parameters those that differ from the defaults
 * @param {WhatIfAnswer | null} answer
 * @param {{policy: string, parameters: Record<string, any>}} inForce
 * @returns {Option}
 */
function optionOf(preset, parameters, answer, inForce) {
  const whole = { ...defaultsOf(preset), ...parameters };
  const label = labelOf(preset.name, parameters);
  const active = inForce.policy === preset.name && same({ ...defaultsOf(preset), ...inForce.parameters }, whole);
  const forecast = forecastOf(answer, preset, whole);
  const left = answer?.left_out.find(({ policy }) => policy === label || policy === preset.name);
  return {
    label,
    policy: preset.name,
    parameters: whole,
    changes: changesOf(preset, whole),
    summary: preset.summary,
    forecast: forecast?.in_force ? null : forecast,
    left: left?.reason ?? null,
    inForce: active,
    recommended: !active && forecast !== null && forecast.label === answer?.recommended,
  };
}

/**
 * The forecast of a preset with exactly these parameters, or null.
 * @param {WhatIfAnswer | null} answer
 * @param {PresetInfo} preset
 * @param {Record<string, any>} parameters all of them
 * @returns {PresetForecast | null}
 */
export function forecastOf(answer, preset, parameters) {
  const defaults = defaultsOf(preset);
  const known = answer?.forecasts.find((each) => each.policy === preset.name && same({ ...defaults, ...each.parameters }, parameters));
  return known ?? null;
}

/**
 * The options of one group: the recommended one, then those that save most, then those without a forecast.
 * @param {Option[]} options
 * @param {Changes} changes
 */
export function ofGroup(options, changes) {
  const rank = (/** @type {Option} */ option) => (option.recommended ? Infinity : option.inForce ? 0 : (option.forecast?.saving ?? -Infinity));
  const compare = (/** @type {Option} */ one, /** @type {Option} */ other) => {
    const [first, second] = [rank(one), rank(other)];
    return first === second ? one.label.localeCompare(other.label) : second - first;
  };
  return options.filter((option) => option.changes === changes).sort(compare);
}

/** @param {PresetInfo} preset */
export const defaultsOf = (preset) => Object.fromEntries(Object.entries(preset.parameters).map(([name, schema]) => [name, schema.default]));

/**
 * "paceline (mode free)".
 * @param {string} policy
 * @param {Record<string, any>} parameters
 */
export function labelOf(policy, parameters) {
  const given = Object.entries(parameters).map(([name, value]) => `${name} ${Array.isArray(value) ? "…" : value}`);
  return given.length ? `${policy} (${given.join(", ")})` : policy;
}

/** @type {(value: any, other: any) => boolean} */
export const same = (value, other) => JSON.stringify(sorted(value)) === JSON.stringify(sorted(other));

/** @param {Record<string, any>} values */
const sorted = (values) => Object.entries(values).sort(([one], [other]) => (one < other ? -1 : 1));
