// What a training backend takes, as form fields by their JSON Schema. An empty field leaves the choice to the backend.
import { make } from "./dom.js";

/**
 * A schema without "or null": an empty field stands for null.
 * @param {any} schema
 * @returns {any}
 */
export const plain = (schema) => schema.anyOf?.find((/** @type {any} */ each) => each.type !== "null") ?? schema;

/** @param {any} schema */
const isJson = (schema) => schema.type === "object" || (schema.type === "array" && schema.items?.type !== "string");

/**
 * The value of what was typed; undefined: nothing was. An Error says what is wrong.
 * @param {string} name
 * @param {any} schema
 * @param {string | boolean} typed
 * @returns {any}
 */
export function parsed(name, schema, typed) {
  const inner = plain(schema);
  const { type } = inner;
  if (typeof typed === "boolean") return typed === schema.default ? undefined : typed;
  const given = typed.trim();
  if (given === "") return undefined;
  if (type === "integer" || type === "number") {
    const value = Number(given);
    if (Number.isNaN(value)) throw new Error(`${name}: “${given}” is no number.`);
    return value;
  }
  if (!isJson(inner)) return type === "array" ? given.split("\n").map((line) => line.trim()).filter(Boolean) : given;
  try {
    const value = JSON.parse(given);
    if (value !== null && typeof value === "object" && Array.isArray(value) === (type === "array")) return value;
  } catch {
    // told below
  }
  throw new Error(`${name}: write ${type === "array" ? 'a JSON array, such as [{"name": "value"}]' : 'a JSON object, such as {"name": "value"}'}.`);
}

/**
 * What a field shows for a value; undefined: nothing was asked for.
 * @param {any} schema
 * @param {any} value
 * @returns {string | boolean}
 */
export function typedOf(schema, value) {
  const inner = plain(schema);
  const { type } = inner;
  if (type === "boolean") return value ?? schema.default ?? false;
  if (value === undefined || value === null) return "";
  if (isJson(inner)) return JSON.stringify(value);
  return type === "array" ? value.join("\n") : String(value);
}

/** The options of one backend. */
export class OptionFields {
  /**
   * @param {any} schema of the options, with `properties`
   * @param {Record<string, any>} values asked for before
   */
  constructor(schema, values) {
    this.schemas = /** @type {Record<string, any>} */ (schema.properties ?? {});
    /** @type {Record<string, any>} */
    this.controls = {};
    this.elements = Object.entries(this.schemas).map(([name, each]) => this.#field(name, each, values[name]));
  }

  /** The options that differ from the backend's own choice. Throws an Error that names the field. */
  get values() {
    const all = Object.entries(this.schemas).map(([name, schema]) => {
      const control = this.controls[name];
      return [name, parsed(name, schema, control.type === "checkbox" ? control.checked : control.value)];
    });
    return Object.fromEntries(all.filter(([, value]) => value !== undefined));
  }

  /**
   * @param {string} name
   * @param {any} schema
   * @param {any} value
   */
  #field(name, schema, value) {
    const inner = plain(schema);
    const id = `launch-option-${name}`;
    const shown = typedOf(schema, value);
    const control = typeof shown === "boolean"
      ? make("input", { type: "checkbox", checked: shown })
      : inner.enum
        ? make("select", {}, ...["", ...inner.enum].map((each) => make("option", { value: each }, each || "as the backend chooses")))
        : make("textarea", { rows: inner.type === "array" || inner.maxLength > 1000 ? 2 : 1, spellcheck: false });
    if (typeof shown === "string") control.value = shown;
    control.id = id;
    this.controls[name] = control;
    const standard = schema.default;
    const said = typeof standard === "string" && standard ? ` Default: ${standard}.` : typeof standard === "number" ? ` Default: ${standard}.` : "";
    const form = isJson(inner) ? ", as JSON" : inner.type === "array" ? ", a line each" : "";
    const help = `${inner.description ?? schema.description ?? ""}${form}.`;
    control.setAttribute("aria-describedby", `${id}-help`);
    return make("div", { className: "field" }, make("label", { for: id }, name.replaceAll("_", " ")), control,
      make("div", { className: "muted small", id: `${id}-help` }, help.replace(/^\./, "") + said));
  }
}
