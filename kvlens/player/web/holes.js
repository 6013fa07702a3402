// @ts-check
// Holes: what full KV attended and the run did not.

import { decode } from "./codec.js";
import { STATE_WORDS } from "./color.js";

/** @import { SpanClock } from "./spans.js" */
/** @import { Hole, Run, Slice } from "./types.js" */
/** @typedef {{ run: Run, slice: Slice, clock: SpanClock, worst: boolean }} HoleView worst: of any head, else of the selected one */

export const HOLE_LEAST = 0.01; // share of full KV's attention below which nothing is called a hole
export const HOLE_FULL = 0.3; // from here on a hole is drawn in its whole colour
const PARTIAL = ["partly evicted", "partly recalled"].map((words) => STATE_WORDS.indexOf(words)), SUMMARY = STATE_WORDS.indexOf("summary only");

// What full KV attended at a step and the run did not. Of a span that is partly there,
// the tokens that were recorded as lost; of all heads, whole spans with the head that lost most.
/** @param {HoleView} view @param {number} step @returns {Hole[]} */
export function holesAt(view, step) {
  const { run, slice, worst, clock } = view;
  const { spans } = run.header;
  /** @type {Hole[]} */
  const holes = [];
  const source = worst ? run.arrays : slice.arrays;
  const name = worst ? "worst" : "wanted";
  const starts = source[`${name}_start`];
  for (let i = starts ? starts[step] : 0; starts && i < starts[step + 1]; i++) {
    const mass = decode(source[`${name}_hole`][i], 0, 1);
    const span = source[`${name}_span`][i];
    const partly = spans[span].kind === "window" || (!worst && PARTIAL.includes(clock.stateAt(span, step)));
    const place = { from: spans[span].start, to: spans[span].end, span, head: worst ? source.worst_head[i] : null };
    const summary = worst && Boolean(source.worst_summary?.[i]);
    if (mass >= HOLE_LEAST && !partly) holes.push({ ...place, mass, summary });
    else if (!worst && clock.stateAt(span, step) === SUMMARY) {
      const short = decode(source.wanted_regret[i], 0, 1); // what the summary did not get of the span's mass
      if (short >= HOLE_LEAST) holes.push({ ...place, mass: short, summary: true });
    }
  }
  const lost = worst ? null : slice.arrays.lost_start;
  for (let i = lost ? lost[step] : 0; lost && i < lost[step + 1]; i++) {
    const pos = slice.arrays.lost_pos[i];
    const mass = decode(slice.arrays.lost_mass[i], 0, 1);
    if (mass >= HOLE_LEAST && !holes.some((hole) => pos >= hole.from && pos < hole.to)) {
      holes.push({ from: pos, to: pos + 1, span: clock.spanAt(pos, step), mass, head: null, summary: false });
    }
  }
  return holes;
}

/** How strongly a hole is drawn, 0..1, for the share of full KV's attention in it. @param {number} mass */
export function holeStrength(mass) {
  return Math.min(1, 0.35 + (0.65 * mass) / HOLE_FULL);
}

/** Whether some hole is a loss to a summary. @param {HoleView} view @param {number} steps */
export function anySummaryHole(view, steps) {
  return Array.from({ length: steps }, (_, step) => holesAt(view, step)).some((holes) => holes.some((hole) => hole.summary));
}

/** Whether full attention was recorded at a step: in the selected layer, or in some. @param {HoleView} view @param {number} step */
export function sampledAt(view, step) {
  const { run, slice, worst } = view;
  if (worst) return Boolean(run.header.sampled[step]);
  return slice.arrays.wanted_tail !== undefined && !Number.isNaN(slice.arrays.wanted_tail[step]);
}
