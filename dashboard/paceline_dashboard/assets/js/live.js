// A run's snapshot, then its event stream; again from the start after each interruption.
import { get, url } from "./api.js";
import { connection } from "./dom.js";

const FIRST_RETRY_S = 0.5;
const LONGEST_RETRY_S = 5;

export class Live {
  /** @param on {snapshot(answer), event(event), failed(error)}; `failed` for what retrying cannot mend. */
  constructor(run, points, on) {
    this.run = run;
    this.points = points;
    this.on = on;
    this.retryS = FIRST_RETRY_S;
    this.source = null;
    this.timer = null;
    this.round = 0; // an answer that arrives after close() or reopening is of no use
    this.onVisibility = () => (document.hidden ? this.#disconnect() : this.#connect());
  }

  open() {
    // A hidden page costs nothing: no stream, no drawing; a fresh snapshot when it is looked at again.
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
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  async #connect() {
    this.#disconnect();
    const round = this.round;
    try {
      const snapshot = await get(`runs/${encodeURIComponent(this.run)}/snapshot`, { points: this.points });
      if (round !== this.round) return;
      this.on.snapshot(snapshot);
      this.#listen(snapshot.since, round);
    } catch (error) {
      if (round !== this.round) return;
      if (error.status === 404) {
        connection("live");
        this.on.failed(error);
      } else if (error.status === undefined) {
        throw error; // ours, not the connection's
      } else {
        this.#retry();
      }
    }
  }

  #listen(since, round) {
    const target = url(`runs/${encodeURIComponent(this.run)}/events`);
    target.searchParams.set("since", since);
    this.source = new EventSource(target);
    this.source.onopen = () => {
      this.retryS = FIRST_RETRY_S;
      connection("live");
    };
    this.source.onmessage = (message) => {
      const event = JSON.parse(message.data);
      if (event.type === "reset") this.#connect();
      else if (round === this.round) this.on.event(event);
    };
    this.source.onerror = () => this.#retry();
  }

  /** Later and later, and not all pages at the same moment after a restart of the server. */
  #retry() {
    this.#disconnect();
    connection("lost");
    const waitS = this.retryS * (0.75 + Math.random() / 2);
    this.retryS = Math.min(LONGEST_RETRY_S, this.retryS * 2);
    this.timer = setTimeout(() => this.#connect(), waitS * 1000);
  }
}
