// @ts-check
// Drawing of the view of two runs and the words beside the pictures. PairView (pair.js) has what moves and what is picked.

import { decode, formatValue, visibleText } from "../../../../player/web/codec.js";
import { DIVERGING, SEQUENTIAL, readTheme } from "../../../../player/web/color.js";
import { HeadMap } from "../../../../player/web/heatmap.js";
import { ramp, textNode } from "../../../../player/web/nodes.js";
import { colorTokens } from "../../../../player/web/spans.js";
import { Stepper } from "../../../../player/web/stepper.js";
import { axisText } from "../../../../player/web/tracks.js";
import { PairTracks, PartedStrip } from "./pairparts.js";

/** @import { SpanClock } from "../../../../player/web/spans.js" */
/** @import { Cell, HeadView, Legend, Metric, Range, Run, StripView } from "../../../../player/web/types.js" */

/** @typedef {{ a: string, b: string, rev: number, step: number, layer: number, head: number, metric: string, diverged: number | null,
 *   maps: boolean, labels: [string, string] }} PairHeader */

export class PairPicture extends Stepper {
  /** @param {Document | ShadowRoot} root */
  constructor(root) {
    super(root);
    /** @type {Run[]} A and B; empty until both are there */
    this.runs = [];
    /** @type {SpanClock[]} */
    this.clocks = [];
    /** @type {Uint8Array[]} */
    this.colors = [];
    /** @type {(Metric | undefined)[]} */
    this.metrics = [];
    /** @type {Metric | undefined} the metric as one of the runs has it */
    this.about = undefined;
    /** @type {Range | null} the values at both ends of the colours */
    this.range = null;
    /** @type {Pick<HeadView, "run" | "metric" | "range"> | null} B - A */
    this.delta = null;
    /** @type {Legend} */
    this.legend = { table: SEQUENTIAL, note: "" };
    this.legendKey = "";
    this.header = /** @type {PairHeader} */ (/** @type {unknown} */ (null)); // set by receive()
    const strip = (/** @type {HTMLElement} */ box, /** @type {boolean} */ generated) => new PartedStrip(box, generated, (pos) => this.pickToken(pos));
    this.strips = [strip(this.el.stripA, true), strip(this.el.stripB, true)];
    this.prompt = strip(this.el.stripP, false);
    const map = (/** @type {HTMLCanvasElement} */ canvas) => new HeadMap(canvas, (l, h) => this.pickHead(l, h), (cell) => this.hover(cell));
    this.maps = [this.el.mapA, this.el.mapB, this.el.mapD].map(map);
    this.tracks = new PairTracks(this.el.tracks, (step) => { this.pause(); this.go(step); }, () => this.commit(0));
  }

  /** @param {number} _pos */
  pickToken(_pos) {}

  // Whose spans and colours the prompt has; its text is the same in both.
  get whose() {
    return Number(this.el.whose.value);
  }

  /** The metric of a run at a place, NaN: not recorded. @param {number} i */
  value(i, layer = this.layer, head = this.head, step = this.step) {
    const { layers, q_heads: heads } = this.runs[i].header;
    const codes = this.runs[i].arrays[`cube:${this.header.metric}`];
    const metric = this.metrics[i];
    if (!codes || !metric || layer >= layers || head >= heads || step >= this.runs[i].header.steps) return NaN;
    return decode(codes[(step * layers + layer) * heads + head], metric.lo, metric.hi);
  }

  headName(layer = this.layer, head = this.head) {
    const { q_heads: heads, kv_heads: kvHeads } = this.runs[0].header;
    return `L${layer} Q${head} (KV${Math.floor(head / (heads / kvHeads))})`;
  }

  draw() {
    if (!this.loaded || this.steps === 0) return;
    const { el } = this;
    const theme = readTheme(el.player);
    const width = el.player.clientWidth;
    if (width < 50) return;
    this.runs.forEach((run, i) => this.drawStrip(run, i));
    this.drawPrompt();
    const shown = this.range ? (this.delta ? 3 : 2) : 0;
    const maps = /** @type {HTMLElement} */ (el.player.querySelector(".pair-maps"));
    maps.hidden = shown === 0;
    maps.classList.toggle("two", shown === 2);
    if (el.mapD.parentElement) el.mapD.parentElement.hidden = shown < 3;
    const mapWidth = Math.floor((width - 12 * (shown - 1)) / Math.max(1, shown));
    const height = HeadMap.height(this.runs[0].header.layers);
    const { step, layer, head, range } = this;
    const views = range ? [0, 1].map((i) => ({ step, layer, head, run: this.runs[i], metric: this.metrics[i] || this.about, range })) : [];
    if (this.delta) views.push({ step, layer, head, ...this.delta });
    views.forEach((view, i) => this.maps[i].draw(view, mapWidth, height, theme));
    this.tracks.draw(this, width, this.tracks.tracks.length * 64 + 34, theme);
    this.words();
  }

  /** @param {Run} run @param {number} i */
  drawStrip(run, i) {
    const last = run.header.steps - 1;
    const step = Math.min(this.step, last);
    this.clocks[i].seek(step);
    const current = run.arrays.pos_of_step[step];
    this.legend = colorTokens(this.mode, run, this.clocks[i], step, this.colors[i]);
    this.strips[i].draw(this.stripView(i));
    const text = visibleText(run.header.texts[current]).replace(/\n/g, "");
    const token = this.step > last ? `ended at step ${last}` : `\u201c${text}\u201d, log p ${formatValue(run.arrays.logprob[step], "nats")}`;
    this.el[i === 0 ? "nowA" : "nowB"].textContent = `${i === 0 ? "A" : "B"} \u00b7 ${this.header.labels[i]}\nstep ${this.step}: ${token}`;
  }

  drawPrompt() {
    this.prompt.draw(this.stripView(this.whose));
  }

  /** @param {number} i @returns {StripView} */
  stripView(i) {
    const run = this.runs[i];
    const current = run.arrays.pos_of_step[Math.min(this.step, run.header.steps - 1)];
    return { clock: this.clocks[i], current, span: null, colors: this.colors[i], legend: this.legend, follow: true };
  }

  words() {
    const { el, step, header } = this;
    el.scrub.value = String(step);
    if (this.root.activeElement !== el.number) el.number.value = String(step);
    const apart = header.diverged !== null && step > header.diverged;
    el.context.textContent = apart ? `different contexts since step ${header.diverged}` : "the same context in both runs";
    el.difference.textContent = `B \u2212 A${apart ? " (different contexts)" : ""}`;
    el.player.dataset.step = String(step);
    el.player.dataset.cell = `${this.layer},${this.head}`;
    el.player.dataset.apart = String(apart);
    this.drawLegend();
    this.hover(null);
  }

  drawLegend() {
    const { legend } = this;
    const key = `${this.mode} ${this.header.metric} ${this.range} ${this.delta?.range}`;
    if (this.legendKey === key) return;
    this.legendKey = key;
    const marks = this.header.diverged === null ? [] : [
      textNode("", "mark here"), textNode("first divergence"), textNode("", "mark after"), textNode("different contexts"),
    ];
    this.el.legend.replaceChildren(textNode(legend.lo ?? ""), ramp(legend.table), textNode(legend.hi ?? ""), ...marks, textNode(`\u00b7 ${legend.note}`));
    const metric = this.about;
    if (!this.range || !metric) return;
    const end = (/** @type {number} */ value) => axisText(value, metric.unit);
    const unit = metric.unit === "bytes" ? "" : ` ${metric.unit}`;
    const parts = [textNode(`${metric.title} in A and B`), textNode(end(this.range[0])),
      ramp(metric.diverging ? DIVERGING : SEQUENTIAL), textNode(end(this.range[1]) + unit)];
    if (this.delta) {
      parts.push(textNode("\u00b7 B \u2212 A"), textNode(end(this.delta.range[0])), ramp(DIVERGING), textNode(`+${end(this.delta.range[1])}${unit}`),
        textNode("red: more in B, blue: less in B"));
    }
    const missing = textNode("", "swatch nr");
    this.el.scale.replaceChildren(...parts, missing, textNode("not recorded (n/r)"));
  }

  /** @param {Cell | null} cell */
  hover(cell) {
    if (!this.range || !this.about) {
      this.el.cell.textContent = "The runs recorded no figure per head.";
      return;
    }
    const [layer, head] = cell || [this.layer, this.head];
    const [one, two] = [0, 1].map((i) => this.value(i, layer, head));
    const unit = this.about.unit;
    const change = Number.isNaN(two - one) ? "" : ` \u00b7 ${two === one ? "the same" : `${formatValue(Math.abs(two - one), unit)} ${two > one ? "more" : "less"} in B`}`;
    this.el.cell.textContent = `${cell ? "under the pointer" : "selected"}: ${this.headName(layer, head)} \u00b7 ${this.about.title} at step ${this.step}: `
      + `A ${formatValue(one, unit)} \u00b7 B ${formatValue(two, unit)}${change}`;
  }
}
