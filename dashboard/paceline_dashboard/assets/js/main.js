// Opens the module of the page that Dash shows, and closes the module of the page before.
import { connection, crumbs } from "./dom.js";
import { openForecasts } from "./forecasts.js";
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
  else if (page.page === "forecasts") close = openForecasts(page);
  else connection("live");
}
