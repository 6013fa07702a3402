// Places to jump to: buttons go round, N and P go to the nearest.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Jumps } from "../../kvlens/player/web/jumps.js";
import { FakeNode, install } from "./fakedom.js";

const place = (kind, step) => ({ kind, step, layer: null, head: null, span: null });

function made(places, corrections = []) {
  install();
  const went = [];
  const jumps = new Jumps(new FakeNode(), (to) => {
    went.push(to.kind === "correction" ? [to.step, to.layer, to.head] : to.step);
    jumps.moveTo(to.step);
  });
  jumps.setRun({ jumps: places }, Int32Array.from(corrections.flat()));
  return { jumps, went };
}

test("a button goes to the next of its kind and begins anew after the last", () => {
  const { jumps, went } = made([place("recall", 2), place("recall", 5), place("loss", 3)]);
  for (let i = 0; i < 3; i++) jumps.buttons.recall.onclick();
  jumps.buttons.loss.onclick();
  assert.deepEqual(went, [2, 5, 2, 3]);
  assert.equal(jumps.buttons.correction.disabled, true);
  assert.equal(jumps.buttons.recall.disabled, false);
});

test("the button finds every correction of a step, then those of later steps", () => {
  const corrections = [[2, 0, 3], [2, 1, 0], [5, -1, -1]];
  const { jumps, went } = made([place("recall", 2)], corrections);
  for (let i = 0; i < 4; i++) jumps.buttons.correction.onclick();
  assert.deepEqual(went, [[2, 0, 3], [2, 1, 0], [5, null, null], [2, 0, 3]]);
  jumps.buttons.recall.onclick();
  jumps.buttons.correction.onclick();
  assert.deepEqual(went.slice(4), [2, [5, null, null]]);
});

test("N and P go to the nearest place on their side; recalls need Shift", () => {
  const { jumps, went } = made([place("lost", 8), place("loss", 3), place("regret", 6), place("recall", 4)]);
  jumps.move(1, false);
  jumps.move(1, false);
  jumps.move(1, true);
  jumps.move(-1, true);
  jumps.move(-1, false);
  jumps.move(-1, false);
  assert.deepEqual(went, [3, 6, 4, 3]);
});
