// What is true at one step: spans of tokens, their states and masses, the colours that follow.
import assert from "node:assert/strict";
import { test } from "node:test";
import { SEQUENTIAL, STATES, STATE_WORDS } from "../../kvlens/player/web/color.js";
import { SpanClock, colorTokens } from "../../kvlens/player/web/spans.js";
import { madeRun, madeSlice } from "./runs.js";

function clockAt(step) {
  const clock = new SpanClock(madeRun());
  clock.setSlice(madeSlice());
  clock.seek(step);
  return clock;
}

test("living spans cover their tokens and the window has what no other covers", () => {
  assert.deepEqual([...clockAt(0).spanOf], [0, 0, 1, 1, 2, 2, -1, -1, -1, -1]);
  assert.deepEqual([...clockAt(1).spanOf], [0, 0, 1, 1, 2, 2, 2, -1, -1, -1]);
  assert.deepEqual([...clockAt(3).spanOf], [0, 0, -1, -1, 3, 3, 3, 2, 2, -1], "span 11 died at step 2, span 13 was born then");
});

test("a token's span can be asked at any step, and agrees with all tokens of the step", () => {
  const clock = clockAt(0);
  for (let step = 0; step < 4; step++) {
    const all = [...clockAt(step).spanOf];
    assert.deepEqual(all.map((_, pos) => clock.spanAt(pos, step)), all, `step ${step}`);
  }
});

test("the last change up to a step is the state, and none is not recorded", () => {
  const clock = clockAt(1);
  assert.deepEqual([-1, 0, 1, 3].map((step) => clock.stateAt(1, step)), [0, 0, 5, 5]);
  assert.equal(clock.stateAt(3, 1), 255, "before its birth");
  assert.equal(clock.state(1), STATE_WORDS[5]);
  assert.equal(new SpanClock(madeRun()).stateAt(0, 0), 255, "without a slice");
});

test("a span that is not listed has no mass, rather than 0", () => {
  const clock = clockAt(0);
  assert.ok(Math.abs(clock.mass("mean", 0) - 0.5) < 1e-4);
  assert.ok(Math.abs(clock.mass("head", 0) - 1) < 1e-4);
  assert.ok(Number.isNaN(clock.mass("mean", 2)));
  assert.ok(Number.isNaN(clock.mass("head", -1)));
  assert.ok(Number.isNaN(clockAt(1).mass("mean", 0)));
});

test("the window's length is what is written of it", () => {
  assert.equal(clockAt(1).length(2, 1), 3);
  assert.equal(clockAt(3).length(2, 3), 2);
  assert.equal(clockAt(0).length(0, 0), 2);
});

test("tokens are coloured by state, surprisal or mass, with 255 where nothing was recorded", () => {
  const [run, clock, colors] = [madeRun(), clockAt(2), new Uint8Array(10)];
  assert.equal(colorTokens("state", run, clock, 2, colors).table, STATES);
  assert.deepEqual([...colors], [0, 0, 255, 255, 4, 4, 4, 0, 255, 255]);
  assert.equal(colorTokens("surprisal", run, clock, 2, colors).table, SEQUENTIAL);
  assert.deepEqual([...colors.subarray(0, 6)], [255, 25, 51, 127, 254, 254]);
  clock.seek(0);
  colorTokens("mean", run, clock, 0, colors);
  assert.deepEqual([...colors], [254, 254, 254, 254, 255, 255, 255, 255, 255, 255], "0.25 and 0.1 per token are the top of the range");
});
