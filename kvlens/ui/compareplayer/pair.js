// Two runs, one selection (step, layer, head, metric). Moving is local; Python hears of it after a short pause.

const RATES = [5, 10, 20, 30, 60];
const COMMIT_MS = 220;
const LIVE_PAIRS = new WeakMap();

class PairView {
  constructor(root) {
    this.root = root;
    this.el = {};
    for (const node of root.querySelectorAll("[id]")) this.el[node.id] = node;
    this.playing = false;
    this.mode = "surprisal";
    this.strips = [this.el.stripA, this.el.stripB].map((box) => new PartedStrip(box, (pos) => this.pickToken(pos), () => {}));
    const map = (canvas) => new HeadMap(canvas, (l, h) => this.pickHead(l, h), (cell) => this.hover(cell));
    this.maps = [this.el.mapA, this.el.mapB, this.el.mapD].map(map);
    this.tracks = new PairTracks(this.el.tracks, (step) => { this.pause(); this.go(step); }, () => this.commit(0));
    this.wire();
    this.showPlay();
  }

  wire() {
    const { el } = this;
    const act = {
      first: () => this.go(0), last: () => this.go(this.steps - 1), back: () => this.go(this.step - 1), forward: () => this.go(this.step + 1),
      play: () => this.toggle(), part: () => this.part(),
    };
    for (const button of this.root.querySelectorAll("[data-act]")) button.onclick = () => act[button.dataset.act]();
    RATES.forEach((rate) => el.rate.add(new Option(String(rate), String(rate), false, rate === 20)));
    [["surprisal", "surprisal"], ["mean", "mass, mean of all heads"]].forEach(([value, text]) => el.mode.add(new Option(text, value)));
    el.rate.onchange = () => this.restartClock();
    el.mode.onchange = () => { this.mode = el.mode.value; this.draw(); };
    el.scrub.oninput = () => { this.pause(); this.go(Number(el.scrub.value)); };
    el.number.onchange = () => this.go(Math.round(Number(el.number.value)) || 0);
    el.player.onkeydown = (e) => this.key(e);
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
      this.steps = Math.max(...runs.map((run) => run.header.steps));
      this.clocks = runs.map((run) => new SpanClock(run));
      this.colors = runs.map((run) => new Uint8Array(run.header.texts.length));
      this.strips.forEach((strip, i) => strip.setRun(runs[i]));
      this.el.scrub.max = this.el.number.max = String(Math.max(0, this.steps - 1));
      this.el.of.textContent = `/ ${this.steps - 1}`;
    }
    if (moved) {
      this.rev = header.rev;
      Object.assign(this, { step: header.step, layer: header.layer, head: header.head });
    }
    this.strips.forEach((strip) => strip.setParted(header.diverged));
    this.el.part.hidden = header.diverged === null;
    this.refresh();
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

  go(step, delay = COMMIT_MS) {
    if (!this.runs) return;
    this.step = Math.max(0, Math.min(this.steps - 1, step));
    if (this.playing) this.restartClock();
    this.draw();
    if (!this.playing) this.commit(delay);
  }

  part() {
    if (this.header.diverged === null) return;
    this.pause();
    this.go(this.header.diverged, 0);
  }

  commit(delay = COMMIT_MS) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.setStateValue("selection", { step: this.step, layer: this.layer, head: this.head }), delay);
  }

  toggle() {
    if (this.playing) return this.pause();
    if (this.step >= this.steps - 1) this.step = 0;
    this.playing = true;
    this.restartClock();
    this.showPlay();
    requestAnimationFrame((now) => this.tick(now));
  }

  pause() {
    if (!this.playing) return;
    this.playing = false;
    this.showPlay();
    this.draw();
    this.commit(0);
  }

  restartClock() {
    this.startTime = performance.now();
    this.startStep = this.step;
  }

  tick(now) {
    if (!this.playing) return;
    const wanted = Math.min(this.steps - 1, this.startStep + Math.floor(((now - this.startTime) / 1000) * Number(this.el.rate.value)));
    if (wanted > this.step) {
      this.step = wanted;
      this.draw();
      if (wanted === this.steps - 1) return this.pause();
    }
    requestAnimationFrame((next) => this.tick(next));
  }

  showPlay() {
    this.el.play.textContent = this.playing ? "Pause" : "Play";
    this.el.player.dataset.playing = String(this.playing);
  }

  pickHead(layer, head) {
    if (layer === this.layer && head === this.head) return;
    Object.assign(this, { layer, head });
    this.refresh();
    this.commit();
  }

  // A generated token leads to the step that made it.
  pickToken(pos) {
    const step = pos - this.runs[0].header.prompt;
    if (step < 0) return;
    this.pause();
    this.go(step);
  }

  key(event) {
    const from = event.composedPath()[0];
    const typing = from.tagName === "SELECT" || (from.tagName === "INPUT" && from.type === "number");
    if (!this.runs || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const by = event.shiftKey ? 10 : 1;
    const act = {
      ArrowLeft: () => { this.pause(); this.go(this.step - by); }, ArrowRight: () => { this.pause(); this.go(this.step + by); },
      Home: () => { this.pause(); this.go(0); }, End: () => { this.pause(); this.go(this.steps - 1); }, d: () => this.part(),
      " ": from.tagName === "BUTTON" ? null : () => this.toggle(),
    }[event.key];
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }
}
