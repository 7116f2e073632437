// What the table of workers says of a cause.
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { why } from "../../../dashboard/paceline_dashboard/assets/js/workers.js";

describe("why others wait for a rank", () => {
  test("a slow node has its factor, if that is known", () => {
    assert.equal(why({ cause: "node", factor: 2.13 }), "slow node, 2.1×");
    assert.equal(why({ cause: "node", factor: null }), "slow node");
  });
  test("regular pauses", () => assert.equal(why({ cause: "periodic", factor: 1 }), "regular pauses"));
  test("a kind that this page does not know has its name", () => assert.equal(why({ cause: "moon", factor: 1 }), "moon"));
  test("no cause", () => assert.equal(why({ cause: "none", factor: 1 }), ""));
});
