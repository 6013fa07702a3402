// @ts-check
// The grid of the cache map: which tokens and which steps are where, in CSS pixels. A range of tokens is looked at.

/** @import { Range } from "./types.js" */

const LEAST_ROW = 2; // px; where steps need less, several share a row
const LEAST_TOKENS = 16; // as few are looked at, at most
const SURROUNDINGS = 3; // times the selection: the range that is looked at when it is approached

export class MapGrid {
  constructor() {
    this.count = 0; // tokens
    this.steps = 0;
    this.width = 0;
    this.height = 0;
    this.margin = { left: 46, right: 10, top: 12, bottom: 30 };
    /** @type {Range} the tokens that are looked at, in fractions of tokens */
    this.range = [0, 0];
  }

  /** Shows all of `count` tokens. @param {number} count */
  reset(count) {
    this.count = count;
    this.range = [0, count];
  }

  // After another range: to be drawn anew.
  moved() {}

  /** @param {number} from @param {number} to */
  look(from, to) {
    const size = Math.min(this.count, Math.max(LEAST_TOKENS, to - from));
    const start = Math.max(0, Math.min(this.count - size, from));
    this.range = [start, start + size];
    this.moved();
  }

  /** @param {number} factor @param {number} [about] the token that stays in place */
  zoom(factor, about = (this.range[0] + this.range[1]) / 2) {
    const [from, to] = this.range;
    this.look(about - (about - from) * factor, about + (to - about) * factor);
  }

  /** Closer to tokens [from, to): at once so near that they fill a third, then by a factor. @param {number} from @param {number} to @param {number} factor */
  approach(from, to, factor) {
    const middle = (from + to) / 2, near = Math.max(LEAST_TOKENS, SURROUNDINGS * (to - from));
    const size = this.range[1] - this.range[0];
    const next = size > near ? near : size * factor;
    this.look(middle - next / 2, middle + next / 2);
  }

  /** @param {number} share */
  pan(share) {
    const [from, to] = this.range;
    this.look(from + share * (to - from), to + share * (to - from));
  }

  /** Brings a token into view. @param {number} pos */
  include(pos) {
    const [from, to] = this.range;
    if (pos < from || pos >= to) this.look(pos - (to - from) / 2, pos + (to - from) / 2);
  }

  get scale() {
    return (this.width - this.margin.left - this.margin.right) / (this.range[1] - this.range[0]);
  }

  /** @param {number} pos */
  x(pos) {
    return this.margin.left + (pos - this.range[0]) * this.scale;
  }

  /** Where tokens are drawn: left edge and width, about their middle where the width is the least one. @param {number} from @param {number} to @param {number} least @returns {[number, number]} */
  stretch(from, to, least) {
    const width = Math.max(least, this.x(to) - this.x(from));
    return [(this.x(from) + this.x(to) - width) / 2, width];
  }

  /** @param {number} x */
  position(x) {
    return this.range[0] + (x - this.margin.left) / this.scale;
  }

  // ---- rows of steps -----------------------------------------------------------------------------------------------

  get rows() {
    return Math.max(1, Math.min(this.steps, Math.floor((this.height - this.margin.top - this.margin.bottom) / LEAST_ROW)));
  }

  /** @param {number} row */
  top(row) {
    return this.margin.top + (row * (this.height - this.margin.top - this.margin.bottom)) / this.rows;
  }

  /** @param {number} step */
  rowOf(step) {
    return Math.floor((step * this.rows) / this.steps);
  }

  /** The steps of a row: [first, stop). @param {number} row */
  stepsOf(row) {
    return [Math.ceil((row * this.steps) / this.rows), Math.ceil(((row + 1) * this.steps) / this.rows)];
  }
}

/** 1, 2 or 5 times a power of ten, at least `least`. @param {number} least */
export function niceStride(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].map((n) => n * power).find((n) => n >= least);
}
