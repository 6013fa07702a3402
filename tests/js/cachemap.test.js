// The cache map's grid and its holes, without a canvas.
import assert from "node:assert/strict";
import { test } from "node:test";
import { hatchLines } from "../../kvlens/player/web/hatch.js";
import { anySummaryHole, holeStrength, holesAt, sampledAt } from "../../kvlens/player/web/holes.js";
import { MapGrid, niceStride } from "../../kvlens/player/web/mapgrid.js";
import { SpanClock } from "../../kvlens/player/web/spans.js";
import { madeRun, madeSlice } from "./runs.js";

function view(worst) {
  const [run, slice] = [madeRun(), madeSlice()];
  const clock = new SpanClock(run);
  clock.setSlice(slice);
  return { run, slice, clock, worst };
}

const brief = (holes) => holes.map(({ from, to, span, mass, head }) => [from, to, span, Number(mass.toFixed(3)), head]);

test("a hole is the span that was not attended; of a partly evicted span it is the lost tokens", () => {
  assert.deepEqual(brief(holesAt(view(false), 0)), [[2, 4, 1, 0.4, null]], "span 0 lost less than the least");
  assert.deepEqual(brief(holesAt(view(false), 1)), [[3, 4, 1, 0.45, null]]);
  assert.deepEqual(holesAt(view(false), 3), []);
});

test("what a summary did not get is a hole of its own kind, unless it is less than the least", () => {
  const shown = view(false);
  shown.slice.arrays.change_state[3] = 1; // span 1 is a summary from step 1 on
  Object.assign(shown.slice.arrays, { wanted_hole: Uint16Array.from([0, 0, 0]), lost_start: Int32Array.from([0, 0, 0, 0, 0]) });
  shown.clock.setSlice(shown.slice);
  assert.deepEqual(holesAt(shown, 0), [], "attended otherwise than as a summary");
  assert.deepEqual(brief(holesAt(shown, 1)), [[2, 4, 1, 0.5, null]]);
  assert.deepEqual([holesAt(shown, 1)[0].summary, anySummaryHole(shown, 4)], [true, true]);
  shown.slice.arrays.wanted_regret[2] = 60;
  assert.deepEqual([holesAt(shown, 1), anySummaryHole(shown, 4)], [[], false]);
  assert.deepEqual(holesAt({ ...shown, worst: true }, 0).map((hole) => hole.summary), [false]);
});

test("a hole is the redder the more it is of full KV's attention", () => {
  const strengths = [0.01, 0.1, 0.3, 0.9].map(holeStrength);
  assert.deepEqual([...strengths].sort((a, b) => a - b), strengths);
  assert.deepEqual([strengths[2], strengths[3]], [1, 1]);
});

test("hatching stays inside its box, however narrow, and goes on in the next box", () => {
  for (const box of [[3, 10, 8, 20], [0, 0, 8, 2], [5, 7, 100, 3]]) {
    const [x, y, width, height] = box;
    const lines = hatchLines(...box);
    assert.ok(lines.length > 0);
    for (const [x0, y0, x1, y1] of lines) {
      assert.ok(x0 >= x && x1 <= x + width && y1 >= y && y0 <= y + height, String(box));
      assert.equal(x0 + y0, x1 + y1);
      assert.equal((x0 + y0) % 6, 0, "one phase for all boxes");
    }
  }
});

test("a hole of any head names the head that lost most", () => {
  assert.deepEqual(brief(holesAt(view(true), 0)), [[2, 4, 1, 0.4, 3]]);
});

test("a loss to a summary of any head is a hole of its own kind", () => {
  const shown = view(true);
  assert.deepEqual([holesAt(shown, 0)[0].summary, anySummaryHole(shown, 4)], [false, false]);
  shown.run.arrays.worst_summary = Uint8Array.from([1]);
  assert.deepEqual([holesAt(shown, 0)[0].summary, anySummaryHole(shown, 4)], [true, true]);
});

test("steps at which full attention was not recorded are known", () => {
  assert.deepEqual([0, 1, 2, 3].map((step) => sampledAt(view(false), step)), [true, true, false, true]);
  assert.deepEqual([0, 1, 2, 3].map((step) => sampledAt(view(true), step)), [true, false, true, false]);
});

function grid(steps, height) {
  const made = Object.assign(new MapGrid(), { steps, width: 256, height });
  made.reset(1000);
  return made;
}

test("the range stays inside the tokens and keeps its size", () => {
  const map = grid(4, 100);
  map.look(-50, 50);
  assert.deepEqual(map.range, [0, 100]);
  map.look(980, 1080);
  assert.deepEqual(map.range, [900, 1000]);
  map.look(500, 501);
  assert.deepEqual(map.range, [500, 516]);
  map.zoom(1000);
  assert.deepEqual(map.range, [0, 1000]);
  map.zoom(0.5, 250);
  assert.deepEqual(map.range, [125, 625], "the token in question stays in place");
  map.pan(0.5);
  assert.deepEqual(map.range, [375, 875]);
  map.include(900);
  assert.deepEqual(map.range, [500, 1000]);
  map.include(600);
  assert.deepEqual(map.range, [500, 1000], "already there");
});

test("what is too narrow to be seen has the least width about its middle", () => {
  const map = grid(4, 100);
  assert.deepEqual(map.stretch(100, 700, 8), [map.x(100), map.x(700) - map.x(100)]);
  const [left, width] = map.stretch(500, 501, 8);
  assert.equal(width, 8);
  assert.ok(Math.abs(left + 4 - (map.x(500) + map.x(501)) / 2) < 1e-9);
});

test("approaching tokens brings them near at once, then by the factor, and keeps them in the middle", () => {
  const map = grid(4, 100);
  map.look(0, 200);
  map.approach(600, 660, 0.5);
  assert.deepEqual(map.range, [540, 720]);
  map.approach(600, 660, 0.5);
  assert.deepEqual(map.range, [585, 675]);
});

test("a place on the map and its token are inverses", () => {
  const map = grid(4, 100);
  map.look(100, 300);
  for (const pos of [100, 150, 299]) assert.ok(Math.abs(map.position(map.x(pos)) - pos) < 1e-9);
  assert.equal(map.x(100), map.margin.left);
});

test("rows share steps where there is no room for each, and every step has one row", () => {
  for (const [steps, height] of [[4, 100], [500, 100], [7, 44], [1, 100]]) {
    const map = grid(steps, height);
    assert.ok(map.rows <= steps);
    const seen = [];
    for (let row = 0; row < map.rows; row++) {
      const [first, stop] = map.stepsOf(row);
      for (let step = first; step < stop; step++) {
        assert.equal(map.rowOf(step), row);
        seen.push(step);
      }
    }
    assert.deepEqual(seen, Array.from({ length: steps }, (_, step) => step));
  }
});

test("axis strides are 1, 2 or 5 times a power of ten", () => {
  assert.deepEqual([0.3, 1, 3, 7, 45, 101, 1000].map(niceStride), [1, 1, 5, 10, 50, 200, 1000]);
});
