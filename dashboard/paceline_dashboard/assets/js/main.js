// Opens the module of the page that Dash shows, and closes the module of the page before.
import { openAlerts } from "./alerts.js";
import { ring } from "./bell.js";
import { openCompare } from "./compare.js";
import { connection, crumbs } from "./dom.js";
import { heedMenus } from "./exports.js";
import { openFleet } from "./fleet.js";
import { openForecasts } from "./forecasts.js";
import { openLaunch } from "./launch.js";
import { openRank } from "./rank.js";
import { openRun } from "./run.js";
import { openRuns } from "./runs.js";

heedMenus();
let close = () => {};

/** @param {PageData} page */
export function open(page) {
  close();
  ring();
  crumbs("");
  for (const link of document.querySelectorAll(".sites a")) {
    if (/** @type {HTMLAnchorElement} */ (link).pathname === location.pathname) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  close = () => {};
  if (page.page === "run") close = openRun(page);
  else if (page.page === "rank") close = openRank(page);
  else if (page.page === "runs") close = openRuns();
  else if (page.page === "compare") close = openCompare(page);
  else if (page.page === "forecasts") close = openForecasts(page);
  else if (page.page === "alerts") close = openAlerts();
  else if (page.page === "fleet") close = openFleet();
  else if (page.page === "launch") close = openLaunch();
  else connection("live");
}
