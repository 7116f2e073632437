import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { bodyOf, summaryOf } from "../../../dashboard/paceline_dashboard/assets/js/launch.js";
import { parsed, typedOf } from "../../../dashboard/paceline_dashboard/assets/js/optionfields.js";

describe("what a new run is asked for", () => {
  test("has what was typed, and leaves out what was not", () => {
    const typed = { script: " train.py ", args: "--epochs\n3\n", cwd: "", env: "A=1", nproc: "4", backend: "local", node: "n1", replace_slow_nodes: false };
    assert.deepEqual(bodyOf(typed, {}), { script: "train.py", args: ["--epochs", "3"], env: { A: "1" }, nproc: 4, backend: "local", node: "n1", replace_slow_nodes: false });
  });

  test("has what a run was started with, where the fields do not say otherwise", () => {
    const like = { args: ["a b", "", "c\nd"], policy: "sata", parameters: { tau: 2 }, join_check: 0 };
    const typed = { args: "a b\n\nc\nd", policy: "sata" };
    assert.deepEqual(bodyOf(typed, {}, like), { args: like.args, policy: "sata", parameters: { tau: 2 }, join_check: 0 });
    assert.deepEqual(bodyOf({ args: "e", policy: "bsp" }, {}, like), { args: ["e"], policy: "bsp", join_check: 0 });
  });

  test("names no node on an engine, which chooses", () => {
    assert.deepEqual(bodyOf({ backend: "slurm", node: "n1" }, { partition: "gpu" }), { backend: "slurm", backend_options: { partition: "gpu" } });
  });

  test("is told in a sentence", () => {
    assert.equal(summaryOf({ nproc: 4, policy: "bsp" }), "4 ranks on 1 node (local), policy bsp");
    assert.equal(summaryOf({ nproc: 4, nodes_min: 2, nodes_max: 8, backend: "slurm" }), "8 to 32 ranks on 2 to 8 nodes (slurm), policy paceline");
  });
});

describe("an option of a backend", () => {
  const lines = { type: "array", items: { type: "string" } };
  const rules = { type: "array", items: { type: "object" } };
  const whole = { anyOf: [{ type: "integer" }, { type: "null" }], default: null };

  test("that is empty is left to the backend", () => {
    assert.equal(parsed("cpus", whole, " "), undefined);
    assert.equal(parsed("hold", { type: "boolean", default: false }, false), undefined);
  });

  test("is read by its type", () => {
    assert.equal(parsed("cpus", whole, "8"), 8);
    assert.equal(parsed("hold", { type: "boolean", default: false }, true), true);
    assert.deepEqual(parsed("extra", lines, "--a\n --b "), ["--a", "--b"]);
    assert.deepEqual(parsed("labels", { type: "object" }, '{"a": "b"}'), { a: "b" });
    assert.deepEqual(parsed("tolerations", rules, '[{"key": "gpu"}]'), [{ key: "gpu" }]);
    assert.equal(parsed("partition", { anyOf: [{ type: "string" }, { type: "null" }] }, "gpu"), "gpu");
  });

  test("that cannot be read is named", () => {
    assert.throws(() => parsed("cpus", whole, "eight"), /cpus: “eight” is no number/);
    assert.throws(() => parsed("labels", { type: "object" }, "[1]"), /labels: write a JSON object/);
    assert.throws(() => parsed("tolerations", rules, '{"key": "gpu"}'), /tolerations: write a JSON array/);
  });

  test("is shown as it was asked for", () => {
    for (const [schema, typed] of [[whole, "8"], [lines, "--a\n--b"], [rules, '[{"key":"gpu"}]'], [{ type: "object" }, '{"a":"b"}']]) {
      assert.equal(typedOf(schema, parsed("x", schema, typed)), typed);
    }
    assert.equal(typedOf(whole, undefined), "");
  });
});
