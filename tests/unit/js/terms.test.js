// Terms are explained where they stand.
import assert from "node:assert/strict";
import { beforeEach, describe, it } from "node:test";
import { termed } from "../../../dashboard/paceline_dashboard/assets/js/terms.js";
import { Element } from "./dom.js";

beforeEach(() => {
  globalThis.document = { createElement: (tag) => new Element(tag) };
});

describe("a name", () => {
  it("that is a term has a button that explains it", () => {
    const [name, button] = termed("SE");
    assert.equal(name, "SE");
    assert.match(button.getAttribute("aria-label"), /^About SE: Straggler effect: /);
    assert.match(button.getAttribute("data-meaning"), /0 is perfect balance/);
  });
  it("that is none stays as it is", () => assert.deepEqual(termed("Node"), ["Node"]));
});
