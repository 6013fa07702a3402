// @ts-check
// Quantities over all steps, one under the other, with one cursor. The curves are drawn once and kept; a step moves the cursor.

import { formatBytes, formatValue } from "./codec.js";
import { VERMILION, context2d } from "./color.js";

/** @import { Context, Surface, Theme, Track } from "./types.js" */

const MARK = "#CC79A7";

export class Tracks {
  /** @param {HTMLCanvasElement} canvas @param {(step: number) => void} onScrub @param {() => void} onRelease */
  constructor(canvas, onScrub, onRelease) {
    this.canvas = canvas;
    /** @type {Track[]} */
    this.tracks = [];
    this.steps = 0;
    /** @type {number | null} */
    this.diverged = null;
    /** @type {string | null} */
    this.key = null;
    /** @type {Surface & CanvasImageSource} */
    this.base = new OffscreenCanvas(1, 1);
    this.margin = { left: 64, right: 10, top: 4, bottom: 30 };
    const stepAt = (/** @type {PointerEvent} */ e) => {
      const box = canvas.getBoundingClientRect();
      const width = box.width - this.margin.left - this.margin.right;
      const x = (e.clientX - box.left - this.margin.left) / width;
      return Math.max(0, Math.min(this.steps - 1, Math.floor(x * this.steps)));
    };
    canvas.addEventListener("pointerdown", (e) => { canvas.setPointerCapture(e.pointerId); onScrub(stepAt(e)); });
    canvas.addEventListener("pointermove", (e) => { if (e.buttons & 1) onScrub(stepAt(e)); });
    canvas.addEventListener("pointerup", onRelease);
  }

  // diverged: the last step whose context is the reference's, null when all are
  /** @param {Track[]} tracks @param {number} steps @param {number | null} diverged */
  setTracks(tracks, steps, diverged) {
    this.tracks = tracks;
    this.steps = steps;
    this.diverged = diverged;
    this.key = null;
  }

  /** @param {number} step @param {number} width */
  x(step, width) {
    const { left, right } = this.margin;
    return left + ((step + 0.5) / this.steps) * (width - left - right);
  }

  /** @param {{ step: number }} view @param {number} width @param {number} height @param {Theme} theme */
  draw(view, width, height, theme) {
    const key = `${width}x${height}${theme.text}${theme.background}`;
    if (this.key !== key) {
      this.base = new OffscreenCanvas(1, 1);
      this.drawBase(context2d(this.base, width, height), width, height, theme);
      this.key = key;
    }
    const ctx = context2d(this.canvas, width, height);
    ctx.clearRect(0, 0, width, height);
    if (ctx.vector) this.drawBase(ctx, width, height, theme);
    else ctx.drawImage(this.base, 0, 0, width, height);
    const x = this.x(view.step, width);
    ctx.strokeStyle = VERMILION;
    ctx.lineWidth = 1.5;
    ctx.beginPath();
    this.tracks.forEach((_, i) => { // between the titles, which stay readable
      ctx.moveTo(x, this.rowTop(i, height) + 16);
      ctx.lineTo(x, this.rowTop(i, height) + this.rowHeight(height) - 4);
    });
    ctx.stroke();
    ctx.font = `600 11px ${theme.font}`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "right";
    this.tracks.forEach((track, i) => {
      const text = track.pending ? "" : formatValue(track.values[view.step], track.unit);
      ctx.fillStyle = theme.text;
      ctx.fillText(text, width - this.margin.right, this.rowTop(i, height) + 8);
    });
  }

  /** @param {number} height */
  rowHeight(height) {
    return (height - this.margin.top - this.margin.bottom) / this.tracks.length;
  }

  /** @param {number} i @param {number} height */
  rowTop(i, height) {
    return this.margin.top + i * this.rowHeight(height);
  }

  /** @param {Context} ctx @param {number} width @param {number} height @param {Theme} theme */
  drawBase(ctx, width, height, theme) {
    if (this.diverged != null) this.shade(ctx, width, height, theme);
    this.tracks.forEach((track, i) => this.drawTrack(ctx, track, this.rowTop(i, height), this.rowHeight(height), width, theme));
    ctx.font = `11px ${theme.font}`;
    ctx.fillStyle = theme.text;
    ctx.textBaseline = "top";
    const last = this.steps - 1;
    const stride = Math.max(1, Math.ceil(this.steps / 8));
    for (let step = 0; step <= last; step += stride) {
      ctx.textAlign = "center";
      ctx.fillText(String(step), this.x(step, width), height - this.margin.bottom + 3);
    }
    ctx.textAlign = "center";
    ctx.fillText("decode step", (width + this.margin.left) / 2, height - 13);
  }

  /** @param {Context} ctx @param {Track} track @param {number} top @param {number} rowHeight @param {number} width @param {Theme} theme */
  drawTrack(ctx, track, top, rowHeight, width, theme) {
    const [y0, y1] = [top + rowHeight - 6, top + (track.marks ? 24 : 18)]; // marks stand between title and curve
    const all = [...Array.from(track.values), ...Array.from(track.second ? track.second.values : [])].filter((v) => !Number.isNaN(v));
    if (track.line) all.push(track.line.value);
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    ctx.font = `600 11px ${theme.font}`;
    ctx.fillStyle = theme.text;
    ctx.fillText(track.title, this.margin.left, top + 8);
    ctx.font = `11px ${theme.font}`;
    if (all.length === 0) {
      ctx.fillText(track.pending ? "being loaded\u2026" : "not recorded", this.margin.left, (y0 + y1) / 2);
      return;
    }
    const lo = all.reduce((a, b) => Math.min(a, b), track.zero ? 0 : Infinity);
    let hi = all.reduce((a, b) => Math.max(a, b), track.zero ? 0 : -Infinity);
    if (hi === lo) hi = lo + 1;
    const y = (/** @type {number} */ value) => y0 + ((value - lo) / (hi - lo)) * (y1 - y0);
    ctx.textAlign = "right";
    const tidy = (/** @type {number} */ value) => axisText(Math.abs(value) < 1e-3 * (hi - lo) ? 0 : value, track.unit);
    ctx.fillText(tidy(hi), this.margin.left - 6, y1 + 2);
    ctx.fillText(tidy(lo), this.margin.left - 6, y0 - 2);
    ctx.fillStyle = theme.border;
    ctx.fillRect(this.margin.left, y0, width - this.margin.left - this.margin.right, 1);
    if (track.line) this.rule(ctx, y(track.line.value), width, theme);
    if (track.second) this.curve(ctx, track.second.values, y, width, "#E69F00", [3, 2]);
    if (track.dots) this.bars(ctx, track.values, y, y0, width, theme.accent);
    else this.curve(ctx, track.values, y, width, theme.accent, []);
    if (track.marks) this.mark(ctx, track.marks, y1, width);
  }

  /** Where contexts differ from the reference's. @param {Context} ctx @param {number} width @param {number} height @param {Theme} theme */
  shade(ctx, width, height, theme) {
    const from = this.x(this.diverged + 0.5, width);
    ctx.fillStyle = theme.panel;
    ctx.fillRect(from, this.margin.top, width - this.margin.right - from, height - this.margin.top - this.margin.bottom);
  }

  /** Triangles on top of a track. @param {Context} ctx @param {ArrayLike<number>} steps @param {number} y @param {number} width */
  mark(ctx, steps, y, width) {
    ctx.fillStyle = MARK;
    for (const step of Array.from(steps)) {
      const x = this.x(step, width);
      ctx.beginPath();
      ctx.moveTo(x - 4, y - 6);
      ctx.lineTo(x + 4, y - 6);
      ctx.lineTo(x, y + 1);
      ctx.fill();
    }
  }

  /** @param {Context} ctx @param {number} y @param {number} width @param {Theme} theme */
  rule(ctx, y, width, theme) {
    ctx.strokeStyle = theme.text;
    ctx.setLineDash([6, 4]);
    ctx.lineWidth = 1;
    ctx.beginPath();
    ctx.moveTo(this.margin.left, y);
    ctx.lineTo(width - this.margin.right, y);
    ctx.stroke();
    ctx.setLineDash([]);
  }

  /**
   * @param {Context} ctx @param {ArrayLike<number>} values @param {(value: number) => number} y @param {number} width
   * @param {string} color @param {number[]} dash
   */
  curve(ctx, values, y, width, color, dash) {
    ctx.strokeStyle = color;
    ctx.lineWidth = 1.5;
    ctx.setLineDash(dash);
    ctx.beginPath();
    let pen = false;
    for (let step = 0; step < values.length; step++) {
      if (Number.isNaN(values[step])) { pen = false; continue; } // a gap, not a zero
      const x = this.x(step, width);
      if (pen) ctx.lineTo(x, y(values[step]));
      else ctx.moveTo(x, y(values[step]));
      if (values.length === 1) ctx.lineTo(x + 1, y(values[step]));
      pen = true;
    }
    ctx.stroke();
    ctx.setLineDash([]);
  }

  /**
   * @param {Context} ctx @param {ArrayLike<number>} values @param {(value: number) => number} y @param {number} y0
   * @param {number} width @param {string} color
   */
  bars(ctx, values, y, y0, width, color) {
    const bar = Math.max(1, Math.min(12, (width / this.steps) * 0.7));
    ctx.fillStyle = color;
    for (let step = 0; step < values.length; step++) {
      if (!Number.isNaN(values[step])) ctx.fillRect(this.x(step, width) - bar / 2, y(values[step]), bar, y0 - y(values[step]));
    }
  }
}

/** @param {number} value @param {string} unit */
export function axisText(value, unit) {
  if (unit === "bytes") return formatBytes(value);
  return Math.abs(value) < 1e-6 ? "0" : String(Number(value.toPrecision(3)));
}
