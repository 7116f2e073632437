// The number of alerts in the top bar, on every page.
import { get } from "./api.js";
import { byId, poll } from "./dom.js";

const PERIOD_S = 10;
let started = false;

/** Begins to count; later calls do nothing. */
export function ring() {
  if (started) return;
  started = true;
  poll(async () => {
    try {
      showCounts((await get("alerts", { state: "raised", limit: 1 })).counts);
    } catch (error) {
      if (error.status === undefined) throw error; // the page says that the server is away
    }
  }, PERIOD_S);
}

/** @param {{unacknowledged: number, critical: number}} counts */
export function showCounts({ unacknowledged, critical }) {
  const bell = byId("alerts-bell");
  if (!bell) return;
  const number = unacknowledged ? String(unacknowledged) : "";
  if (bell.textContent !== number) bell.textContent = number;
  bell.className = critical ? "bell bad" : "bell";
  bell.title = unacknowledged ? `${unacknowledged} alerts that nobody looks after` : "";
}
