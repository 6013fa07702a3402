// The cache map: tokens across, decode steps down, colour = the state of a token's span for the selected KV head while the
// step attended. Red where full KV attended and the run did not: a hole. Drawn once per head and range; a step moves lines.

import { decode } from "./codec.js";
import { GREY, STATE_WORDS, VERMILION, context2d, pale } from "./color.js";

export const HOLE = [178, 0, 24];
const HOLE_LEAST = 0.01; // share of full KV's attention below which nothing is called a hole
const HOLE_FULL = 0.3; // from here on a hole is drawn in its whole colour
const UNSAMPLED = 6; // px of the grey edge beside a row whose full attention was not recorded
const LEAST_ROW = 2; // px; where steps need less, several share a row and the deepest hole shows

export class CacheMap {
  constructor(canvas, onPick, onHover) {
    this.canvas = canvas;
    this.margin = { left: 46, right: 10, top: 12, bottom: 30 };
    this.range = null;
    const at = (e) => this.at(e);
    canvas.addEventListener("pointerdown", (e) => { canvas.setPointerCapture(e.pointerId); this.grip = { x: e.clientX, range: this.range, moved: false }; });
    canvas.addEventListener("pointermove", (e) => (this.grip && e.buttons & 1 ? this.drag(e) : onHover(at(e))));
    canvas.addEventListener("pointerup", (e) => {
      const picked = this.grip && !this.grip.moved ? at(e) : null;
      this.grip = null;
      if (picked) onPick(picked);
    });
    canvas.addEventListener("mouseleave", () => onHover(null));
    canvas.addEventListener("wheel", (e) => {
      if (!e.ctrlKey && !e.metaKey) return;
      e.preventDefault();
      this.zoom(Math.exp(e.deltaY / 300), this.position(e.clientX - canvas.getBoundingClientRect().left));
    }, { passive: false });
    canvas.addEventListener("dblclick", () => this.look(0, this.count));
  }

  setRun(run) {
    this.count = run.header.texts.length;
    this.range = [0, this.count];
    this.key = null;
  }

  // ---- range of tokens ---------------------------------------------------------------------------------------------

  look(from, to) {
    const size = Math.min(this.count, Math.max(16, to - from));
    const start = Math.max(0, Math.min(this.count - size, from));
    this.range = [start, start + size];
    if (this.view) this.view.draw();
  }

  zoom(factor, about = (this.range[0] + this.range[1]) / 2) {
    const [from, to] = this.range;
    this.look(about - (about - from) * factor, about + (to - about) * factor);
  }

  pan(share) {
    const [from, to] = this.range;
    this.look(from + share * (to - from), to + share * (to - from));
  }

  drag(event) {
    const by = event.clientX - this.grip.x;
    if (Math.abs(by) > 4) this.grip.moved = true;
    if (!this.grip.moved) return;
    const [from, to] = this.grip.range;
    const shift = -by / this.scale;
    this.look(from + shift, to + shift);
  }

  // Brings a token into view.
  include(pos) {
    const [from, to] = this.range;
    if (pos < from || pos >= to) this.look(pos - (to - from) / 2, pos + (to - from) / 2);
  }

  get scale() {
    return (this.width - this.margin.left - this.margin.right) / (this.range[1] - this.range[0]);
  }

  x(pos) {
    return this.margin.left + (pos - this.range[0]) * this.scale;
  }

  position(x) {
    return this.range[0] + (x - this.margin.left) / this.scale;
  }

  // ---- rows of steps -----------------------------------------------------------------------------------------------

  get rows() {
    return Math.max(1, Math.min(this.steps, Math.floor((this.height - this.margin.top - this.margin.bottom) / LEAST_ROW)));
  }

  top(row) {
    return this.margin.top + (row * (this.height - this.margin.top - this.margin.bottom)) / this.rows;
  }

  rowOf(step) {
    return Math.floor((step * this.rows) / this.steps);
  }

  // The steps of a row: [first, stop).
  stepsOf(row) {
    return [Math.ceil((row * this.steps) / this.rows), Math.ceil(((row + 1) * this.steps) / this.rows)];
  }

  // The token and step under the pointer, and the hole there; null outside.
  at(event) {
    if (!this.view) return null;
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const pos = Math.floor(this.position(x));
    const row = Math.floor(((y - this.margin.top) / (this.height - this.margin.top - this.margin.bottom)) * this.rows);
    if (x < this.margin.left || pos < 0 || pos >= Math.min(this.count, this.range[1]) || row < 0 || row >= this.rows) return null;
    const [first, stop] = this.stepsOf(row);
    const found = { pos, step: stop - 1, hole: null };
    for (let step = first; step < stop; step++) {
      for (const hole of this.holes(step)) {
        if (pos >= hole.from && pos < hole.to && (!found.hole || hole.mass > found.hole.mass)) Object.assign(found, { step, hole });
      }
    }
    return found;
  }

  // What full KV attended at a step and the run did not: {from, to, span, mass, head}. Of a span that is partly there,
  // the tokens that were recorded as lost; of all heads, whole spans with the head that lost most.
  holes(step) {
    const { run, slice, worst } = this.view;
    const { spans } = run.header;
    const found = [];
    const source = worst ? run.arrays : slice.arrays;
    const name = worst ? "worst" : "wanted";
    const starts = source[`${name}_start`];
    for (let i = starts ? starts[step] : 0; starts && i < starts[step + 1]; i++) {
      const mass = decode(source[`${name}_hole`][i], 0, 1);
      const span = source[`${name}_span`][i];
      const partly = spans[span].kind === "window" || (!worst && this.view.clock.stateAt(span, step) === PARTIAL);
      if (mass < HOLE_LEAST || partly) continue;
      found.push({ from: spans[span].start, to: spans[span].end, span, mass, head: worst ? source.worst_head[i] : null });
    }
    const lost = worst ? null : slice.arrays.lost_start;
    for (let i = lost ? lost[step] : 0; lost && i < lost[step + 1]; i++) {
      const pos = slice.arrays.lost_pos[i];
      const mass = decode(slice.arrays.lost_mass[i], 0, 1);
      if (mass >= HOLE_LEAST && !found.some((hole) => pos >= hole.from && pos < hole.to)) {
        found.push({ from: pos, to: pos + 1, span: this.view.clock.spanAt(pos, step), mass, head: null });
      }
    }
    return found;
  }

  // Whether full attention was recorded at a step: in the selected layer, or in some.
  sampled(step) {
    const { run, slice, worst } = this.view;
    if (worst) return run.header.every > 0 && step % run.header.every === 0;
    return slice.arrays.wanted_tail !== undefined && !Number.isNaN(slice.arrays.wanted_tail[step]);
  }

  // ---- drawing -----------------------------------------------------------------------------------------------------

  draw(view, width, height, theme) {
    Object.assign(this, { view, width, height, steps: view.steps });
    const key = [width, height, this.range, view.slice.header.rev, view.slice.header.layer, view.slice.header.head, view.worst,
      view.run.header.payload, theme.text, theme.background].join(" ");
    if (this.key !== key || this.drawnOf !== view.slice) {
      this.base = new OffscreenCanvas(1, 1);
      this.base.style = {};
      this.drawBase(context2d(this.base, width, height), theme);
      Object.assign(this, { key, drawnOf: view.slice });
    }
    const ctx = context2d(this.canvas, width, height);
    ctx.clearRect(0, 0, width, height);
    if (ctx.vector) this.drawBase(ctx, theme);
    else ctx.drawImage(this.base, 0, 0, width, height);
    this.drawPlace(ctx, view, theme);
  }

  drawBase(ctx, theme) {
    const { left, right, top } = this.margin;
    const columns = Math.max(1, Math.floor(this.width - left - right));
    const image = new ImageData(columns, this.rows);
    for (let row = 0; row < this.rows; row++) this.fillRow(image, row, columns);
    const states = new OffscreenCanvas(columns, this.rows);
    states.getContext("2d").putImageData(image, 0, 0);
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(states, left, top, columns, this.top(this.rows) - top);
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, columns, this.top(this.rows) - top);
    ctx.clip();
    for (let step = 0; step < this.steps; step++) this.drawHoles(ctx, step);
    ctx.restore();
    ctx.fillStyle = `rgb(${GREY})`;
    for (let row = 0; row < this.rows; row++) {
      const [first, stop] = this.stepsOf(row);
      const known = Array.from({ length: stop - first }, (_, i) => this.sampled(first + i)).some((found) => found);
      if (!known) ctx.fillRect(left + columns + 3, this.top(row), UNSAMPLED, this.top(row + 1) - this.top(row));
    }
    this.drawAxes(ctx, columns, theme);
  }

  // A pixel shows the state of the token under its middle, at the row's last step.
  fillRow(image, row, columns) {
    const { clock, run } = this.view;
    const step = this.stepsOf(row)[1] - 1;
    const written = clock.written(step);
    const column = (pos) => Math.max(0, Math.min(columns, Math.ceil((pos - this.range[0]) * (columns / (this.range[1] - this.range[0])) - 0.5)));
    const paint = (from, to, code) => {
      const color = pale(code, this.view.ground);
      for (let x = column(from); x < column(to); x++) {
        const i = (row * columns + x) * 4;
        image.data.set([...color, 255], i);
      }
    };
    const alive = (span) => span.born <= step && (span.died === null || span.died > step);
    run.header.spans.forEach((span, i) => span.kind === "window" && alive(span) && paint(span.start, written, clock.stateAt(i, step)));
    run.header.spans.forEach((span, i) => span.kind !== "window" && alive(span) && paint(span.start, Math.min(span.end, written), clock.stateAt(i, step)));
  }

  drawHoles(ctx, step) {
    const row = this.rowOf(step);
    const [y, h] = [this.top(row), this.top(row + 1) - this.top(row)];
    for (const { from, to, mass } of this.holes(step)) {
      ctx.fillStyle = `rgba(${HOLE}, ${Math.min(1, 0.35 + (0.65 * mass) / HOLE_FULL)})`;
      ctx.fillRect(this.x(from), y, Math.max(2, this.x(to) - this.x(from)), h);
    }
  }

  drawAxes(ctx, columns, theme) {
    const { left, top } = this.margin;
    const bottom = this.top(this.rows);
    const { needle, prompt } = this.view.run.header;
    ctx.fillStyle = theme.text;
    for (const [from, to] of needle) {
      const [a, b] = [Math.max(left, this.x(from)), Math.min(left + columns, this.x(to))];
      if (b > left && a < left + columns) ctx.fillRect(a, top - 6, Math.max(3, b - a), 4);
    }
    ctx.font = `11px ${theme.font}`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "right";
    const every = Math.max(1, Math.ceil((this.steps * 13) / (bottom - top)));
    for (let step = 0; step < this.steps; step += every) {
      const row = this.rowOf(step);
      ctx.fillText(String(step), left - 6, (this.top(row) + this.top(row + 1)) / 2);
    }
    ctx.textAlign = "center";
    ctx.textBaseline = "top";
    const stride = niceStride((this.range[1] - this.range[0]) / Math.max(2, columns / 80));
    for (let pos = Math.ceil(this.range[0] / stride) * stride; pos < this.range[1]; pos += stride) {
      ctx.fillRect(this.x(pos), bottom, 1, 4);
      ctx.fillText(pos.toLocaleString("en"), this.x(pos), bottom + 5);
    }
    ctx.fillText("token (prompt, then what was generated); decode steps downwards", left + columns / 2, bottom + 18);
    if (this.x(prompt) > left && this.x(prompt) < left + columns) {
      ctx.fillRect(this.x(prompt), top - 6, 1, bottom - top + 10);
    }
  }

  // The selected step, the selected span and the part of the text that the strip holds.
  drawPlace(ctx, view, theme) {
    const { left, right, top } = this.margin;
    const edge = this.width - right;
    const row = this.rowOf(view.step);
    ctx.strokeStyle = VERMILION;
    ctx.lineWidth = 1.5;
    ctx.strokeRect(left - 1, this.top(row) - 0.5, edge - left + 2, Math.max(2, this.top(row + 1) - this.top(row)) + 1);
    const span = view.run.header.spans.find((s) => s.id === view.span);
    if (span && span.kind !== "window") {
      const [a, b] = [Math.max(left, this.x(span.start)), Math.min(edge, this.x(span.end))];
      if (b > a) ctx.strokeRect(a - 1, top - 2, Math.max(3, b - a) + 2, this.top(this.rows) - top + 4);
    }
    if (!view.strip.windowed) return;
    const [a, b] = [Math.max(left, this.x(view.strip.start)), Math.min(edge, this.x(view.strip.end))];
    ctx.fillStyle = theme.accent;
    if (b > a) ctx.fillRect(a, 1, b - a, 3);
  }
}

const PARTIAL = STATE_WORDS.indexOf("partly evicted");

// 1, 2 or 5 times a power of ten, at least `least`.
function niceStride(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least);
}
