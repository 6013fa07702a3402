// What a lane of a race says of a step's KL.

import assert from "node:assert/strict";
import { test } from "node:test";

import { klWords } from "../../kvlens/app/ui/common/lanes/lane.js";

test("a step after the loss is told from one whose KL was not recorded", () => {
  const said = (/** @type {number} */ step) => klWords(null, step, 3);
  assert.equal(said(2), "");
  assert.notEqual(said(3), "");
  assert.notEqual(said(4), "");
  assert.notEqual(said(3), said(4));
  assert.equal(said(4), said(5));
  assert.equal(klWords(null, 4, null), "");
  assert.match(klWords(0.5, 4, 3), /0\.500/);
});
