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

  get firstElementChild() {
    return this.children.find((child) => child instanceof Element) ?? null;
  }

  contains(other) {
    return [...this.all()].includes(other);
  }

  isEqualNode(other) {
    const shown = ({ tagName, attributes, className, textContent, title, style, children }) =>
      JSON.stringify([tagName, attributes, className, textContent, title, style, children.map((child) => (child instanceof Element ? shown(child) : child))]);
    return shown(this) === shown(other);
  }

  /** Those below with a tag, a ".class" or an "[attribute]". */
  querySelectorAll(selector) {
    const name = selector.replace(/^[.[]|\]$/g, "");
    const fits = ({ tagName, className = "", attributes }) => {
      if (selector.startsWith(".")) return className.split(" ").includes(name);
      return selector.startsWith("[") ? name in attributes : tagName === name;
    };
    return [...this.all()].filter((element) => element !== this && fits(element));
  }

  querySelector(selector) {
    return this.querySelectorAll(selector)[0] ?? null;
  }

  insertBefore(child, before) {
    this.children = this.children.filter((other) => other !== child);
    const at = this.children.indexOf(before);
    this.children.splice(at < 0 ? this.children.length : at, 0, child);
  }

  focus() {
    this.focused = true;
    document.activeElement = this;
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
    activeElement: null,
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
