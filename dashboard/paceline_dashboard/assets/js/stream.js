// A run's event stream, one for all tabs of a browser: the tab that holds a lock has it, and tells the others.
//
// A browser opens only six connections to a server, and each stream takes one. When the tab with the lock is closed or
// hidden, the next tab opens a stream of its own. Whoever hears that the stream is open asks the server what is new.
const ANSWER_MS = 1000; // a tab that hears nothing from the one with the lock opens a stream of its own

/**
 * Follows a run's events; returns what ends it.
 * @param {URL} target
 * @param {Listener} on
 * @returns {{close: () => void}}
 */
export function follow(target, on) {
  const shares = globalThis.navigator?.locks && globalThis.BroadcastChannel; // locks need https, or this machine
  return shares ? new SharedStream(target, on) : new OwnStream(target, on);
}

class OwnStream {
  /**
   * @param {URL} target
   * @param {Listener} on
   */
  constructor(target, on) {
    this.source = new EventSource(target);
    this.source.onopen = () => on.open();
    this.source.onmessage = ({ data }) => on.message(JSON.parse(data));
    this.source.onerror = () => on.error();
  }

  close() {
    this.source.close();
  }
}

class SharedStream {
  /**
   * @param {URL} target
   * @param {Listener} on
   */
  constructor(target, on) {
    this.target = target;
    this.on = on;
    this.open = false;
    /** @type {LiveEvent | undefined} */
    this.waiting = undefined; // what the server said last of what it waits for
    this.joined = false; // another tab tells us the events
    this.leads = false;
    /** @type {OwnStream | null} */
    this.own = null;
    this.release = () => {};
    this.id = crypto.randomUUID();
    this.channel = new BroadcastChannel(target.href);
    this.channel.onmessage = ({ data }) => this.#hear(data);
    this.ending = new AbortController();
    const wanted = navigator.locks.request(target.href, { signal: this.ending.signal }, () => this.#lead());
    wanted.catch((error) => {
      if (error.name !== "AbortError") throw error;
    });
    this.channel.postMessage({ ask: this.id });
    this.timer = setTimeout(() => this.#listen(), ANSWER_MS);
  }

  close() {
    clearTimeout(this.timer);
    this.own?.close();
    this.channel.close();
    this.ending.abort();
    this.release();
  }

  /** Has the stream until `close`. */
  #lead() {
    if (this.ending.signal.aborted) return undefined;
    clearTimeout(this.timer);
    this.leads = true;
    if (!this.own) this.#listen();
    return new Promise((resolve) => {
      this.release = () => resolve(undefined);
    });
  }

  #listen() {
    this.joined = false;
    this.own = new OwnStream(this.target, {
      open: () => this.#tell({ open: true }),
      message: (event) => this.#tell({ event }),
      error: () => this.#tell({ error: true }),
    });
  }

  /**
   * What the stream says, to this tab and to all others.
   * @param {Told} told
   */
  #tell(told) {
    this.open ||= told.open === true;
    if (told.event?.type === "waiting") this.waiting = told.event;
    if (this.leads) this.channel.postMessage(told);
    this.#take(told);
  }

  /** @param {Told} told */
  #take({ open, error, event }) {
    if (open) this.on.open();
    if (event) this.on.message(event);
    if (error) this.on.error();
  }

  /** @param {Told} told by another tab */
  #hear(told) {
    if (told.ask !== undefined) {
      if (this.leads) this.channel.postMessage({ to: told.ask, open: this.open, event: this.waiting });
    } else if (told.to === this.id && !this.own) {
      clearTimeout(this.timer);
      this.joined = true;
      this.#take(told);
    } else if (told.to === undefined && this.joined) {
      this.#take(told);
    }
  }
}
