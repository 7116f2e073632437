// Opens the module of the page that Dash has put in place, and closes the one before.
import { connection, crumbs } from "./dom.js";
import { openRun } from "./run.js";
import { openRuns } from "./runs.js";

let close = () => {};

/** @param {PageData} page */
export function open(page) {
  close();
  crumbs("");
  close = () => {};
  if (page.page === "run") close = openRun(page);
  else if (page.page === "runs") close = openRuns();
  else connection("live");
}
