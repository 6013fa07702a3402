// @ts-check
// The moving picture of the first page: a loss, then the same run with what was missed held. Scenes and figures are recorded ones.

import { HOLE, VERMILION, context2d, pale, readTheme, rgb } from "../../../player/web/color.js";
import { HOLE_LEAST, holeStrength } from "../../../player/web/holes.js";
import { pair, swatch, textNode } from "../../../player/web/nodes.js";

/**
 * @typedef {{ tokens: string[], spans: [number, number, number][][], hole: number[] }} Scene
 * @typedef {{ condition: string, question: string, expected: string, layer: number, kv_head: number, start: number, end: number,
 *   text: string, needle: [number, number], prompt: number, held: string, held_from: number, cost: string, method: string, states: string[],
 *   lost: Scene, repaired: Scene }} StoryData
 * @typedef {{ scene: "lost" | "repaired", step: number, over: boolean }} Frame over: the answer stands
 */

const STEP_MS = 700, HOLD = 4; // a step; frames that an answer stands
const ROW = 13, TOP = 8; // px

/** Every frame of a story: each run step by step, then its answer for a while. @param {StoryData} data @returns {Frame[]} */
export function frames({ lost, repaired }) {
  return /** @type {const} */ ([["lost", lost], ["repaired", repaired]]).flatMap(([scene, { tokens }]) => [
    ...tokens.map((_, step) => ({ scene, step, over: false })),
    ...Array.from({ length: HOLD }, () => ({ scene, step: tokens.length - 1, over: true })),
  ]);
}

/** What a run has written up to a step, without the token that ends it. @param {Scene} scene @param {number} step */
export function written(scene, step) {
  return scene.tokens.slice(0, step + 1).filter((token) => !/^<\|.*\|>$/.test(token)).join("").trim();
}

/** @type {WeakMap<ShadowRoot, StoryView>} */
const VIEWS = new WeakMap();

class StoryView {
  /** @param {ShadowRoot} root @param {StoryData} data */
  constructor(root, data) {
    this.data = data;
    this.frames = frames(data);
    const node = (/** @type {string} */ id) => /** @type {HTMLElement} */ (root.getElementById(id));
    this.nodes = Object.fromEntries(["story", "question", "who", "text", "mark", "caption", "key", "again"].map((id) => [id, node(id)]));
    this.canvas = /** @type {HTMLCanvasElement} */ (root.getElementById("cache"));
    this.timer = this.place = 0;
    this.nodes.question.textContent = data.question;
    const theme = readTheme(this.nodes.story), ground = rgb(theme.background);
    const used = [...new Set([data.lost, data.repaired].flatMap(({ spans }) => spans.flatMap((row) => row.map(([, , state]) => state))))].sort();
    this.nodes.key.replaceChildren(...used.map((state) => pair(swatch(`rgb(${pale(state, ground)})`), textNode(data.states[state]))),
      pair(swatch(`rgb(${HOLE})`), textNode("read by full KV alone")), textNode(`${data.method} \u00b7 ${data.condition} \u00b7 L${data.layer} KV${data.kv_head}`));
    this.nodes.again.onclick = () => (this.timer ? this.pause() : this.play());
    this.sizes = new ResizeObserver(() => this.draw());
    this.sizes.observe(this.nodes.story);
    if (window.matchMedia("(prefers-reduced-motion: reduce)").matches) this.rest();
    else this.play();
  }

  play() {
    clearInterval(this.timer);
    this.timer = window.setInterval(() => { this.place = (this.place + 1) % this.frames.length; this.draw(); }, STEP_MS);
    this.nodes.again.textContent = "Pause";
    this.draw();
  }

  pause() {
    clearInterval(this.timer);
    this.timer = 0;
    this.nodes.again.textContent = "Play";
  }

  // Without motion: the loss as it stands at its end; Play goes on from there.
  rest() {
    this.place = this.frames.findIndex(({ over }) => over);
    this.pause();
    this.draw();
  }

  draw() {
    const { scene, step, over } = this.frames[this.place];
    const { data, nodes } = this;
    const lost = scene === "lost", run = data[scene];
    Object.assign(nodes.story.dataset, { scene, step: String(step), over: String(over) });
    nodes.who.textContent = lost ? data.method : `${data.method}, repaired`;
    nodes.text.textContent = written(run, step) || "\u2026";
    nodes.mark.textContent = !over ? "" : lost ? `\u2717 lost: full KV says ${data.expected}` : "\u2713 the answer is back";
    nodes.mark.dataset.lost = String(lost);
    nodes.caption.textContent = lost
      ? `Red: full KV reads it here, this run does not: \u201c${data.text}\u201d`
      : step < data.held_from
        ? `The same run, up to step ${data.held_from}, where the hold begins.`
        : `The same run, holding ${data.held} (${data.cost}): it is read again.`;
    this.drawCache(run, step);
  }

  /** @param {Scene} run @param {number} step */
  drawCache(run, step) {
    const theme = readTheme(this.nodes.story);
    const width = this.canvas.clientWidth || 0;
    const rows = Math.max(this.data.lost.tokens.length, this.data.repaired.tokens.length);
    if (width < 50) return;
    const ctx = context2d(this.canvas, width, TOP + rows * ROW + 2);
    this.canvas.style.width = "100%";
    ctx.clearRect(0, 0, width, TOP + rows * ROW + 2);
    const scale = width / (this.data.prompt + rows);
    const ground = rgb(theme.background);
    const x = (/** @type {number} */ pos) => pos * scale;
    for (let row = 0; row <= step; row++) {
      const y = TOP + row * ROW;
      for (const [start, end, state] of run.spans[row]) {
        ctx.fillStyle = `rgb(${pale(state, ground)})`;
        ctx.fillRect(x(start), y, Math.max(1, x(end) - x(start) - 0.5), ROW - 1);
      }
      if (run.hole[row] < HOLE_LEAST) continue;
      ctx.fillStyle = `rgba(${HOLE}, ${holeStrength(run.hole[row])})`;
      ctx.fillRect(x(this.data.start), y, Math.max(8, x(this.data.end) - x(this.data.start)), ROW - 1);
    }
    ctx.fillStyle = theme.text;
    const [from, to] = this.data.needle;
    if (to > from) ctx.fillRect(x(from), 1, Math.max(3, x(to) - x(from)), 4);
    ctx.strokeStyle = VERMILION;
    ctx.lineWidth = 1.5;
    ctx.strokeRect(x(this.data.start) - 1, TOP - 1, Math.max(8, x(this.data.end) - x(this.data.start)) + 2, (step + 1) * ROW + 1);
  }

  close() {
    clearInterval(this.timer);
    this.sizes.disconnect();
  }
}

/** @param {{ data: StoryData, parentElement: ShadowRoot }} component */
export default function ({ data, parentElement }) {
  VIEWS.get(parentElement)?.close();
  const view = new StoryView(parentElement, data);
  VIEWS.set(parentElement, view);
  return () => view.close();
}
