// What a run's page begins with: the newest steps. It may have been asked for before the page was there.
import { get } from "./api.js";

const LOADED = 511; // steps that a page begins with, each by itself

/** @type {{ path: string, answer: Promise<ViewAnswer> } | null} */
let early = null;

/**
 * Asks for the beginning of a run's page that is being opened; for other pages nothing is.
 * @param {string} pathname of the page
 * @param {string} base the dashboard's own
 */
export function askEarly(pathname, base) {
  const id = /^runs\/([^/]+)$/.exec(pathname.slice(base.length));
  if (!pathname.startsWith(base) || !id) return;
  const path = `runs/${id[1]}`;
  early = { path, answer: ask(path) };
  early.answer.catch(() => {}); // whoever takes the answer hears of the error
}

/**
 * The newest steps of a run: the answer that was asked for early, once, or a new one.
 * @param {string} path of the run in the API
 */
export function newestSteps(path) {
  const taken = early;
  early = null;
  return taken?.path === path ? taken.answer : ask(path);
}

/**
 * @param {string} path
 * @returns {Promise<ViewAnswer>}
 */
function ask(path) {
  return get(`${path}/view`, { last: LOADED });
}
