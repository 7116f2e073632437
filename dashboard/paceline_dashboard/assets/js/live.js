// A run's snapshot, then its event stream; starts again with a snapshot after each interruption.
import { url } from "./api.js";
import { connection } from "./dom.js";
import { follow } from "./stream.js";

const FIRST_RETRY_S = 0.5;
const LONGEST_RETRY_S = 1.5; // a server that is back is live within 3 s; while it is away, an attempt costs it nothing

export class Live {
  /**
   * @param {string} run its id
   * @param {(current: () => boolean) => Promise<string>} load gets all that the page needs and returns where events go
   *   on from (`since`).
   * @param {{event: (event: any) => void, problem: (error: Error) => void, ended: () => boolean}} on `problem` tells why
   *   it goes no further; `ended` says whether the run has: then the server ends its stream too.
   */
  constructor(run, load, on) {
    this.run = run;
    this.load = load;
    this.on = on;
    this.retryS = FIRST_RETRY_S;
    /** @type {{close: () => void} | null} */
    this.source = null;
    /** @type {ReturnType<typeof setTimeout> | undefined} */
    this.timer = undefined;
    this.resting = false; // the run has ended, and so has the stream
    this.round = 0; // answers that arrive after close() or after a new connection are ignored
    this.onVisibility = () => (document.hidden ? this.#disconnect() : this.#connect());
  }

  open() {
    // A hidden page has no stream and draws nothing; when it is shown again, it loads a new snapshot.
    document.addEventListener("visibilitychange", this.onVisibility);
    connection("connecting");
    if (!document.hidden) this.#connect();
  }

  close() {
    document.removeEventListener("visibilitychange", this.onVisibility);
    this.#disconnect();
  }

  #disconnect() {
    this.round += 1;
    this.resting = false;
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  async #connect() {
    this.#disconnect();
    const round = this.round;
    try {
      const since = await this.load(() => round === this.round);
      if (round === this.round) this.#listen(since);
    } catch (error) {
      if (error.status === undefined) reportError(error); // an error of our code, not of the connection
      if (round !== this.round) return;
      const away = error.status === 0 || error.status >= 500;
      if (!away) this.on.problem(error);
      if (away || error.status === undefined) this.#retry(); // otherwise trying again would not help
    }
  }

  /** @param {string} since */
  #listen(since) {
    const target = url(`runs/${encodeURIComponent(this.run)}/events`);
    this.source = follow(target, since, {
      open: () => {
        this.retryS = FIRST_RETRY_S;
        connection("live");
      },
      message: (data) => {
        const event = JSON.parse(data);
        if (event.type === "reset") this.#connect();
        else if (event.type === "waiting") connection(event.for ?? "live");
        else this.on.event(event);
      },
      error: () => {
        if (this.on.ended()) this.#rest();
        else this.#retry();
      },
    });
  }

  /** Ends the stream; only `reopen` starts it again. */
  #rest() {
    this.#disconnect();
    this.resting = true;
    connection("ended");
  }

  /**
   * Loads an ended run again, because more of it has arrived. Before the run's end was reached this does nothing:
   * a load that is under way, its retry or the open stream brings what has arrived.
   */
  reopen() {
    if (this.resting && !document.hidden) this.#connect();
  }

  /** Waits longer after each failure, with a random part so that not all pages return at once. */
  #retry() {
    this.#disconnect();
    connection("lost");
    const waitS = this.retryS * (0.75 + Math.random() / 2);
    this.retryS = Math.min(LONGEST_RETRY_S, this.retryS * 2);
    this.timer = setTimeout(() => this.#connect(), waitS * 1000);
  }
}
