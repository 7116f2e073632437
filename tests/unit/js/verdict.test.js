// What the banner says.
import assert from "node:assert/strict";
import { describe, it } from "node:test";
import { cost, failure, headline, interval, remedy, withoutPaths } from "../../../dashboard/paceline_dashboard/assets/js/verdict.js";

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

describe("what it costs", () => {
  it("is the waiting", () => {
    assert.equal(cost(run, verdict, { waited: 3.1, lost: 4, since: null }).join(""), "41 % of worker time waits: 3.1 worker-hours so far.");
  });
  it("is the time lost where ranks hardly wait, as for the network", () => {
    assert.equal(cost(run, { ...verdict, waste_now: 0.03, lost_now: 0.5 }, { waited: 0.1, lost: 0, since: null }).join(""), "50 % of the time is lost.");
  });
  it("is in the past when the run has ended", () => {
    assert.match(cost({ ...run, state: "stopped" }, verdict, { waited: 2, lost: 3, since: null }).join(""), /waited: 2 worker-hours in the run/);
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
  it("names another node where that would save more", () => {
    assert.match(remedy(verdict, best, node, null).join(""), /Another node for gpu-b2: 30 % ± 5\.$/);
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
