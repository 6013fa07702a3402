// @ts-check
// What is true at one step: which span each token belongs to, the mass and the state of each span.

import { decode } from "./codec.js";
import { SEQUENTIAL, STATES, STATE_WORDS } from "./color.js";

/** @import { Arrays, Legend, Run, Slice, Span } from "./types.js" */

export class SpanClock {
  /** @param {Run} run */
  constructor(run) {
    this.run = run;
    this.count = run.header.texts.length;
    this.spanOf = new Int32Array(this.count).fill(-1); // token position -> index into header.spans, -1: none
    /** @type {Uint8Array | null} span index -> code of STATE_WORDS, 255: not recorded */
    this.states = null;
    /** @type {Slice | null} */
    this.slice = null;
    /** @type {[number, number][][] | null} span index -> its changes of state: [step, code of STATE_WORDS], in order */
    this.changes = null;
    /** @type {Record<string, Float32Array>} mean, head: span index -> mass, NaN: not listed */
    this.masses = {};
  }

  /** @param {Slice} slice */
  setSlice(slice) {
    this.slice = slice;
    this.changes = null;
    const { change_step: steps, change_span: spans, change_state: states } = slice.arrays;
    if (!steps) return;
    const changes = Array.from(this.run.header.spans, () => /** @type {[number, number][]} */ ([]));
    for (let i = 0; i < steps.length; i++) changes[spans[i]].push([steps[i], states[i]]);
    this.changes = changes;
  }

  /** The state of a span while a step attended, as a code of STATE_WORDS; 255: not recorded. @param {number} span @param {number} step */
  stateAt(span, step) {
    let code = 255;
    for (const [at, state] of this.changes ? this.changes[span] : []) {
      if (at > step) break;
      code = state;
    }
    return code;
  }

  /** The index of the span that a token belongs to at a step, -1: none. @param {number} pos @param {number} step */
  spanAt(pos, step) {
    const { spans } = this.run.header;
    const alive = (/** @type {Span} */ span) => span.born <= step && (span.died === null || span.died > step);
    const index = spans.findIndex((span) => span.kind !== "window" && alive(span) && pos >= span.start && pos < span.end);
    if (index >= 0 || pos >= this.written(step)) return index;
    return spans.findIndex((span) => span.kind === "window" && alive(span) && pos >= span.start);
  }

  /** Positions written when this step's query attends: the prompt and all tokens generated before. @param {number} step */
  written(step) {
    return Math.min(this.count, this.run.header.prompt + step);
  }

  /** @param {number} step */
  seek(step) {
    const { spans } = this.run.header;
    const written = this.written(step);
    this.spanOf.fill(-1);
    // The window is what no other living span covers, so it goes first and the others are laid over it.
    for (const windowFirst of [true, false]) {
      spans.forEach((span, index) => {
        if ((span.kind === "window") !== windowFirst) return;
        if (span.born > step || (span.died !== null && span.died <= step)) return;
        if (windowFirst) this.spanOf.fill(index, Math.min(span.start, written), written);
        else this.spanOf.fill(index, span.start, Math.min(span.end, this.count));
      });
    }
    this.seekStates(step);
    this.seekMasses(step);
  }

  /** @param {number} step */
  seekStates(step) {
    this.states = this.changes && Uint8Array.from(this.run.header.spans, (_, span) => this.stateAt(span, step));
  }

  /** @param {number} span */
  state(span) {
    const code = this.states === null ? 255 : this.states[span];
    return code === 255 ? null : STATE_WORDS[code];
  }

  /** Masses of this step: NaN where a span is not listed. Lists hold the strongest spans of each head only. @param {number} step */
  seekMasses(step) {
    const count = this.run.header.spans.length;
    this.masses = {
      mean: sparseRow(this.run.arrays, "mean", step, count),
      head: sparseRow(this.slice ? this.slice.arrays : {}, "head", step, count),
    };
  }

  /** @param {"mean" | "head"} kind @param {number} span */
  mass(kind, span) {
    return span < 0 ? NaN : this.masses[kind][span];
  }

  /** Tokens of a span that are written at this step. @param {number} span @param {number} step */
  length(span, step) {
    const { start, end, kind } = this.run.header.spans[span];
    if (kind !== "window") return end - start;
    let n = 0;
    for (const value of this.spanOf.subarray(start, this.written(step))) n += value === span ? 1 : 0;
    return n;
  }
}

// One step of a table of (step, span, mass) stored as row starts, span indexes and codes.
/** @param {Arrays} arrays @param {string} name @param {number} step @param {number} count */
function sparseRow(arrays, name, step, count) {
  const row = new Float32Array(count).fill(NaN);
  const starts = arrays[`${name}_start`];
  if (!starts) return row;
  for (let i = starts[step]; i < starts[step + 1]; i++) row[arrays[`${name}_span`][i]] = decode(arrays[`${name}_mass`][i], 0, 1);
  return row;
}

const MASS_TOP = 0.1; // share per token; likewise, MASS_DECADES powers of ten below it the range begins
const MASS_DECADES = 4;
const SURPRISAL_TOP = 10; // nats; the colour range ends here, the legend says so

// Colour entry per token, 255: not recorded. Returns the colour table and what the legend says.
/** @param {string} mode @param {Run} run @param {SpanClock} clock @param {number} step @param {Uint8Array} out @returns {Legend} */
export function colorTokens(mode, run, clock, step, out) {
  if (mode === "surprisal") {
    const { surprisal } = run.arrays;
    for (let i = 0; i < out.length; i++) {
      const value = surprisal[i];
      out[i] = Number.isNaN(value) ? 255 : Math.min(254, Math.max(0, Math.round((value / SURPRISAL_TOP) * 254)));
    }
    return { table: SEQUENTIAL, lo: "0", hi: `\u2265 ${SURPRISAL_TOP} nats`, note: `surprisal${Number.isNaN(surprisal[1]) ? ", of the prompt not recorded" : ""}; generated tokens: \u2212log p under this method` };
  }
  if (mode === "state") {
    for (let i = 0; i < out.length; i++) {
      const span = clock.spanOf[i];
      out[i] = span < 0 || clock.states === null ? 255 : clock.states[span];
    }
    return { table: STATES, states: true, note: "" };
  }
  const kind = mode === "head" ? "head" : "mean";
  const perSpan = new Int16Array(run.header.spans.length).fill(-1);
  for (let i = 0; i < out.length; i++) {
    const span = clock.spanOf[i];
    if (span < 0) out[i] = 255;
    else {
      if (perSpan[span] < 0) {
        const density = clock.mass(kind, span) / Math.max(1, clock.length(span, step));
        perSpan[span] = Number.isNaN(density) ? 255 : massEntry(density);
      }
      out[i] = perSpan[span];
    }
  }
  const who = mode === "head" ? "of the selected head" : "mean over all query heads";
  const least = (MASS_TOP / 10 ** MASS_DECADES).toFixed(5);
  const note = `attention mass of the span spread over its tokens (logarithmic), ${who}`;
  return { table: SEQUENTIAL, lo: `\u2264 ${least}`, hi: `\u2265 ${MASS_TOP} per token`, note, missing: "not listed or not recorded" };
}

/** @param {number} density */
function massEntry(density) {
  const place = 1 + Math.log10(Math.max(density, 1e-12) / MASS_TOP) / MASS_DECADES;
  return Math.max(0, Math.min(254, Math.round(place * 254)));
}
