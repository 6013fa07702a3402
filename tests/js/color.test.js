// Colour tables, and canvases at the screen's resolution.
import assert from "node:assert/strict";
import { test } from "node:test";
import { DIVERGING, GREY, SEQUENTIAL, STATES, STATE_WORDS, context2d, css, gradient, ink, inkOn, pale } from "../../kvlens/player/web/color.js";

const luma = (table, i) => 0.299 * table[i * 3] + 0.587 * table[i * 3 + 1] + 0.114 * table[i * 3 + 2];

test("entry 255 of every table is the grey of what was not recorded", () => {
  for (const table of [SEQUENTIAL, DIVERGING, STATES]) assert.deepEqual([...table.subarray(765)], GREY);
});

test("the sequential table grows lighter at every step and the diverging one is lightest in its middle", () => {
  for (let i = 1; i < 255; i++) assert.ok(luma(SEQUENTIAL, i) >= luma(SEQUENTIAL, i - 1) - 1, `entry ${i}`);
  assert.ok(luma(DIVERGING, 127) > 240);
  assert.ok(Math.max(luma(DIVERGING, 0), luma(DIVERGING, 254)) < 60);
});

test("states differ from each other on light and on dark ground, and keep a readable ink", () => {
  for (const ground of [[255, 255, 255], [15, 20, 25]]) {
    const colors = STATE_WORDS.map((_, code) => pale(code, ground));
    assert.equal(new Set(colors.map(String)).size, STATE_WORDS.length);
    assert.deepEqual(pale(255, ground), GREY);
  }
  assert.equal(ink([255, 255, 255]), "#000");
  assert.equal(ink([0, 34, 78]), "#fff");
  assert.equal(inkOn(SEQUENTIAL, 254), "#000");
});

test("css names an entry, a gradient runs from the first to the last", () => {
  assert.equal(css(SEQUENTIAL, 0), "rgb(0,34,78)");
  assert.ok(gradient(SEQUENTIAL).startsWith("linear-gradient(to right, rgb(0,34,78),"));
  assert.ok(gradient(SEQUENTIAL).endsWith(`${css(SEQUENTIAL, 254)})`));
});

test("a canvas has the screen's pixels and the page's size, and is not cleared when neither changes", () => {
  globalThis.window = { devicePixelRatio: 2 };
  const sizes = [];
  const context = { setTransform: (...numbers) => sizes.push(numbers) };
  const canvas = {
    style: {}, set width(value) { sizes.push(["width", value]); this.w = value; }, get width() { return this.w; },
    set height(value) { this.h = value; }, get height() { return this.h; }, getContext: () => context,
  };
  assert.equal(context2d(canvas, 100, 40), context);
  assert.deepEqual(sizes, [["width", 200], [2, 0, 0, 2, 0, 0]]);
  assert.deepEqual(canvas.style, { width: "100px", height: "40px" });
  context2d(canvas, 100, 40);
  assert.deepEqual(sizes.slice(2), [[2, 0, 0, 2, 0, 0]]);
  const vector = {};
  assert.equal(context2d({ vector }, 100, 40), vector);
});
