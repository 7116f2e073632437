// A preset's parameters as form fields, made, read and checked by their JSON Schema.
import { byId, make, problem } from "./dom.js";
import { integer } from "./format.js";

const inputId = (/** @type {string} */ name) => `policy-parameter-${name}`;

/** A parameter's value is not legal. */
export class FieldError extends Error {
  /**
   * @param {string} field
   * @param {string} message
   */
  constructor(field, message) {
    super(`${field}: ${message}`);
    this.field = field;
  }
}

/**
 * The names and schemas of a preset's parameters that have an effect in a run.
 * @param {PresetInfo} preset
 * @param {number | null} dif standard deviation of the sizes of the run's samples; null: unknown
 */
export const effective = (preset, dif) => Object.entries(preset.parameters).filter(([, { oneSize }]) => !(oneSize && dif));

/**
 * A labelled control for one parameter, with a place for its error message.
 * @param {string} name
 * @param {ParameterSchema} schema
 * @param {any} value
 */
export function fieldOf(name, schema, value) {
  const id = inputId(name);
  const control = controlOf(schema, value);
  control.id = id;
  control.setAttribute("aria-describedby", `${id}-help ${id}-problem`);
  control.addEventListener("input", () => blame(name, ""));
  const range = bounds(schema.items ?? schema);
  const legal = schema.items ? `Each is ${range}.` : range && `${range[0].toUpperCase()}${range.slice(1)}.`;
  const help = [schema.description, legal, `Default: ${shown(schema)}.`];
  return make(
    "div",
    { className: "field" },
    make("label", { for: id }, schema.title ?? name),
    control,
    make("div", { className: "muted small", id: `${id}-help` }, help.filter(Boolean).join(" ")),
    make("p", { className: "problem small", id: `${id}-problem`, hidden: true }),
  );
}

/**
 * The value of a parameter's field. Throws FieldError.
 * @param {string} name
 * @param {ParameterSchema} schema
 * @param {number} world ranks of the run
 */
export function valueOf(name, schema, world) {
  const control = byId(inputId(name));
  if (schema.enum) return JSON.parse(control.value);
  if (schema.type === "boolean") return control.checked;
  if (schema.type === "array") return listOf(name, schema, control.value, world);
  if (schema.type === "string") return control.value;
  // A number field has an empty value if its text is no number.
  return checked(name, schema, control.value.trim() === "" ? NaN : Number(control.value));
}

/**
 * Shows an error message at a parameter's field; "" removes it. Returns whether there is a field.
 * @param {string} name
 * @param {string} message
 */
export function blame(name, message) {
  const control = byId(inputId(name));
  if (!control) return false;
  problem(`${inputId(name)}-problem`, message);
  control.setAttribute("aria-invalid", String(message !== ""));
  if (message) control.focus();
  return true;
}

/**
 * @param {ParameterSchema} schema
 * @param {any} value
 */
function controlOf(schema, value) {
  if (schema.enum) {
    const select = make("select", {}, ...schema.enum.map((entry) => make("option", { value: JSON.stringify(entry) }, String(entry))));
    select.value = JSON.stringify(value);
    return select;
  }
  if (schema.type === "boolean") return make("input", { type: "checkbox", role: "switch", checked: Boolean(value) });
  if (schema.type === "array") {
    return make("input", { type: "text", value: value.join(", "), placeholder: "such as 4, 4, 2", autocomplete: "off", spellcheck: false });
  }
  if (schema.type === "string") return make("input", { type: "text", value });
  const input = make("input", { type: "number", step: schema.type === "integer" ? "1" : "any", value });
  if (schema.minimum !== undefined) input.min = schema.minimum;
  if (schema.maximum !== undefined) input.max = schema.maximum;
  return input;
}

/**
 * @param {string} name
 * @param {ParameterSchema} schema
 * @param {string} given
 * @param {number} world
 */
function listOf(name, schema, given, world) {
  const parts = given.match(/[^\s,;]+/g) ?? [];
  const values = parts.map((part) => {
    if (Number.isNaN(Number(part))) throw new FieldError(name, `“${part}” is no number. Write numbers with commas between them.`);
    return checked(name, /** @type {ParameterSchema} */ (schema.items), Number(part));
  });
  if (schema.perRank && values.length && values.length !== world) {
    const ranks = `the run has ${integer(world)} ranks. Give one for each rank, or none.`;
    throw new FieldError(name, `${integer(values.length)} given, but ${ranks}`);
  }
  return values;
}

/**
 * @param {string} name
 * @param {ParameterSchema} schema
 * @param {number} value
 */
function checked(name, schema, value) {
  const { minimum = -Infinity, exclusiveMinimum = -Infinity, maximum = Infinity } = schema;
  const whole = schema.type !== "integer" || Number.isInteger(value);
  if (Number.isFinite(value) && whole && value >= minimum && value > exclusiveMinimum && value <= maximum) return value;
  throw new FieldError(name, `must be ${bounds(schema)}.`);
}

/**
 * "a whole number, at least 4, at most 64"; "" for other types.
 * @param {ParameterSchema} schema
 */
function bounds(schema) {
  if (schema.type !== "integer" && schema.type !== "number") return "";
  /** @type {[string, "exclusiveMinimum" | "minimum" | "maximum"][]} */
  const words = [["above", "exclusiveMinimum"], ["at least", "minimum"], ["at most", "maximum"]];
  const limits = words.filter(([, key]) => key in schema).map(([word, key]) => `${word} ${limit(Number(schema[key]))}`);
  return [schema.type === "integer" ? "a whole number" : "a number", ...limits].join(", ");
}

const limit = (/** @type {number} */ value) => (Math.abs(value) < 1e9 ? value.toLocaleString("en", { maximumFractionDigits: 9 }) : String(value));

/** @param {ParameterSchema} schema */
function shown(schema) {
  if (schema.type === "array") return schema.default.length ? schema.default.join(", ") : "none";
  if (schema.type === "boolean") return schema.default ? "on" : "off";
  return typeof schema.default === "number" ? limit(schema.default) : schema.default;
}
