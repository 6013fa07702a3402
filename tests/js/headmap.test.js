// The map of heads and its key: what is not there yet, what is not recorded, and so many heads that no hatch is drawn.
import assert from "node:assert/strict";
import { test } from "node:test";
import { GREY } from "../../kvlens/player/web/color.js";
import { HeadMap } from "../../kvlens/player/web/heatmap.js";
import { Picture } from "../../kvlens/player/web/picture.js";
import { FakeNode } from "./fakedom.js";
import { madeRun } from "./runs.js";

const THEME = { text: "#111", background: "#fff", border: "#ccc", accent: "#00f", font: "sans-serif" };
const PENDING = "being loaded\u2026";

class Leaf extends FakeNode {
  constructor() {
    super();
    Object.assign(this, { style: {}, classes: [] });
    this.classList = { add: (name) => this.classes.push(name) };
  }

  replaceChildren(...nodes) { this.children = nodes; }
}

// A context of a saved picture: it notes its words and the colours of its cells.
function context() {
  const noted = { words: [], fills: [] };
  const ctx = {
    vector: true,
    fillText: (text) => noted.words.push(text),
    fillRect: () => noted.fills.push(ctx.fillStyle),
    createPattern: () => "hatch",
  };
  for (const name of ["clearRect", "beginPath", "moveTo", "lineTo", "stroke", "strokeRect"]) ctx[name] = () => {};
  return { ctx, noted };
}

function drawn(run, metric = run.header.metrics[0]) {
  globalThis.OffscreenCanvas = class { getContext() { return context().ctx; } };
  const { ctx, noted } = context();
  const canvas = { vector: ctx, addEventListener: () => {} };
  new HeadMap(canvas, () => {}, () => {}).draw({ run, step: 0, layer: 0, head: 0, metric, range: [0, 1] }, 400, 200, THEME);
  return noted;
}

function sized(layers, heads) {
  const run = madeRun();
  Object.assign(run.header, { layers, q_heads: heads });
  run.arrays["cube:regret"] = new Uint16Array(layers * heads * run.header.steps).fill(65535);
  return run;
}

function pictureOf(run) {
  const picture = Object.create(Picture.prototype);
  const [metric] = run.header.metrics;
  return Object.assign(picture, {
    run, metric, range: [0, 1], steps: run.header.steps, span: null, layer: 0, head: 0, metricName: "regret",
    scaleKey: "",
    el: { metric: new Leaf(), scale: new Leaf() },
  });
}

test("a map whose figures were not sent yet says so, and one of a run without them is hatched", () => {
  const run = madeRun();
  assert.deepEqual(drawn(run), { words: [PENDING], fills: [] });
  const other = drawn(run, { ...run.header.metrics[0], name: "another" });
  assert.equal(other.words.includes(PENDING), false);
  assert.equal(other.fills.filter((fill) => fill === "hatch").length, 4);
});

test("the curve of a metric is pending until its figures are there", () => {
  const run = madeRun();
  const pending = () => {
    const picture = pictureOf(run);
    let tracks = [];
    Object.assign(picture, { tracks: { setTracks: (all) => { tracks = all; } }, draw: () => {} });
    picture.refresh();
    return tracks.map((track) => track.pending);
  };
  assert.deepEqual(pending(), [true]);
  run.arrays["cube:regret"] = new Uint16Array(16);
  assert.deepEqual(pending(), [false]);
});

test("the key shows what is missing as the map does, with few heads and with many", () => {
  globalThis.document = { createElement: () => new Leaf() };
  const missing = (run) => {
    const picture = pictureOf(run);
    picture.drawScale();
    const [leaf, words] = picture.el.scale.children.at(-1).children;
    return [leaf.classes, leaf.style.backgroundColor, words.textContent.includes("n/r")];
  };
  const [few, many] = [sized(2, 2), sized(80, 64)];
  assert.deepEqual(missing(few), [["nr"], "", true]);
  assert.deepEqual(missing(many), [[], `rgb(${GREY})`, false]);
  assert.equal(drawn(few).fills.filter((fill) => fill === "hatch").length, 4);
  const cells = drawn(many).fills.slice(0, 80 * 64);
  assert.deepEqual([...new Set(cells)], [`rgb(${GREY})`]);
});
