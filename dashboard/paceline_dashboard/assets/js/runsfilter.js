// Which runs the list shows, and in which order. All of it is in the address, so that a link shows the same list.
import { get } from "./api.js";
import { byId, make, show } from "./dom.js";

const TYPING_MS = 300; // the server is asked when nobody has typed for so long
const NAMES = /** @type {const} */ (["text", "state", "tag", "used", "sort"]);

/**
 * What the reader chose; an empty text: nothing.
 * @typedef {Record<(typeof NAMES)[number], string>} Filter
 */

/**
 * @param {string} query of an address
 * @returns {Filter}
 */
export function filterOf(query) {
  const values = new URLSearchParams(query);
  return /** @type {Filter} */ (Object.fromEntries(NAMES.map((name) => [name, values.get(name) ?? ""])));
}

/**
 * The query of an address: without what is empty.
 * @param {Filter} filter
 */
export function queryOf(filter) {
  return new URLSearchParams(NAMES.filter((name) => filter[name]).map((name) => [name, filter[name]])).toString();
}

export class RunsFilter {
  /** @param {() => void} changed */
  constructor(changed) {
    this.changed = changed;
    this.value = filterOf(location.search);
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.timer = undefined;
  }

  /** Whether some runs are left out. */
  get narrow() {
    return NAMES.some((name) => name !== "sort" && this.value[name]);
  }

  async open() {
    // Dash has no plain input.
    const input = make("input", { id: "runs-search", type: "search", placeholder: "name, note, node, tag, id…", autocomplete: "off" });
    byId("runs-search-place").replaceChildren(input);
    input.addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.#take(), TYPING_MS);
    });
    for (const id of ["state-filter", "tag-filter", "used-filter", "runs-sort"]) byId(id).addEventListener("change", () => this.#take());
    byId("runs-all").addEventListener("click", () => {
      this.#stopWaiting();
      this.value = filterOf("");
      this.#tell();
      this.#take();
    });
    this.#tell();
    const [tags, policies] = await Promise.all([get("tags"), get("policies")]);
    if (!byId("tag-filter")) return; // another page is there
    fill("tag-filter", tags.map((/** @type {any} */ { tag }) => tag));
    fill("used-filter", policies.map((/** @type {any} */ { name }) => name));
    show("tag-filter-field", tags.length > 0 || this.value.tag !== "");
    this.#tell();
  }

  close() {
    this.#stopWaiting();
  }

  #stopWaiting() {
    clearTimeout(this.timer);
    this.timer = undefined;
  }

  /** Shows in the controls what is chosen. */
  #tell() {
    // What is being typed is not in `value` yet, and must stay.
    if (this.timer === undefined) byId("runs-search").value = this.value.text;
    for (const [id, name] of /** @type {[string, keyof Filter][]} */ (CONTROLS)) {
      const value = this.value[name];
      if (value && ![...byId(id).options].some((option) => option.value === value)) fill(id, [value]);
      byId(id).value = value;
    }
    show("runs-all", this.narrow);
  }

  #take() {
    this.#stopWaiting();
    this.value.text = byId("runs-search").value.trim();
    for (const [id, name] of /** @type {[string, keyof Filter][]} */ (CONTROLS)) this.value[name] = byId(id).value;
    show("runs-all", this.narrow);
    const query = queryOf(this.value);
    history.replaceState(history.state, "", query ? `?${query}` : location.pathname);
    this.changed();
  }
}

const CONTROLS = [["state-filter", "state"], ["tag-filter", "tag"], ["used-filter", "used"], ["runs-sort", "sort"]];

/**
 * Adds choices that a control does not have yet.
 * @param {string} id
 * @param {string[]} values
 */
function fill(id, values) {
  const present = new Set([...byId(id).options].map((option) => option.value));
  byId(id).append(...values.filter((value) => !present.has(value)).map((value) => make("option", { value }, value)));
}
