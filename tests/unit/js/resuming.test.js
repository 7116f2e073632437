import assert from "node:assert/strict";
import { test } from "node:test";
import { elsewhere, environmentOf, resumable } from "../../../dashboard/paceline_dashboard/assets/js/resuming.js";

test("lines of NAME=value become an object; a value may have an equals sign", () => {
  assert.deepEqual(environmentOf("A=1\n\n  B=x=y \nC="), { A: "1", B: "x=y", C: "" });
});

test("a line without a name is named", () => {
  assert.throws(() => environmentOf("A=1\nfoo"), /"foo" is not NAME=value/);
  assert.throws(() => environmentOf("=1"), /"=1" is not NAME=value/);
});

test("only a run with processes that failed or was stopped can go on", () => {
  assert.ok(resumable({ state: "failed", backend: "local" }));
  assert.ok(resumable({ state: "stopped", backend: "slurm" }));
  assert.ok(!resumable({ state: "finished", backend: "local" }));
  assert.ok(!resumable({ state: "stopped", backend: "simulated" }));
});

test("only what differs from the run is asked for when it goes on", () => {
  const run = { nproc: 4, nodes_min: 1, nodes_max: 1, backend: "local" };
  assert.deepEqual(elsewhere(run, { nproc: 4, nodes_min: 1, nodes_max: 1, backend: "local" }), {});
  assert.deepEqual(elsewhere(run, { nproc: 2, nodes_min: 1, nodes_max: 3, backend: "slurm" }), { nproc: 2, nodes_max: 3, backend: "slurm" });
});
