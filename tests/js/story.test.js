// The frames of the first page's moving picture.
import assert from "node:assert/strict";
import { test } from "node:test";
import { frames, written } from "../../kvlens/app/ui/home/story.js";

const scene = (...tokens) => ({ tokens, spans: tokens.map(() => []), hole: tokens.map(() => 0) });

test("the loss is played before its repair, each answer stands for a while", () => {
  const list = frames({ lost: scene(" ", "2", "<|im_end|>"), repaired: scene(" ", "5", "7", ".") });
  assert.deepEqual(list.filter(({ over }) => !over).map(({ scene, step }) => `${scene[0]}${step}`), ["l0", "l1", "l2", "r0", "r1", "r2", "r3"]);
  const standing = list.filter(({ over }) => over);
  assert.deepEqual([...new Set(standing.map(({ scene, step }) => `${scene} ${step}`))], ["lost 2", "repaired 3"]);
  assert.ok(standing.length >= 4);
});

test("what was written ends before the token that ends the output", () => {
  const run = scene(" ", "5", "7", ".", "<|im_end|>");
  assert.deepEqual([0, 2, 4].map((step) => written(run, step)), ["", "57", "57."]);
});
