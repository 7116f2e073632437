// As much of a browser's document as the modules under test use.

class Style {}

export class Element {
  constructor(tag) {
    Object.assign(this, { tagName: tag, children: [], attributes: {}, listeners: {}, dataset: {}, style: new Style() });
    this.hidden = false;
    this.textContent = "";
  }

  setAttribute(name, value) {
    this.attributes[name] = value;
  }

  getAttribute(name) {
    return this.attributes[name] ?? null;
  }

  append(...children) {
    this.children.push(...children);
  }

  replaceChildren(...children) {
    this.children = children;
  }

  addEventListener(name, listener) {
    (this.listeners[name] ??= []).push(listener);
  }

  dispatch(name, event = {}) {
    for (const listener of this.listeners[name] ?? []) listener(event);
  }

  focus() {
    this.focused = true;
  }

  /** This element and all below it. */
  *all() {
    yield this;
    for (const child of this.children) if (child instanceof Element) yield* child.all();
  }
}

/** A new document as `globalThis.document`; `add` puts an element with an id into it. */
export function newDocument() {
  const root = new Element("html");
  const listeners = {};
  globalThis.document = {
    hidden: false,
    createElement: (tag) => new Element(tag),
    getElementById: (id) => [...root.all()].find((element) => element.id === id) ?? null,
    addEventListener: (name, listener) => (listeners[name] ??= new Set()).add(listener),
    removeEventListener: (name, listener) => listeners[name]?.delete(listener),
    dispatch: (name) => [...(listeners[name] ?? [])].forEach((listener) => listener()),
    add: (id, tag = "div") => {
      const element = Object.assign(new Element(tag), { id });
      root.append(element);
      return element;
    },
    root,
  };
  return globalThis.document;
}
