// @ts-check
// The player: one selection (step, layer, head, span, metric), drawn by the strip, the cache map, the head map, the
// bars of what full KV wanted and the tracks.
// Moving is local; Python hears of it after a short pause (commit) and answers with a slice for the selected head.

import { sharedRuns } from "./codec.js";
import { Picture } from "./picture.js";
import { SpanClock } from "./spans.js";

/** @import { Commit, Jump, MapPlace, Slice } from "./types.js" */

/** @type {[string, string][]} */
const KEYS = [
  ["\u2190 \u2192", "one step"], ["Shift + \u2190 \u2192", "ten steps"], ["Home, End", "first, last step"], ["Space", "play, pause"],
  ["N P", "next, previous: lost steps, worst regret, corrections"], ["Shift + N P", "next, previous recall"],
  ["[ ]", "layer up, down"], ["W", "cache map closer to the selected span"], ["S", "cache map farther (or Ctrl + wheel)"], ["A D", "cache map left, right (or drag)"], ["Esc", "clear the selected span"], ["?", "these keys"],
];

export class Player extends Picture {
  /** @param {Document | ShadowRoot} root */
  constructor(root) {
    super(root);
    this.mode = null; // the first run decides: states where they were recorded
    /** @type {number | null} of the last move by Python */
    this.rev = null;
    /** @type {(() => void) | undefined} */
    this.stopListening = undefined;
    this.wire();
    this.showPlay();
  }

  wire() {
    const { el } = this;
    this.wireSteps({ help: () => this.toggleHelp() }, [
      ["state", "state"], ["surprisal", "surprisal"], ["mean", "mass, mean of all heads"], ["head", "mass, selected head"],
    ]);
    el.metric.onchange = () => { this.metricName = el.metric.value; this.refresh(); this.commit(0); };
    el.fit.onchange = () => this.draw();
    el.worst.append(new Option("selected head", ""), new Option("any head", "worst"));
    el.worst.onchange = () => this.draw();
    el.follow.onchange = () => { this.follow = el.follow.checked; this.draw(); };
    el.strip.addEventListener("wheel", () => this.setFollow(false), { passive: true });
    KEYS.forEach(([key, what]) => {
      const list = el.help.firstChild || el.help.appendChild(document.createElement("dl"));
      list.appendChild(document.createElement("dt")).textContent = key;
      list.appendChild(document.createElement("dd")).textContent = what;
    });
  }

  // ---- what Python sends -------------------------------------------------------------------------------------------

  /** @param {Slice} slice @param {Commit} setStateValue */
  receive(slice, setStateValue) {
    this.setStateValue = setStateValue;
    this.slice = slice;
    this.attach();
  }

  // Takes the run's payload when it is there; the store component may be mounted later than this one.
  attach() {
    const { header } = this.slice;
    const run = sharedRuns().get(header.payload);
    if (!run) {
      this.el.now.textContent = "loading the trace\u2026";
      return;
    }
    if (run !== this.run) {
      const fresh = !this.run || this.run.header.uid !== run.header.uid;
      this.run = run;
      this.setSteps(run.header.steps);
      this.clock = new SpanClock(run);
      this.colors = new Uint8Array(run.header.texts.length);
      if (fresh) this.strip.setRun(run);
      else this.strip.run = run;
      if (fresh) this.map.setRun(run);
      this.el.metric.replaceChildren(...run.header.metrics.map((m) => new Option(`${m.title} (${m.unit})`, m.name)));
      this.jumps.setRun(run.header, run.arrays.corrections);
      if (fresh) this.rev = null;
    }
    this.clock.setSlice(this.slice);
    if (this.mode === null) this.mode = this.el.mode.value = this.clock.changes?.some((changes) => changes.length) ? "state" : "surprisal";
    if (header.rev !== this.rev) {
      this.rev = header.rev;
      Object.assign(this, { step: header.step, layer: header.layer, head: header.head, span: header.span, metricName: header.metric });
      if (this.span !== null) this.showSpan();
    }
    this.refresh();
  }

  // ---- moving --------------------------------------------------------------------------------------------------------

  get loaded() {
    return this.run !== null;
  }

  selection() {
    const { step, layer, head, span, metricName: metric } = this;
    return { step, layer, head, span, metric };
  }

  /** To a place of Jumps: its head and span are selected with it. @param {Jump} place */
  jump(place) {
    this.pause();
    const { layer, head, span } = this;
    Object.assign(this, { step: place.step, layer: place.layer ?? layer, head: place.head ?? head, span: place.span ?? span });
    this.refresh();
    if (place.span !== null) this.showSpan();
    this.commit(0);
  }

  toggle() {
    if (!this.playing) this.setFollow(true);
    super.toggle();
  }

  /** @param {boolean} on */
  setFollow(on) {
    this.follow = on;
    this.el.follow.checked = on;
  }

  /** @param {KeyboardEvent} event @returns {Record<string, () => void>} */
  ownKeys(event) {
    return {
      n: () => this.jumps.move(1, event.shiftKey), p: () => this.jumps.move(-1, event.shiftKey),
      "[": () => this.pickHead(Math.max(0, this.layer - 1), this.head),
      "]": () => this.pickHead(Math.min(this.run.header.layers - 1, this.layer + 1), this.head),
      w: () => this.approach(), s: () => this.map.zoom(1.5), a: () => this.map.pan(-0.2), d: () => this.map.pan(0.2),
      Escape: () => (this.el.help.hidden ? this.pickSpan(null) : this.toggleHelp()), "?": () => this.toggleHelp(),
    };
  }

  // The cache map closer to the selected span; to its own middle where none is selected.
  approach() {
    const span = this.run.header.spans.find((s) => s.id === this.span && s.kind !== "window");
    if (span) this.map.approach(span.start, span.end, 1 / 1.5);
    else this.map.zoom(1 / 1.5);
  }

  /** @param {boolean} on */
  setTour(on) {
    if (on === this.touring) return;
    this.touring = on;
    this.draw();
  }

  toggleHelp() {
    this.el.help.hidden = !this.el.help.hidden;
  }

  // ---- picking -------------------------------------------------------------------------------------------------------

  /** @param {number} pos */
  pickToken(pos) {
    const index = this.clock.spanOf[pos];
    const id = index < 0 ? null : this.run.header.spans[index].id;
    this.pickSpan(id === this.span ? null : id);
  }

  /** A span of the bars; a second click lets it go. @param {number} span */
  pickWanted(span) {
    this.pickSpan(span === this.span ? null : span);
    this.showSpan();
  }

  /** @param {number | null} id */
  pickSpan(id) {
    this.span = id;
    this.refresh();
    this.commit();
  }

  /** A place of the cache map: its step and span, and of a hole of any head the head that lost most. @param {MapPlace} place */
  pickPlace({ pos, step, hole }) {
    this.pause();
    const index = hole && hole.span >= 0 ? hole.span : this.clock.spanAt(pos, step);
    Object.assign(this, { step, span: index < 0 ? null : this.run.header.spans[index].id });
    if (hole && hole.head !== null) {
      const { q_heads: heads } = this.run.header;
      Object.assign(this, { layer: Math.floor(hole.head / heads), head: hole.head % heads });
    }
    this.setFollow(false);
    this.refresh();
    this.strip.goTo(pos);
    this.draw();
    this.commit(0);
  }

  // Brings a span chosen outside the player into view.
  showSpan() {
    const span = this.run.header.spans.find((s) => s.id === this.span);
    if (!span) return;
    this.setFollow(false);
    const pos = Math.min(span.start, this.run.header.texts.length - 1);
    this.strip.goTo(pos);
    this.map.include(pos);
  }
}
