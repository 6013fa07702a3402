// Places to jump to: buttons go round, N and P go to the nearest.
import assert from "node:assert/strict";
import { test } from "node:test";
import { Jumps } from "../../kvlens/player/web/jumps.js";
import { FakeNode, install } from "./fakedom.js";

const place = (kind, step) => ({ kind, step, layer: null, head: null, span: null });

function made(places) {
  install();
  const went = [];
  const jumps = new Jumps(new FakeNode(), (to) => {
    went.push(to.step);
    jumps.moveTo(to.step);
  });
  jumps.setRun({ jumps: places });
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
