// The list of a run's changes, and what a second operator is told.
import { get } from "./api.js";
import { byId, make, show } from "./dom.js";
import { moment } from "./format.js";

const SHOWN = 50; // the newest

/** @type {Record<string, string>} */
const ACTIONS = {
  "run.create": "created the run",
  "run.policy": "switched the policy",
  "run.auto": "changed auto",
  "run.stop": "stopped the run",
  "run.resume": "resumed the run",
  "run.regroup": "started the run's group of nodes anew",
  "run.withdraw": "withdrew the replacement of a node",
  "run.join": "let a node join the run",
  "run.leave": "let a node leave the run",
  "run.replace": "replaced a node of the run",
  "run.note": "wrote the run's note",
  "run.target": "changed the run's target",
  "run.tag": "tagged the run",
  "run.untag": "took a tag from the run",
};

export class Changes {
  /** @param {string} path of the run */
  constructor(path) {
    this.path = `${path}/audit`;
  }

  async refresh() {
    const { items } = await get(this.path, { limit: SHOWN });
    const list = byId("changes");
    if (!list) return; // the page was left meanwhile
    list.replaceChildren(...items.map((/** @type {Change} */ change) => make("li", {}, changeWords(change))));
    show("changes-none", items.length === 0);
  }
}

/**
 * A change in words: when, who, what, and why.
 * @param {Change} change
 */
export function changeWords({ at, who, via, action, why, details }) {
  const to = details.policy ?? details.mode;
  const what = `${done(action)}${to && action !== "run.create" ? ` to ${to}` : ""}`;
  const program = via && via !== "api" && via !== who ? ` (${via})` : "";
  return `${moment(at)}: ${details.operator ?? who} ${what}${program}${why ? `: ${why}` : "."}`;
}

/**
 * What the server's 412 says: who changed the run since, and when.
 * @param {import("./api.js").ApiError} error
 */
export function overtakenWords({ problem }) {
  if (!problem.who) return "The run was changed since this was shown.";
  return `${problem.who} ${done(problem.action)} at ${moment(problem.at)}, since this was shown.`;
}

/** @param {string} action */
const done = (action) => ACTIONS[action] ?? `did ${action}`;
