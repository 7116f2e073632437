// Helpers for the document.
/**
 * The element with this id, which layout.py defines.
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
 * Shows the place of this page in the header; empty on the first page.
 * @param {string} label
 */
export function crumbs(label) {
  const nav = byId("crumbs");
  nav.replaceChildren(...(label ? [make("span", { "aria-current": "page" }, label)] : []));
}

const STATES = {
  live: "live",
  connecting: "connecting…",
  lost: "connection lost, retrying",
  ended: "run ended",
};

/**
 * Shows the connection's state in the header: "live", "connecting", "lost" or "ended".
 * @param {keyof typeof STATES} state
 */
export function connection(state) {
  const element = byId("connection-status");
  element.className = `connection ${state}`;
  text("connection-status", STATES[state]);
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
