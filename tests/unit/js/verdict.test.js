// What the banner says.
import assert from "node:assert/strict";
import { describe, it } from "node:test";
import { coasting, cost, failure, hanging, headline, interval, nextTime, nodeFirst, remedy, standing, withoutPaths } from "../../../dashboard/paceline_dashboard/assets/js/verdict.js";

const run = { state: "running", message: null, step: 41, exit_code: null };
const verdict = {
  level: "held-up", what: "rank 3 computes 2 × slower", was: "rank 3 computed 2 × slower", waste_now: 0.41, lost_now: 0.3,
  causes: [{ to_do: "look at its machine; a policy such as `paceline` takes load from it" }],
};

const forecast = { saving: 0.264, saving_low: 0.224, saving_high: 0.304 };
const best = { label: "paceline", policy: "paceline", forecast };
const node = { node: "gpu-b2", saving: 0.3, saving_low: 0.25, saving_high: 0.35 };

describe("the line", () => {
  it("says level, who and why", () => {
    assert.deepEqual(headline(run, verdict), { tone: "bad", icon: "!", title: "Held up: rank 3 computes 2 × slower" });
  });
  it("is in the past when the run has ended", () => {
    assert.equal(headline({ ...run, state: "finished" }, verdict).title, "Finished: rank 3 computed 2 × slower");
  });
  it("says where and why a run failed, without a server's path", () => {
    const failed = { ...run, state: "failed", message: "rank 1 exited with code 1; log: /srv/runs/r/1.log\nTraceback" };
    assert.equal(headline(failed, null).title, "Failed at step 41: rank 1 exited with code 1");
    assert.equal(withoutPaths("cannot read /srv/data/train.bin: no such file"), "cannot read train.bin: no such file");
  });
  it("says what is waited for before the first verdict", () => {
    assert.equal(headline({ ...run, state: "queued", message: "Resources" }, null).title, "Waiting: Resources");
    assert.match(headline(run, { ...verdict, level: "unknown" }).title, /first verdict/);
  });
});

describe("the line in the list of runs", () => {
  it("says that a run hangs, or coasts", () => {
    const hung = standing(run, { ...verdict, hung_s: 90, coasting: false });
    assert.equal(hung.tone, "bad");
    assert.match(hung.title, /^Hung: no step has ended for /);
    const healthy = { ...verdict, level: "healthy", hung_s: 0, coasting: true };
    assert.match(standing({ ...run, controller: null }, healthy).title, /^Coasting/);
    assert.match(standing({ ...run, controller: { alive: true } }, healthy).title, /^Healthy/);
    assert.match(standing({ ...run, controller: null }, { ...verdict, coasting: true }).title, /^Held up/);
    assert.match(standing({ ...run, state: "finished" }, { ...verdict, hung_s: 90 }).title, /^Finished/);
  });
});

describe("what it costs", () => {
  const lost = { waits: true, share: 0.41, hours: 3.1, spanS: null, steps: null };
  it("is the waiting, and money where an hour has a price", () => {
    assert.equal(cost(run, lost, null).join(""), "41 % of worker time waits: 3.1 worker-hours so far.");
    assert.equal(cost(run, lost, { amount: 2.5, currency: "EUR" }).join(""), "41 % of worker time waits: 3.1 worker-hours, 7.75 EUR so far.");
  });
  it("is the time lost where ranks hardly wait, as for the network", () => {
    assert.equal(cost(run, { ...lost, waits: false, share: 0.5, hours: null }, null).join(""), "50 % of worker time is lost.");
  });
  it("is in the past when the run has ended", () => {
    assert.match(cost({ ...run, state: "stopped" }, { ...lost, hours: 2 }, null).join(""), /time waited: 2 worker-hours in the run/);
  });
});

describe("an ended run", () => {
  const ended = { ...verdict, causes: [{ kind: "node", to_do: "look at its machine" }] };
  it("says what would help the next one", () => {
    assert.equal(nextTime(ended, undefined).join(""), "Next time: look at its machine.");
    assert.equal(nextTime(ended, best).join(""), "Next time: start it with paceline, which would have saved 26 % ± 4 of each step; and look at its machine.");
    assert.equal(nextTime({ ...ended, causes: [] }, best), null);
  });
});

describe("a run that hangs", () => {
  const hang = { hung: true, since_s: 120, step: 599, waiting: [0, 1], holding: [6], silent: [], words: "No step has ended for 120 s; a step takes 0.22 s. Ranks 0 and 1 are in the reduction of the gradients. They wait for rank 6, which is in the loop's body." };
  const said = hanging({ ...run, world: 8, nodes_max: 2 }, hang, "gpu-b2", { amount: 2.5, currency: "EUR" });
  it("says who holds it up, and since when", () => {
    assert.equal(said.title, "Hung: no step has ended for 2 min, all others wait for rank 6 on gpu-b2");
    assert.equal(said.also.join(""), "Ranks 0 and 1 are in the reduction of the gradients. They wait for rank 6, which is in the loop's body.");
  });
  it("says what that costs", () => assert.equal(said.cost.join(""), "All 8 workers stand still: 16 worker-minutes, 0.67 EUR in the 2 min since the last step."));
  it("says what to do", () => {
    assert.equal(said.remedy.join(""), "What to do: the stacks of rank 6 say where it stands. Then replace gpu-b2, or stop the run and resume it from its newest checkpoint.");
    const alone = hanging({ ...run, world: 8, nodes_max: 1 }, hang, "gpu-b2", null);
    assert.equal(alone.remedy.join(""), "What to do: the stacks of rank 6 say where it stands. Then stop the run and resume it from its newest checkpoint.");
    const driver = hanging({ ...run, world: 8, driver: true }, hang, "gpu-b2", null);
    assert.equal(driver.remedy.join(""), "What to do: the stacks of rank 6 say where it stands. The run's script starts its ranks itself: on Ray, run ray stack on their machine. Then stop the run and resume it from its newest checkpoint.");
    const nobody = hanging({ ...run, world: 8 }, { ...hang, holding: [], words: "No step has ended for 120 s." }, "", null);
    assert.equal(nobody.title, "Hung: no step has ended for 2 min");
    assert.equal(nobody.remedy.join(""), "What to do: the stacks of the ranks say where they stand. Then stop the run and resume it from its newest checkpoint.");
  });
});

describe("a run that nobody plans", () => {
  it("says since when, what that costs and what to do", () => {
    const said = coasting(540, { waits: true, share: 0.023, hours: 0.1, spanS: null, steps: null }, false);
    assert.equal(said.title, "Coasting: nobody plans since step 540; ranks train on with the last known shares");
    assert.match(said.cost.join(""), /^Nothing is lost yet: 2\.3 % of worker time waits\. But shares no longer follow/);
    assert.match(said.remedy.join(""), /^What to do: see whether a worker of the control plane runs; \/readyz says so/);
  });

  it("says that rank 0 plans", () => {
    const said = coasting(540, { waits: true, share: 0.023, hours: 0.1, spanS: null, steps: null }, true);
    assert.equal(said.title, "Rank 0 plans since step 540, because no controller does; ranks stay balanced");
    assert.match(said.cost.join(""), /^Nothing is lost\. But a policy switch does not take effect/);
  });
});

describe("a failed run", () => {
  it("says what its end costs and what would help", () => {
    const failed = { ...run, state: "failed", message: "rank 3: CUDA out of memory", world: 8, ended_at: null };
    assert.equal(failure(failed).cost.join(""), "8 workers train nothing.");
    assert.match(failure(failed).remedy.join(""), /^What helps: a smaller global batch, or more memory for that rank; then resume it/);
    assert.match(failure({ ...failed, message: "rank 3: KeyError" }).remedy.join(""), /mend what the log says/);
  });
});

describe("what would help", () => {
  it("names what helps against the second cause, too", () => {
    const [first] = verdict.causes;
    const second = { ...first, kind: "network", who: "", to_do: "look at links" };
    assert.match(remedy({ ...verdict, causes: [first, second] }, undefined, null, null).join(""), /takes load from it\. Also: look at links\.$/);
    const swapped = { ...verdict, causes: [{ ...second }, { ...first, who: "Rank 3" }] };
    assert.match(remedy(swapped, undefined, null, null).join(""), /: look at links\. For rank 3: look at its machine;/);
  });
  it("is the recommended policy", () => {
    assert.equal(remedy(verdict, best, null, null).join(""), "paceline would save 26 % ± 4 of each step.");
    assert.match(remedy(verdict, best, null, 7200).join(""), /step: done about .* instead of /);
  });
  it("is another node where that would save more, and the policy after it", () => {
    assert.equal(remedy(verdict, best, node, null).join(""), "Another node for gpu-b2 would save 30 % ± 5 of each step. paceline: 26 % ± 4.");
    assert.ok(nodeFirst(best, node));
    assert.ok(!nodeFirst(best, { ...node, saving: 0.2 }) && !nodeFirst(best, { ...node, saving_low: -0.1 }) && !nodeFirst(best, null));
    assert.match(remedy(verdict, best, { ...node, saving: 0.2 }, null).join(""), /^paceline would save/);
  });
  it("is another node where no policy is recommended", () => {
    assert.match(remedy(verdict, undefined, node, null).join(""), /^Another node for gpu-b2 would save 30 % ± 5/);
  });
  it("is the cause's advice where nothing is known to save time", () => {
    const words = "What helps: look at its machine; a policy such as paceline takes load from it.";
    assert.equal(remedy(verdict, undefined, { ...node, saving_low: -0.1 }, null).join(""), words);
  });
  it("has an interval", () => {
    assert.equal(interval(forecast), "26 % ± 4");
  });
});
