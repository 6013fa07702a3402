// @ts-check
// The cache map: tokens across, decode steps down, colour = the state of a token's span for the selected KV head while the
// step attended. Red where full KV attended and the run did not: a hole. Drawn once per head and range; a step moves lines.

import { GREY, HOLE, STATE_WORDS, VERMILION, context2d, pale } from "./color.js";
import { drawHatch } from "./hatch.js";
import { holeStrength, holesAt, sampledAt } from "./holes.js";
import { MapGrid, niceStride } from "./mapgrid.js";

/** @import { Picture } from "./picture.js" */
/** @import { Context, MapPlace, Range, Run, Slice, Surface, Theme } from "./types.js" */

const HOLE_WIDTH = 2, HOLE_PICKED = 8; // px, at least: of any hole; of the selected span's, and of all in a tour
const UNSAMPLED = 6; // px of the grey edge beside a row whose full attention was not recorded

export class CacheMap extends MapGrid {
  /** @param {HTMLCanvasElement} canvas @param {(place: MapPlace) => void} onPick @param {(place: MapPlace | null) => void} onHover */
  constructor(canvas, onPick, onHover) {
    super();
    this.canvas = canvas;
    /** @type {Picture | null} */
    this.view = null;
    /** @type {string | null} */
    this.key = null;
    /** @type {Slice | null} the slice that `base` shows */
    this.drawnSlice = null;
    /** @type {{ x: number, range: Range, moved: boolean } | null} */
    this.grip = null;
    /** @type {Surface & CanvasImageSource} */
    this.base = new OffscreenCanvas(1, 1);
    canvas.addEventListener("pointerdown", (e) => { canvas.setPointerCapture(e.pointerId); this.grip = { x: e.clientX, range: this.range, moved: false }; });
    canvas.addEventListener("pointermove", (e) => (this.grip && e.buttons & 1 ? this.drag(e, this.grip) : onHover(this.placeAt(e))));
    canvas.addEventListener("pointerup", (e) => {
      const picked = this.grip && !this.grip.moved ? this.placeAt(e) : null;
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

  /** @param {Run} run */
  setRun(run) {
    this.reset(run.header.texts.length);
    this.key = null;
  }

  // Another range of tokens: all of the view is drawn anew, once there is one.
  moved() {
    if (this.view) this.view.draw();
  }

  /** @param {PointerEvent} event @param {{ x: number, range: Range, moved: boolean }} grip */
  drag(event, grip) {
    const by = event.clientX - grip.x;
    if (Math.abs(by) > 4) grip.moved = true;
    if (!grip.moved) return;
    const [from, to] = grip.range;
    const shift = -by / this.scale;
    this.look(from + shift, to + shift);
  }

  /** The token and step under the pointer, and the hole there; null outside. @param {MouseEvent} event @returns {MapPlace | null} */
  placeAt(event) {
    if (!this.view) return null;
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const pos = Math.floor(this.position(x));
    const row = Math.floor(((y - this.margin.top) / (this.height - this.margin.top - this.margin.bottom)) * this.rows);
    if (x < this.margin.left || pos < 0 || pos >= Math.min(this.count, this.range[1]) || row < 0 || row >= this.rows) return null;
    const [first, stop] = this.stepsOf(row);
    /** @type {MapPlace} */
    const place = { pos, step: stop - 1, hole: null };
    for (let step = first; step < stop; step++) {
      for (const hole of holesAt(this.view, step)) {
        if (pos >= hole.from && pos < hole.to && (!place.hole || hole.mass > place.hole.mass)) Object.assign(place, { step, hole });
      }
    }
    return place;
  }

  // ---- drawing -----------------------------------------------------------------------------------------------------

  /** @param {Picture} view @param {number} width @param {number} height @param {Theme} theme */
  draw(view, width, height, theme) {
    Object.assign(this, { view, width, height, steps: view.steps });
    const key = [width, height, this.range, view.slice.header.rev, view.slice.header.layer, view.slice.header.head, view.worst,
      view.span, view.touring, view.run.header.payload, theme.text, theme.background].join(" ");
    if (this.key !== key || this.drawnSlice !== view.slice) {
      this.base = new OffscreenCanvas(1, 1);
      this.drawBase(context2d(this.base, width, height), theme);
      Object.assign(this, { key, drawnSlice: view.slice });
    }
    const ctx = context2d(this.canvas, width, height);
    ctx.clearRect(0, 0, width, height);
    if (ctx.vector) this.drawBase(ctx, theme);
    else ctx.drawImage(this.base, 0, 0, width, height);
    this.drawPlace(ctx, view, theme);
  }

  /** @param {Context} ctx @param {Theme} theme */
  drawBase(ctx, theme) {
    const { left, right, top } = this.margin;
    const columns = Math.max(1, Math.floor(this.width - left - right));
    const image = new ImageData(columns, this.rows);
    this.fillStates(new Uint32Array(image.data.buffer), columns);
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
      const known = Array.from({ length: stop - first }, (_, i) => sampledAt(this.view, first + i)).some(Boolean);
      if (!known) ctx.fillRect(left + columns + 3, this.top(row), UNSAMPLED, this.top(row + 1) - this.top(row));
    }
    this.drawAxes(ctx, columns, theme);
  }

  // A pixel shows the state of the token under its middle, at the row's last step.
  /** @param {Uint32Array} pixels one row after another @param {number} columns */
  fillStates(pixels, columns) {
    const { clock, run } = this.view;
    const [from, to] = this.range;
    const column = (/** @type {number} */ pos) => Math.max(0, Math.min(columns, Math.ceil((pos - from) * (columns / (to - from)) - 0.5)));
    const places = run.header.spans.map((span, index) => ({ span, index, first: column(span.start), stop: span.kind === "window" ? columns : column(span.end) }));
    const seen = places.filter(({ first, stop }) => first < stop);
    const layers = [true, false].map((window) => seen.filter(({ span }) => (span.kind === "window") === window)).flat();
    const colors = this.packedColors();
    for (let row = 0; row < this.rows; row++) {
      const step = this.stepsOf(row)[1] - 1;
      const written = column(clock.written(step));
      for (const { span, index, first, stop } of layers) {
        if (span.born > step || (span.died !== null && span.died <= step)) continue;
        const edge = Math.min(stop, written);
        if (first < edge) pixels.fill(colors[clock.stateAt(index, step)], row * columns + first, row * columns + edge);
      }
    }
  }

  // The colour of each state's code as a pixel of an image.
  packedColors() {
    const bytes = new Uint8ClampedArray(4 * 256);
    for (let code = 0; code < 256; code++) {
      if (code < STATE_WORDS.length || code === 255) bytes.set([...pale(code, this.view.ground), 255], 4 * code);
    }
    return new Uint32Array(bytes.buffer);
  }

  /** @param {Context} ctx @param {number} step */
  drawHoles(ctx, step) {
    const row = this.rowOf(step);
    const [y, h] = [this.top(row), this.top(row + 1) - this.top(row)];
    for (const { from, to, span, mass, summary } of holesAt(this.view, step)) {
      const [x, width] = this.stretch(from, to, this.least(span));
      const color = `rgba(${HOLE}, ${holeStrength(mass)})`;
      if (summary) drawHatch(ctx, { x, y, width, height: h }, color);
      else {
        ctx.fillStyle = color;
        ctx.fillRect(x, y, width, h);
      }
    }
  }

  /** The least width of a hole in a span, in pixels. @param {number} span index into the run's spans */
  least(span) {
    const { touring, run, span: picked } = this.view;
    return touring || (span >= 0 && run.header.spans[span].id === picked) ? HOLE_PICKED : HOLE_WIDTH;
  }

  /** @param {Context} ctx @param {number} columns @param {Theme} theme */
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
  /** @param {Context} ctx @param {Picture} view @param {Theme} theme */
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
