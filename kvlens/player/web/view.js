// @ts-check
// The state of the player: what is selected, what is under the pointer, and the run and the head's slice that it shows.

import { SEQUENTIAL } from "./color.js";
import { Stepper } from "./stepper.js";

/** @import { SpanClock } from "./spans.js" */
/** @import { Cell, Color, Jump, Legend, MapPlace, Metric, Range, Run, Slice } from "./types.js" */

export class View extends Stepper {
  /** @param {Document | ShadowRoot} root */
  constructor(root) {
    super(root);
    this.follow = true;
    /** @type {number | null} id of the selected span */
    this.span = null;
    /** @type {string | null | undefined} */
    this.metricName = null;
    /** @type {Metric | undefined} */
    this.metric = undefined;
    /** @type {Range} the values at both ends of the colours */
    this.range = [0, 1];
    this.worst = false;
    this.touring = false; // the tour shows the map: all holes are drawn wide
    this.current = 0; // position of the step's token
    /** @type {number | null} position of the token under the pointer */
    this.hovered = null;
    /** @type {Cell | null} */
    this.hoveredCell = null;
    this.legendKey = this.scaleKey = this.mapKey = "";
    /** @type {Slice | null} the slice that the map's legend shows */
    this.mapSlice = null;
    // Set by attach(), before anything is drawn.
    this.run = /** @type {Run} */ (/** @type {unknown} */ (null));
    this.slice = /** @type {Slice} */ (/** @type {unknown} */ (null));
    this.clock = /** @type {SpanClock} */ (/** @type {unknown} */ (null));
    this.colors = new Uint8Array(0);
    /** @type {Legend} */
    this.legend = { table: SEQUENTIAL, note: "" };
    /** @type {Color} */
    this.ground = [255, 255, 255];
  }

  // ---- what the player does with a pick ---------------------------------------------------------------------------

  /** @param {number} _pos */
  pickToken(_pos) {}

  /** @param {MapPlace} _place */
  pickPlace(_place) {}

  /** @param {number} _span */
  pickWanted(_span) {}

  /** @param {Jump} _place */
  jump(_place) {}
}
