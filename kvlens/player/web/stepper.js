// Moving through the steps of a run, alone (player.js) or beside another (app/ui/compare/player/pair.js): buttons, keys, the clock of playing.
// Whoever extends it has draw(), refresh(), selection(), ownKeys() and `loaded`, and sets `steps`, `step`, `layer`, `head`.

const RATES = [5, 10, 20, 30, 60];
const COMMIT_MS = 220;

export class Stepper {
  constructor(root) {
    this.root = root;
    root.addEventListener("redraw", () => this.draw()); // for a picture to keep
    this.el = {};
    for (const node of root.querySelectorAll("[id]")) this.el[node.id] = node;
    this.playing = false;
    this.frames = 0;
    this.mode = "surprisal";
  }

  // `own`: what further buttons do, by name; `modes`: [value, text] of the strip's colours.
  wireSteps(own, modes) {
    const { el } = this;
    const act = {
      first: () => this.go(0), last: () => this.go(this.steps - 1), back: () => this.go(this.step - 1), forward: () => this.go(this.step + 1),
      play: () => this.toggle(), ...own,
    };
    for (const button of this.root.querySelectorAll("[data-act]")) button.onclick = () => act[button.dataset.act]();
    RATES.forEach((rate) => el.rate.add(new Option(String(rate), String(rate), false, rate === 20)));
    modes.forEach(([value, text]) => el.mode.add(new Option(text, value)));
    el.rate.onchange = () => this.restartClock();
    el.mode.onchange = () => { this.mode = el.mode.value; this.draw(); };
    el.scrub.oninput = () => { this.pause(); this.go(Number(el.scrub.value)); };
    el.number.onchange = () => this.go(Math.round(Number(el.number.value)) || 0);
    el.player.onkeydown = (e) => this.key(e);
  }

  setSteps(steps) {
    this.steps = steps;
    this.el.scrub.max = this.el.number.max = String(Math.max(0, steps - 1));
    this.el.of.textContent = `/ ${steps - 1}`;
  }

  go(step, delay = COMMIT_MS) {
    if (!this.loaded) return;
    this.step = Math.max(0, Math.min(this.steps - 1, step));
    if (this.playing) this.restartClock();
    this.draw();
    if (!this.playing) this.commit(delay);
  }

  commit(delay = COMMIT_MS) {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.setStateValue("selection", this.selection()), delay);
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

  pickHead(layer, head) {
    if (layer === this.layer && head === this.head) return;
    Object.assign(this, { layer, head });
    this.refresh();
    this.commit();
  }

  key(event) {
    const from = event.composedPath()[0];
    const typing = from.tagName === "SELECT" || (from.tagName === "INPUT" && from.type === "number");
    if (!this.loaded || typing || event.ctrlKey || event.metaKey || event.altKey) return;
    const by = event.shiftKey ? 10 : 1;
    const act = {
      ArrowLeft: () => { this.pause(); this.go(this.step - by); }, ArrowRight: () => { this.pause(); this.go(this.step + by); },
      Home: () => { this.pause(); this.go(0); }, End: () => { this.pause(); this.go(this.steps - 1); },
      " ": from.tagName === "BUTTON" ? null : () => this.toggle(), ...this.ownKeys(event),
    }[event.key.length === 1 ? event.key.toLowerCase() : event.key]; // Caps Lock does not matter
    if (!act) return;
    event.preventDefault();
    event.stopPropagation();
    act();
  }
}
