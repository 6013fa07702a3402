// @ts-check
// Two runs, one selection (step, layer, head, metric). Moving is local; Python hears of it after a short pause.

import { sharedRuns } from "../../../../player/web/codec.js";
import { SpanClock } from "../../../../player/web/spans.js";
import { difference, pairTracks } from "./pairparts.js";
import { PairPicture } from "./pairpicture.js";

/** @import { PairHeader } from "./pairpicture.js" */
/** @import { Commit, Range } from "../../../../player/web/types.js" */

export class PairView extends PairPicture {
  /** @param {Document | ShadowRoot} root */
  constructor(root) {
    super(root);
    /** @type {number | null} of the last move by Python */
    this.rev = null;
    /** @type {(() => void) | undefined} */
    this.stopListening = undefined;
    ["A", "B"].forEach((name, i) => this.el.whose.add(new Option(name, String(i), false, i === 1)));
    this.el.whose.onchange = () => { this.showPrompt(); this.draw(); };
    this.wireSteps({ part: () => this.part() }, [["surprisal", "surprisal"], ["mean", "mass, mean of all heads"]]);
    this.showPlay();
  }

  // ---- what Python sends -------------------------------------------------------------------------------------------

  /** @param {PairHeader} header @param {Commit} setStateValue */
  receive(header, setStateValue) {
    this.setStateValue = setStateValue;
    this.header = header;
    this.attach();
  }

  // Takes the payloads when both are there; the store components may be mounted later than this one.
  attach() {
    const [a, b] = [this.header.a, this.header.b].map((name) => sharedRuns().get(name));
    if (!a || !b) {
      this.el.context.textContent = "loading the traces\u2026";
      return;
    }
    const runs = [a, b];
    const { header } = this;
    const moved = header.rev !== this.rev || runs.some((run, i) => run.header.uid !== this.runs[i]?.header.uid);
    if (runs.some((run, i) => run !== this.runs[i])) {
      this.runs = runs;
      this.setSteps(Math.max(...runs.map((run) => run.header.steps)));
      this.clocks = runs.map((run) => new SpanClock(run));
      this.colors = runs.map((run) => new Uint8Array(run.header.texts.length));
      this.strips.forEach((strip, i) => strip.setRun(runs[i]));
      this.showPrompt();
      const [needle] = runs[0].header.needle;
      if (needle) this.prompt.goTo(needle[0]);
    }
    if (moved) {
      this.rev = header.rev;
      Object.assign(this, { step: header.step, layer: header.layer, head: header.head });
    }
    this.strips.forEach((strip) => strip.setParted(header.diverged));
    this.el.part.hidden = header.diverged === null;
    this.refresh();
  }

  showPrompt() {
    this.prompt.setRun(this.runs[this.whose]);
  }

  // After a change that is more than a step: other runs, other metric, other head.
  refresh() {
    const [a, b] = this.runs;
    this.metrics = this.runs.map((run) => run.header.metrics.find((m) => m.name === this.header.metric));
    const [first, second] = this.metrics;
    this.delta = this.header.maps && first && second ? difference(a, b, first, second) : null;
    const ranges = this.metrics.flatMap((metric) => (metric ? [metric.natural] : []));
    this.about = first || second; // a metric that one run did not record is n/r there
    /** @type {Range | null} */
    const range = ranges.length ? [Math.min(...ranges.map((r) => r[0])), Math.max(...ranges.map((r) => r[1]))] : null;
    this.range = range;
    const tracks = pairTracks(a, b);
    if (this.range && this.about) {
      tracks.unshift({
        title: `${this.about.title}, ${this.headName()}: A (blue), B (orange, dashed)`, unit: this.about.unit, zero: this.about.zero,
        values: this.series(0), second: { values: this.series(1) },
      });
    }
    this.tracks.setTracks(tracks, this.steps, this.header.diverged);
    this.draw();
  }

  /** @param {number} i */
  series(i) {
    return Float64Array.from({ length: this.runs[i].header.steps }, (_, step) => this.value(i, this.layer, this.head, step));
  }

  // ---- moving --------------------------------------------------------------------------------------------------------

  get loaded() {
    return this.runs.length > 0;
  }

  part() {
    if (this.header.diverged === null) return;
    this.pause();
    this.go(this.header.diverged, 0);
  }

  /** A generated token leads to the step that made it. @param {number} pos */
  pickToken(pos) {
    const step = pos - this.runs[0].header.prompt;
    if (step < 0) return;
    this.pause();
    this.go(step);
  }

  ownKeys() {
    return { d: () => this.part() };
  }
}
