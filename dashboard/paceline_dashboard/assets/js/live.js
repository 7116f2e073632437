// What is new about a run: a first load, then a request whenever the server's event stream says that there is more.
// Starts again with a load after each interruption.
import { url } from "./api.js";
import { connection } from "./dom.js";
import { follow } from "./stream.js";

const FIRST_RETRY_S = 0.5;
const LONGEST_RETRY_S = 1.5; // a server that is back is live within 3 s; while it is away, an attempt costs it nothing
const LEAST_PAUSE_MS = 250; // between two requests
const PAUSE_PER_MS = 3; // pause per ms that the answer took: a busy server is asked less often,
const MOST_PAUSE_MS = 2000; // but a page is never older than this and an answer

export class Live {
  /**
   * @param {string} run its id
   * @param {(current: () => boolean) => Promise<void>} load gets all that the page needs.
   * @param {{news: (step: number | null, opened: boolean) => Promise<void>, ended: () => boolean, problem: (error: Error) => void}} on
   *   `news` gets what is new since the page asked last. `step`: the earliest step that is new, if any; `opened`: the
   *   stream has just begun, and the server may have said something before. `ended`: whether the run has, as far as the
   *   page knows. `problem` tells why it goes no further.
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
    /** @type {{step: number | null, opened: boolean, ended: boolean} | null} */
    this.due = null; // what to ask for next
    this.asking = false;
    this.whole = false; // the page has loaded all of a run that had ended
    this.onVisibility = () => (document.hidden ? this.#disconnect() : this.#connect());
  }

  open() {
    // A hidden page has no stream and draws nothing; when it is shown again, it loads anew.
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
    this.due = null;
    this.asking = false;
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  async #connect() {
    this.#disconnect();
    const round = this.round;
    try {
      await this.load(() => round === this.round);
      this.whole = this.on.ended();
      if (round === this.round) this.#listen();
    } catch (error) {
      this.#failed(error, round);
    }
  }

  /**
   * @param {any} error
   * @param {number} round of the request
   */
  #failed(error, round) {
    if (error.status === undefined) reportError(error); // an error of our code, not of the connection
    if (round !== this.round) return;
    const away = error.status === 0 || error.status >= 500;
    if (!away) this.on.problem(error);
    if (away || error.status === undefined) this.#retry(); // otherwise trying again would not help
  }

  #listen() {
    this.source = follow(url(`runs/${encodeURIComponent(this.run)}/events`), {
      open: () => {
        this.retryS = FIRST_RETRY_S;
        connection("live");
        this.#tell({ step: null, opened: true, ended: false });
      },
      message: (event) => {
        if (event.type === "waiting") connection(event.for ?? "live");
        else this.#tell({ step: event.step, opened: false, ended: event.type === "end" });
      },
      error: () => {
        if (!this.due?.ended) this.#retry();
      },
    });
  }

  /**
   * Asks for what is new, or notes that there is more while a request is under way.
   * @param {{step: number | null, opened: boolean, ended: boolean}} news
   */
  #tell(news) {
    if (this.whole && news.ended) this.#rest();
    if (this.whole && (news.ended || news.opened)) return;
    this.whole = false;
    const { step, opened, ended } = this.due ?? news;
    const steps = [step, news.step].filter((each) => each !== null);
    this.due = { step: steps.length ? Math.min(...steps) : null, opened: opened || news.opened, ended: ended || news.ended };
    if (!this.asking) this.#ask();
  }

  async #ask() {
    const round = this.round;
    this.asking = true;
    while (round === this.round && this.due) {
      const { step, opened, ended } = this.due;
      if (!ended) this.due = null; // nothing comes after an end
      const began = performance.now();
      try {
        await this.on.news(step, opened);
      } catch (error) {
        if (round === this.round) this.asking = false;
        this.#failed(error, round);
        return;
      }
      if (round === this.round && ended) this.#rest();
      else {
        const pause = Math.max(LEAST_PAUSE_MS, Math.min(PAUSE_PER_MS * (performance.now() - began), MOST_PAUSE_MS));
        await new Promise((resolve) => setTimeout(resolve, pause));
      }
    }
    if (round === this.round) this.asking = false;
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
