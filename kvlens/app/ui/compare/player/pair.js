// Two runs, one selection (step, layer, head, metric). Moving is local; Python hears of it after a short pause.

import { decode, sharedRuns } from "../../../../player/web/codec.js";
import { HeadMap } from "../../../../player/web/heatmap.js";
import { SpanClock } from "../../../../player/web/spans.js";
import { PairTracks, PartedStrip, difference, pairTracks } from "./pairparts.js";
import { PairPicture } from "./pairpicture.js";

export class PairView extends PairPicture {
  constructor(root) {
    super(root);
    const strip = (box, generated) => new PartedStrip(box, generated, (pos) => this.pickToken(pos));
    this.strips = [strip(this.el.stripA, true), strip(this.el.stripB, true)];
    this.prompt = strip(this.el.stripP, false);
    ["A", "B"].forEach((name, i) => this.el.whose.add(new Option(name, String(i), false, i === 1)));
    this.el.whose.onchange = () => { this.showPrompt(); this.draw(); };
    const map = (canvas) => new HeadMap(canvas, (l, h) => this.pickHead(l, h), (cell) => this.hover(cell));
    this.maps = [this.el.mapA, this.el.mapB, this.el.mapD].map(map);
    this.tracks = new PairTracks(this.el.tracks, (step) => { this.pause(); this.go(step); }, () => this.commit(0));
    this.wireSteps({ part: () => this.part() }, [["surprisal", "surprisal"], ["mean", "mass, mean of all heads"]]);
    this.showPlay();
  }

  // ---- what Python sends -------------------------------------------------------------------------------------------

  receive(header, setStateValue) {
    this.setStateValue = setStateValue;
    this.header = header;
    this.attach();
  }

  // Takes the payloads when both are there; the store components may be mounted later than this one.
  attach() {
    const runs = [this.header.a, this.header.b].map((name) => sharedRuns().get(name));
    if (runs.some((run) => !run)) {
      this.el.context.textContent = "loading the traces\u2026";
      return;
    }
    const { header } = this;
    const moved = header.rev !== this.rev || !this.runs || runs.some((run, i) => run.header.uid !== this.runs[i].header.uid);
    if (!this.runs || runs.some((run, i) => run !== this.runs[i])) {
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

  // Whose spans and colours the prompt has; its text is the same in both.
  get whose() {
    return Number(this.el.whose.value);
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
    const ranges = this.metrics.filter((metric) => metric).map((metric) => metric.natural);
    this.about = first || second; // a metric that one run did not record is n/r there
    this.range = ranges.length ? [Math.min(...ranges.map((r) => r[0])), Math.max(...ranges.map((r) => r[1]))] : null;
    const tracks = pairTracks(a, b);
    if (this.range) {
      tracks.unshift({
        title: `${this.about.title}, ${this.headName()}: A (blue), B (orange, dashed)`, unit: this.about.unit, zero: this.about.zero,
        values: this.series(0), second: { values: this.series(1) },
      });
    }
    this.tracks.setTracks(tracks, this.steps, this.header.diverged);
    this.draw();
  }

  value(i, layer = this.layer, head = this.head, step = this.step) {
    const { layers, q_heads: heads } = this.runs[i].header;
    const codes = this.runs[i].arrays[`cube:${this.header.metric}`];
    if (!codes || layer >= layers || head >= heads || step >= this.runs[i].header.steps) return NaN;
    return decode(codes[(step * layers + layer) * heads + head], this.metrics[i].lo, this.metrics[i].hi);
  }

  series(i) {
    return Float64Array.from({ length: this.runs[i].header.steps }, (_, step) => this.value(i, this.layer, this.head, step));
  }

  headName(layer = this.layer, head = this.head) {
    const { q_heads: heads, kv_heads: kvHeads } = this.runs[0].header;
    return `L${layer} Q${head} (KV${Math.floor(head / (heads / kvHeads))})`;
  }

  // ---- moving --------------------------------------------------------------------------------------------------------

  get loaded() {
    return this.runs;
  }

  selection() {
    return { step: this.step, layer: this.layer, head: this.head };
  }

  part() {
    if (this.header.diverged === null) return;
    this.pause();
    this.go(this.header.diverged, 0);
  }

  // A generated token leads to the step that made it.
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
