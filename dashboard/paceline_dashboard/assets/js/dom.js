// Helpers for the document.
/**
 * The element with this id, which the pages in Python define.
 * @type {(id: string) => any}
 */
export const byId = (id) => document.getElementById(id);

/**
 * Sets a text only if it changes, so that screen readers do not repeat it.
 * @param {string} id
 * @param {string} value
 */
export function text(id, value) {
  const element = byId(id);
  if (element && element.textContent !== value) element.textContent = value;
}

/**
 * @param {string} id
 * @param {boolean} visible
 */
export function show(id, visible) {
  const element = byId(id);
  if (element && element.hidden === visible) element.hidden = !visible;
}

/**
 * Shows a message in an alert box; an empty message hides the box.
 * @param {string} id
 * @param {string} message
 */
export function problem(id, message) {
  text(id, message);
  show(id, message !== "");
}

/**
 * An element: tag, properties (or attributes, where the name has a dash), children as nodes or text.
 * @param {string} tag
 * @param {Record<string, any>} properties
 * @param {(Node | string)[]} children
 * @returns {any}
 */
export function make(tag, properties = {}, ...children) {
  /** @type {any} */
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/**
 * Shows a new element in a place, unless the one there is equal. The table stays scrolled, and the focus stays at the
 * element with the same `data-key`.
 * @param {string} id of the place
 * @param {HTMLElement} made
 */
export function renew(id, made) {
  const place = byId(id);
  if (place.firstElementChild?.isEqualNode(made)) return;
  const key = place.contains(document.activeElement) ? document.activeElement?.getAttribute("data-key") : null;
  const left = place.querySelector(".scroll")?.scrollLeft ?? 0;
  place.replaceChildren(made);
  const table = place.querySelector(".scroll");
  if (table) table.scrollLeft = left;
  const same = [...place.querySelectorAll("[data-key]")].find((each) => each.getAttribute("data-key") === key);
  same?.focus({ preventScroll: true });
}

/**
 * Shows another page of the dashboard, without loading the document anew.
 * @param {string} path such as `runs/3f9a/ranks/5`
 */
export function go(path) {
  const pathname = new URL(path, new URL("../../", import.meta.url)).pathname;
  window.dash_clientside.set_props("url", { pathname });
}

/**
 * Waits for the element with this id: some of Dash's components render late.
 * @param {string} id
 * @returns {Promise<any>}
 */
export function whenThere(id) {
  const present = byId(id);
  if (present) return Promise.resolve(present);
  return new Promise((resolve) => {
    const observer = new MutationObserver(() => {
      const element = byId(id);
      if (!element) return;
      observer.disconnect();
      resolve(element);
    });
    observer.observe(document.body, { childList: true, subtree: true });
  });
}

/**
 * Shows the place of this page in the header, and its title in the browser's tab.
 * @param {string} label empty: the links in the header say where this is
 * @param {string} title empty: the first page
 */
export function crumbs(label, title = label) {
  const nav = byId("crumbs");
  document.title = title ? `${title} · Paceline` : "Paceline";
  nav.replaceChildren(...(label ? [make("span", { "aria-current": "page" }, label)] : []));
}

const STATES = {
  live: "live",
  connecting: "connecting…",
  lost: "connection lost, retrying",
  bus: "waiting for the bus",
  database: "waiting for the database",
  ended: "run ended",
  unknown: "no such run",
  missing: "no such rank",
};

const OLD = "Training goes on, and what is shown here grows old. This page goes on by itself.";

/**
 * Why a page shows nothing new.
 * @type {Partial<Record<keyof typeof STATES, string>>}
 */
const AWAY = {
  lost: `The server does not answer. ${OLD}`,
  bus: `The bus (Redis) does not answer the server. ${OLD}`,
  database: `The database does not answer the server. ${OLD}`,
};

/**
 * Shows the connection's state in the header, and why nothing new comes.
 * @param {keyof typeof STATES} state
 */
export function connection(state) {
  const element = byId("connection-status");
  element.className = `connection ${state}`;
  text("connection-status", STATES[state]);
  problem("page-lost", AWAY[state] ?? "");
}

/**
 * Calls `task` every `period_s` while the page is visible, never twice at once. Returns a function that ends it.
 * @param {() => unknown} task
 * @param {number} periodS
 */
export function poll(task, periodS) {
  let ended = false;
  /** @type {ReturnType<typeof setTimeout> | undefined} */
  let timer;
  const round = async () => {
    timer = undefined;
    try {
      if (!document.hidden) await task();
    } finally {
      if (!ended) timer = setTimeout(round, periodS * 1000);
    }
  };
  const now = () => {
    if (!document.hidden && timer !== undefined) {
      clearTimeout(timer);
      round();
    }
  };
  document.addEventListener("visibilitychange", now);
  round();
  return () => {
    ended = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", now);
  };
}
