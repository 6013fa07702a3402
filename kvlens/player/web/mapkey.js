// @ts-check
// The key above the cache map: whose cache it is, the states that occur, and how much of full KV's attention a hole stands for.

import { GREY, HOLE } from "./color.js";
import { HOLE_FULL, HOLE_LEAST, anySummaryHole, holeStrength, sampledAt } from "./holes.js";
import { fade, hatched, pair, swatch, textNode } from "./nodes.js";
import { massName } from "./wanted.js";

/** @import { Picture } from "./picture.js" */

/** Writes the key anew where it changed. @param {Picture} view */
export function writeMapKey(view) {
  if (!view.run.header.spans.length) return;
  const { header, arrays } = view.slice;
  const { q_heads: heads, kv_heads: kvHeads } = view.run.header;
  const key = `${header.layer} ${header.head} ${header.rev} ${view.worst} ${view.ground} ${view.mode}`;
  if (view.mapKey === key && view.mapSlice === view.slice) return;
  Object.assign(view, { mapKey: key, mapSlice: view.slice });
  view.el.mapTitle.textContent = `cache map, L${header.layer} KV${Math.floor(header.head / (heads / kvHeads))}`;
  const known = view.worst ? view.run.arrays.worst_start : arrays.wanted_start;
  const parts = view.mode === "state" ? [] : view.seenStates().map((code) => view.stateWord(code)); // else the strip's key has them
  view.el.mapLegend.replaceChildren(...parts, ...(known ? holeKey(view) : [textNode("\u00b7 holes not recorded")]));
}

/** The red of holes, its scale, and what else the map marks. @param {Picture} view */
function holeKey(view) {
  const [least, full] = [`${100 * HOLE_LEAST} %`, `\u2265 ${100 * HOLE_FULL} %`];
  const whose = view.run.header.reference ? "full KV's mass" : "own-query mass";
  const scale = pair(textNode(`hole, ${least}`), fade(HOLE, holeStrength(HOLE_LEAST), 1), textNode(`${full} of ${whose}`));
  scale.title = `What full KV attended and the run did not: share of ${massName(view)}`;
  const parts = [scale];
  const steps = Array.from({ length: view.steps }, (_, step) => step);
  if (anySummaryHole(view, view.steps)) parts.push(pair(hatched(`rgb(${HOLE})`), textNode("lost to its summary")));
  if (!steps.every((step) => sampledAt(view, step))) parts.push(pair(swatch(`rgb(${GREY})`), textNode("edge: full attention not recorded at this step")));
  return parts;
}
