// @ts-check
// What two runs need beyond the player's parts: a strip that shows where they part, curves with two values, the cube of B - A.

import { NOT_RECORDED, decode, formatValue } from "../../../../player/web/codec.js";
import { context2d } from "../../../../player/web/color.js";
import { TokenStrip } from "../../../../player/web/strip.js";
import { Tracks } from "../../../../player/web/tracks.js";

/** @import { Context, HeadView, Metric, Range, Run, Theme, Track } from "../../../../player/web/types.js" */

// A strip of the prompt alone, with a question that was fed after it, or of what was generated; tokens generated after the
// first divergence stand in another context than the other run's.
export class PartedStrip extends TokenStrip {
  /** @param {HTMLElement} box @param {boolean} generated @param {(pos: number) => void} onPick */
  constructor(box, generated, onPick) {
    super(box, onPick, () => {});
    this.generated = generated;
    /** @type {number | null} the step at which the runs part */
    this.parted = null;
  }

  /** @returns {Range} */
  get range() {
    return this.generated ? [this.answer, this.run.header.texts.length] : [0, this.answer];
  }

  /** @param {number | null} step */
  setParted(step) {
    this.parted = step;
    this.mark();
  }

  /** @param {number} start */
  build(start) {
    super.build(start);
    this.mark();
  }

  mark() {
    const parting = this.parted === null ? Infinity : this.run.arrays.pos_of_step[this.parted];
    this.cells.forEach((cell, i) => {
      const pos = this.start + i;
      if (pos === parting) cell.dataset.parted = "here";
      else if (pos > parting) cell.dataset.parted = "after";
      else delete cell.dataset.parted;
    });
  }
}

// Curves of A (blue, solid) and B (orange, dashed); the values of both stand at the right end.
export class PairTracks extends Tracks {
  // A recorded step between two that were not has no line to be part of.
  /**
   * @param {Context} ctx @param {ArrayLike<number>} values @param {(value: number) => number} y @param {number} width
   * @param {string} color @param {number[]} dash
   */
  curve(ctx, values, y, width, color, dash) {
    super.curve(ctx, values, y, width, color, dash);
    ctx.fillStyle = color;
    for (let step = 0; step < values.length; step++) {
      const alone = [step - 1, step + 1].every((near) => !(near in values) || Number.isNaN(values[near]));
      if (alone && !Number.isNaN(values[step])) ctx.fillRect(this.x(step, width) - 3, y(values[step]) - 3, 6, 6);
    }
  }

  /** @param {{ step: number }} view @param {number} width @param {number} height @param {Theme} theme */
  draw(view, width, height, theme) {
    super.draw(view, width, height, theme);
    const ctx = context2d(this.canvas, width, height);
    ctx.font = `600 11px ${theme.font}`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "right";
    ctx.fillStyle = theme.text;
    this.tracks.forEach((track, i) => {
      const own = formatValue(track.values[view.step], track.unit);
      const other = formatValue(track.second.values[view.step], track.unit);
      ctx.fillText(`B ${other} \u00b7 A `, width - this.margin.right - ctx.measureText(own).width, this.rowTop(i, height) + 8);
    });
  }
}

// B - A of one metric as a run of its own, coded over [-most, most]; null where the maps do not correspond.
/** @param {Run} a @param {Run} b @param {Metric} metricA @param {Metric} metricB @returns {Pick<HeadView, "run" | "metric" | "range"> | null} */
export function difference(a, b, metricA, metricB) {
  const [one, two] = [a.arrays[`cube:${metricA.name}`], b.arrays[`cube:${metricB.name}`]];
  if (!one || !two) return null;
  const { layers, q_heads: heads } = a.header;
  const size = Math.min(a.header.steps, b.header.steps) * layers * heads;
  const values = new Float32Array(size);
  let most = 0;
  for (let i = 0; i < size; i++) {
    values[i] = decode(two[i], metricB.lo, metricB.hi) - decode(one[i], metricA.lo, metricA.hi);
    if (Math.abs(values[i]) > most) most = Math.abs(values[i]);
  }
  most = most || 1;
  const codes = new Uint16Array(Math.max(one.length, two.length)).fill(NOT_RECORDED);
  for (let i = 0; i < size; i++) {
    if (!Number.isNaN(values[i])) codes[i] = Math.round(((values[i] + most) / (2 * most)) * 65534);
  }
  const metric = { ...metricA, lo: -most, hi: most, diverging: true };
  return { run: { header: a.header, arrays: { [`cube:${metricA.name}`]: codes } }, metric, range: [-most, most] };
}

/** @type {ArrayLike<number>} */
const NO_VALUES = [];

// The tracks of both runs under one name; what one of them did not record is empty there.
/** @param {Run} a @param {Run} b @returns {Track[]} */
export function pairTracks(a, b) {
  /** @type {Record<string, string>} */
  const plainTitles = { peak: "KV bytes on the device, peak in step", kl: "KL(full KV \u2016 run) of the next token" };
  const names = [...new Set([...a.header.tracks, ...b.header.tracks].map((track) => track.name))];
  return names.map((name) => {
    const track = [...a.header.tracks, ...b.header.tracks].find((t) => t.name === name);
    return {
      title: plainTitles[name] || track.title, unit: track.unit, zero: track.zero,
      values: a.arrays[`track:${name}`] || NO_VALUES, second: { values: b.arrays[`track:${name}`] || NO_VALUES },
    };
  });
}
