// The player: one selection (step, layer, head, span, metric), drawn by the strip, the minimap, the head map and the tracks.
// Moving is local; Python hears of it after a short pause (commit) and answers with a slice for the selected head.

const RATES = [5, 10, 20, 30, 60];
const COMMIT_MS = 220;
const KEYS = [
  ["\u2190 \u2192", "one step"], ["Shift + \u2190 \u2192", "ten steps"], ["Home, End", "first, last step"], ["Space", "play, pause"],
  ["N P", "next, previous: lost steps, worst regret, corrections"], ["Shift + N P", "next, previous recall"],
  ["[ ]", "layer up, down"], ["Esc", "clear the selected span"], ["?", "these keys"],
];

class Player {
  constructor(root) {
    this.root = root;
    this.el = {};
    for (const node of root.querySelectorAll("[id]")) this.el[node.id] = node;
    this.playing = false;
    this.frames = 0;
    this.follow = true;
    this.mode = "surprisal";
    this.strip = new TokenStrip(this.el.strip, (pos) => this.pickToken(pos), (pos) => this.hoverToken(pos));
    this.minimap = new Minimap(this.el.mini, (pos) => { this.setFollow(false); this.strip.goTo(pos); this.draw(); });
    this.heads = new HeadMap(this.el.heads, (l, h) => this.pickHead(l, h), (cell) => this.hoverHead(cell));
    this.tracks = new Tracks(this.el.tracks, (step) => { this.pause(); this.go(step); }, () => this.commit(0));
    this.jumps = new Jumps(this.el.jumps, (place) => this.jump(place));
    this.wire();
    this.showPlay();
  }

  wire() {
    const { el } = this;
    const act = {
      first: () => this.go(0), last: () => this.go(this.steps - 1), back: () => this.go(this.step - 1), forward: () => this.go(this.step + 1),
      play: () => this.toggle(), help: () => this.toggleHelp(),
    };
    for (const button of this.root.querySelectorAll("[data-act]")) button.onclick = () => act[button.dataset.act]();
    RATES.forEach((rate) => el.rate.add(new Option(String(rate), String(rate), false, rate === 20)));
    [["surprisal", "surprisal"], ["mean", "mass, mean of all heads"], ["head", "mass, selected head"], ["state", "state"]]
      .forEach(([value, text]) => el.mode.add(new Option(text, value)));
    el.rate.onchange = () => this.restartClock();
    el.mode.onchange = () => { this.mode = el.mode.value; this.draw(); };
    el.metric.onchange = () => { this.metricName = el.metric.value; this.refresh(); this.commit(0); };
    el.fit.onchange = () => this.draw();
    el.follow.onchange = () => { this.follow = el.follow.checked; this.draw(); };
    el.strip.addEventListener("wheel", () => this.setFollow(false), { passive: true });
    el.scrub.oninput = () => { this.pause(); this.go(Number(el.scrub.value)); };
    el.number.onchange = () => this.go(Math.round(Number(el.number.value)) || 0);
    el.player.onkeydown = (e) => this.key(e);
    KEYS.forEach(([key, what]) => {
      const list = el.help.firstChild || el.help.appendChild(document.createElement("dl"));
      list.appendChild(document.createElement("dt")).textContent = key;
      list.appendChild(document.createElement("dd")).textContent = what;
    });
  }

  // ---- what Python sends -------------------------------------------------------------------------------------------

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
      this.steps = run.header.steps;
      this.clock = new SpanClock(run);
      this.colors = new Uint8Array(run.header.texts.length);
      if (fresh) this.strip.setRun(run);
      else this.strip.run = run;
      this.el.metric.replaceChildren(...run.header.metrics.map((m) => new Option(`${m.title} (${m.unit})`, m.name)));
      this.el.scrub.max = this.el.number.max = String(Math.max(0, this.steps - 1));
      this.el.of.textContent = `/ ${this.steps - 1}`;
      this.jumps.setRun(run.header);
      if (fresh) this.rev = null;
    }
    this.clock.setSlice(this.slice);
    if (header.rev !== this.rev) {
      this.rev = header.rev;
      Object.assign(this, { step: header.step, layer: header.layer, head: header.head, span: header.span, metricName: header.metric });
      if (this.span !== null) this.showSpan();
    }
    this.refresh();
  }

  // ---- moving --------------------------------------------------------------------------------------------------------

  go(step, delay = COMMIT_MS) {
    if (!this.run) return;
    this.step = Math.max(0, Math.min(this.steps - 1, step));
    if (this.playing) this.restartClock();
    this.draw();
    if (!this.playing) this.commit(delay);
  }

  // To a place of Jumps: its head and span are selected with it.
  jump(place) {
    this.pause();
    for (const name of ["step", "layer", "head", "span"]) this[name] = place[name] ?? this[name];
    this.refresh();
    if (place.span !== null) this.showSpan();
    this.commit(0);
  }

  commit(delay = COMMIT_MS) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      const { step, layer, head, span, metricName: metric } = this;
      this.setStateValue("selection", { step, layer, head, span, metric });
    }, delay);
  }

  toggle() {
    if (this.playing) return this.pause();
    if (this.step >= this.steps - 1) this.step = 0;
    this.playing = true;
    this.setFollow(true);
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
      this.frames++;
      this.draw();
      if (wanted === this.steps - 1) return this.pause();
    }
    requestAnimationFrame((next) => this.tick(next));
  }

  showPlay() {
    this.el.play.textContent = this.playing ? "Pause" : "Play";
    this.el.player.dataset.playing = String(this.playing);
  }

  setFollow(on) {
    this.follow = on;
    this.el.follow.checked = on;
  }

  key(event) {
    const from = event.composedPath()[0];
    const typing = from.tagName === "SELECT" || (from.tagName === "INPUT" && from.type === "number");
    if (!this.run || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const by = event.shiftKey ? 10 : 1;
    const act = {
      ArrowLeft: () => { this.pause(); this.go(this.step - by); }, ArrowRight: () => { this.pause(); this.go(this.step + by); },
      Home: () => { this.pause(); this.go(0); }, End: () => { this.pause(); this.go(this.steps - 1); },
      n: () => this.jumps.move(1, event.shiftKey), p: () => this.jumps.move(-1, event.shiftKey),
      "[": () => this.pickHead(Math.max(0, this.layer - 1), this.head),
      "]": () => this.pickHead(Math.min(this.run.header.layers - 1, this.layer + 1), this.head),
      Escape: () => (this.el.help.hidden ? this.pickSpan(null) : this.toggleHelp()), "?": () => this.toggleHelp(),
      " ": from.tagName === "BUTTON" ? null : () => this.toggle(),
    }[event.key.length === 1 ? event.key.toLowerCase() : event.key]; // Caps Lock does not matter
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }

  toggleHelp() {
    this.el.help.hidden = !this.el.help.hidden;
  }

  // ---- picking -------------------------------------------------------------------------------------------------------

  pickHead(layer, head) {
    if (layer === this.layer && head === this.head) return;
    Object.assign(this, { layer, head });
    this.refresh();
    this.commit();
  }

  pickToken(pos) {
    const index = this.clock.spanOf[pos];
    const id = index < 0 ? null : this.run.header.spans[index].id;
    this.pickSpan(id === this.span ? null : id);
  }

  pickSpan(id) {
    this.span = id;
    this.refresh();
    this.commit();
  }

  // Brings a span chosen outside the player into view.
  showSpan() {
    const span = this.run.header.spans.find((s) => s.id === this.span);
    if (!span) return;
    this.setFollow(false);
    this.strip.goTo(Math.min(span.start, this.run.header.texts.length - 1));
  }
}
