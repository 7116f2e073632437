// A run's event stream, one for all tabs of a browser: the tab that holds a lock has it, and tells the others.
//
// A browser opens only six connections to a server, and each stream takes one. When the tab with the lock is closed or
// hidden, the next tab goes on from its own position. Events may come twice, but none is lost.
const KEPT = 300; // the newest events, for tabs that join: their snapshot may be a little older
const ANSWER_MS = 1000; // a tab that hears nothing from the one with the lock opens a stream of its own

/**
 * Follows the events after `since`; returns what ends it.
 * @param {URL} target
 * @param {string} since
 * @param {Listener} on
 * @returns {{close: () => void}}
 */
export function follow(target, since, on) {
  const shares = globalThis.navigator?.locks && globalThis.BroadcastChannel; // locks need https, or this machine
  return shares ? new SharedStream(target, since, on) : new OwnStream(target, since, on);
}

class OwnStream {
  /**
   * @param {URL} target
   * @param {string} since
   * @param {Listener} on
   */
  constructor(target, since, on) {
    const url = new URL(target);
    url.searchParams.set("since", since);
    this.source = new EventSource(url);
    this.source.onopen = () => on.open();
    this.source.onmessage = ({ data, lastEventId }) => on.message(data, lastEventId);
    this.source.onerror = () => on.error();
  }

  close() {
    this.source.close();
  }
}

class SharedStream {
  /**
   * @param {URL} target
   * @param {string} since
   * @param {Listener} on
   */
  constructor(target, since, on) {
    this.target = target;
    this.position = since;
    this.on = on;
    this.from = since; // `kept` has all events after this position
    /** @type {{data: string, id: string}[]} */
    this.kept = [];
    this.open = false;
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
    this.channel.postMessage({ ask: this.id, since });
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
    if (!this.own) {
      this.from = this.position;
      this.#listen();
    }
    return new Promise((resolve) => {
      this.release = () => resolve(undefined);
    });
  }

  #listen() {
    this.joined = false;
    this.own?.close();
    this.own = new OwnStream(this.target, this.position, {
      open: () => this.#tell({ open: true }),
      message: (data, id) => this.#tell({ data, id }),
      error: () => this.#tell({ error: true }),
    });
  }

  /**
   * What the stream says, to this tab and to all others.
   * @param {Told} told
   */
  #tell(told) {
    if (told.data !== undefined && told.id !== undefined) {
      this.kept.push({ data: told.data, id: told.id });
      if (this.kept.length > KEPT) this.from = /** @type {{id: string}} */ (this.kept.shift()).id;
    }
    if (this.leads) this.channel.postMessage(told);
    this.#take(told);
  }

  /** @param {Told} told */
  #take({ open, error, data, id }) {
    if (open) {
      this.open = true;
      this.on.open();
    } else if (error) {
      this.on.error();
    } else if (data !== undefined && id !== undefined) {
      this.position = id;
      this.on.message(data, id);
    }
  }

  /** @param {Told} told by another tab */
  #hear(told) {
    if (told.ask !== undefined) {
      if (this.leads) this.#answer(told.ask, /** @type {string} */ (told.since));
    } else if (told.to === this.id && !this.own) {
      clearTimeout(this.timer);
      this.joined = true;
      for (const event of told.events ?? []) this.#take(event);
      if (told.open) this.#take({ open: true });
    } else if (told.to === undefined && this.joined) {
      this.#take(told);
    }
  }

  /**
   * Tells a tab that joins what it has missed. If that is forgotten, the stream begins again there, for all tabs.
   * @param {string} to
   * @param {string} since
   */
  #answer(to, since) {
    const known = !before(since, this.from);
    const events = known ? this.kept.filter(({ id }) => !before(id, since)) : [];
    this.channel.postMessage({ to, events, open: known && this.open });
    if (known) return;
    Object.assign(this, { position: since, from: since, kept: [], open: false });
    this.#listen();
  }
}

/**
 * Whether one position of the stream is before another.
 * @param {string} one
 * @param {string} other
 */
function before(one, other) {
  const [ms, count] = one.split("-").map(Number);
  const [otherMs, otherCount] = other.split("-").map(Number);
  return ms < otherMs || (ms === otherMs && count < otherCount);
}
