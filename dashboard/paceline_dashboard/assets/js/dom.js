// Small helpers around the document.
export const byId = (id) => document.getElementById(id);

/** Sets text only when it changes: no needless layout, no repeated announcements by screen readers. */
export function text(id, value) {
  const element = byId(id);
  if (element && element.textContent !== value) element.textContent = value;
}

export function show(id, visible) {
  const element = byId(id);
  if (element && element.hidden === visible) element.hidden = !visible;
}

/** Shows a message in an alert box; an empty one hides it. */
export function problem(id, message) {
  text(id, message);
  show(id, message !== "");
}

/** An element: tag, properties (or attributes, where the name has a dash), children as nodes or text. */
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for") element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

/** The element, as soon as it is in the document: some of Dash's components render late. */
export function whenThere(id) {
  const found = byId(id);
  if (found) return Promise.resolve(found);
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

/** Where we are, in the header; empty on the first page. */
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

/** What the header says about the connection: "live", "connecting", "lost" or "ended". */
export function connection(state) {
  const element = byId("connection-status");
  element.className = `connection ${state}`;
  text("connection-status", STATES[state]);
}

/** Calls `task` every `period_s` while the page is visible; never twice at once. Returns how to end it. */
export function poll(task, periodS) {
  let ended = false;
  let timer = null;
  const round = async () => {
    timer = null;
    try {
      if (!document.hidden) await task();
    } finally {
      if (!ended) timer = setTimeout(round, periodS * 1000);
    }
  };
  const now = () => {
    if (!document.hidden && timer !== null) {
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
