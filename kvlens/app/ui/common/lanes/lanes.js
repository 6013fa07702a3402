// @ts-check
// A race as it goes on: lanes side by side on one clock, drawn between the polls from frames that have come already.

import { SEQUENTIAL, VERMILION, gradient, readTheme } from "../../../../player/web/color.js";
import { textNode } from "../../../../player/web/nodes.js";
import { LaneView, mapOf } from "./lane.js";

/** @import { Frame, Lane, Look, RaceLine } from "./lane.js" */
/** @import { Theme } from "../../../../player/web/types.js" */

/** @typedef {{ id: string, lines: string[], first: number, looks: Look[], ended: boolean }} RaceData */
/** @typedef {{ race: HTMLElement, play: HTMLElement, scrub: HTMLInputElement, clock: HTMLElement, scales: HTMLElement, lanes: HTMLElement }} RaceNodes */

/** @type {WeakMap<ShadowRoot, Race>} */
const LIVE_RACES = new WeakMap();
const PLAYED = 8; // steps a second of a race that has ended
const BEHIND_S = 1.5; // how far the clock stays behind what has come, so that it never stands still between two polls
const DRAWN_MS = 40;

class Race {
  /** @param {ShadowRoot} root */
  constructor(root) {
    this.root = root;
    const nodes = [...root.querySelectorAll("[id]")].map((node) => [node.id, node]);
    this.el = /** @type {RaceNodes} */ (Object.fromEntries(nodes));
    this.el.play.addEventListener("click", () => this.toggle());
    this.el.scrub.addEventListener("input", () => { this.playing = false; this.at = Number(this.el.scrub.value) + 1; this.dirty = true; });
    /** @type {string | null} */
    this.id = null;
    this.lines = 0;
    /** @type {RaceLine | null} */
    this.race = null;
    /** @type {Lane[]} */
    this.lanes = [];
    /** @type {LaneView[]} */
    this.views = [];
    /** @type {Look[] | null} */
    this.looks = null;
    this.at = 0;
    this.playing = true;
    this.ended = false;
    this.raced = false;
    this.dirty = true;
    this.drawn = 0;
    this.last = 0;
    this.legendColor = "";
    /** @type {(name: string, line: number) => void} */
    this.ask = () => {};
    /** @type {(name: string, place: { lane: number, step: number }) => void} */
    this.open = () => {};
    /** @type {(() => void) | undefined} */
    this.stop = undefined;
    this.still = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.reset("");
  }

  /** @param {string} id */
  reset(id) {
    Object.assign(this, { id, lines: 0, race: null, lanes: [], views: [], at: 0, playing: true, ended: false, dirty: true, drawn: 0, last: 0, from: 0 });
    this.el.lanes.replaceChildren();
  }

  // Lines from number `first` on. What is missing before them is asked for.
  /**
   * @param {RaceData} data @param {(name: string, line: number) => void} ask
   * @param {(name: string, place: { lane: number, step: number }) => void} open
   */
  receive(data, ask, open) {
    if (data.id !== this.id) this.reset(data.id);
    Object.assign(this, { looks: data.looks, ask, open });
    if (data.first > this.lines) {
      ask("from", this.lines);
      return;
    }
    const fresh = this.race === null && data.ended;
    for (const line of data.lines.slice(this.lines - data.first)) this.read(JSON.parse(line));
    this.lines = Math.max(this.lines, data.first + data.lines.length);
    this.ended = data.ended;
    this.lanes.forEach((lane) => { lane.closed = data.ended; }); // a page that still asks cannot be left
    if (fresh) Object.assign(this, { at: this.longest(), playing: false }); // one that was over before it is looked at
    this.dirty = true;
  }

  /** @param {any} line parsed from what the job reports */
  read(line) {
    if (line.phase === "race") {
      const race = /** @type {RaceLine} */ (line);
      this.race = race;
      this.lanes = race.lanes.map((lane, number) => /** @type {Lane} */ ({ ...lane, number, state: "waiting", message: null, uid: null, right: null, lost: null, ended: false, compared: false, frames: [], maps: [], moved: [] }));
      this.views = this.lanes.map((lane) => new LaneView(lane.number, () => this.opened(lane)));
      this.el.lanes.replaceChildren(...this.views.map((view) => view.root));
      this.el.race.dataset.lanes = String(this.lanes.length);
    } else if (line.phase === "lane") {
      const { state, message, uid, right } = line;
      Object.assign(this.lanes[line.lane], { state, message, uid, right, note: line.note, ended: !["waiting", "prefill", "place", "running"].includes(state) });
    } else if (line.phase === "frame") {
      const lane = this.lanes[line.lane];
      if (line.agrees === false && lane.lost === null) lane.lost = line.step;
      if (line.agrees !== null) lane.compared = true;
      lane.frames.push(line);
      lane.moved.push((lane.moved.at(-1) || 0) + line.moved);
    } else if (line.phase === "maps") {
      this.lanes[line.lane].maps[line.step] = ({ read: mapOf(line.read), missed: mapOf(line.missed) });
    }
  }

  // The lanes beside full KV; the only lane of a run that is not compared with full KV.
  methods() {
    return this.lanes.length > 1 ? this.lanes.slice(1) : this.lanes;
  }

  longest() {
    return Math.max(0, ...this.lanes.map((lane) => lane.frames.length));
  }

  // Steps that every lane still going has reached. While full KV runs alone the others wait.
  come() {
    const methods = this.methods();
    if (!methods.some((lane) => lane.frames.length)) return this.lanes.length ? this.lanes[0].frames.length : 0;
    const going = methods.filter((lane) => !lane.ended);
    return going.length ? Math.min(...going.map((lane) => lane.frames.length)) : this.longest();
  }

  /** @param {number} now */
  tick(now) {
    if (!this.race || !this.looks) return;
    const past = Math.min(0.2, (now - this.last) / 1000);
    if (now - this.last < DRAWN_MS) return;
    this.last = now;
    const racing = this.methods().some((lane) => lane.frames.length > 0);
    if (racing && !this.raced && !this.ended) this.at = 0; // and they are off
    this.raced = racing;
    if (this.playing) this.advance(past);
    if (this.dirty) this.draw();
  }

  /** @param {number} past seconds */
  advance(past) {
    const come = this.come();
    const speed = this.over() ? PLAYED : Math.min(30, Math.max(0.2, (come - this.at) / BEHIND_S));
    const next = Math.min(come, this.at + speed * past);
    if (next !== this.at) this.dirty = true;
    this.at = Math.max(Math.min(this.at, this.longest()), next);
    if (this.over() && this.at >= this.longest()) this.playing = false;
  }

  over() {
    return this.ended || (this.lanes.length > 0 && this.lanes.every((lane) => lane.ended));
  }

  toggle() {
    this.playing = !this.playing;
    if (this.playing && this.at >= this.longest()) this.at = 0;
    this.dirty = true;
  }

  draw() {
    this.dirty = false;
    const { el, race } = this;
    const { looks } = this;
    if (!race || !looks || el.race.clientWidth < 50) return;
    const theme = readTheme(el.race);
    const at = this.still ? Math.floor(this.at) : this.at;
    const most = (/** @type {(frame: Frame) => number | null} */ figure) =>
      Math.max(0, ...this.lanes.map((lane) => lane.frames.reduce((top, frame) => Math.max(top, figure(frame) ?? 0), 0)));
    const scales = { kl: most((f) => f.kl), moved: most((f) => f.moved), steps: this.over() ? this.longest() : race.steps };
    this.views.forEach((view, i) => view.draw(this.lanes[i], looks[i], race, at, scales, theme));
    const step = Math.max(0, Math.min(Math.floor(at), this.longest()) - 1);
    el.scrub.max = String(Math.max(0, this.longest() - 1));
    el.scrub.value = String(step);
    el.play.textContent = this.playing ? "Pause" : "Play";
    el.clock.textContent = `step ${step} of at most ${race.steps}`;
    this.legend(theme);
    this.drawn += 1;
    Object.assign(el.race.dataset, { race: race.id, step: String(step), drawn: String(this.drawn), lanes: String(this.lanes.length), over: this.over() ? "yes" : "no" });
  }

  /** @param {Theme} theme */
  legend(theme) {
    if (this.legendColor === theme.panel) return;
    this.legendColor = theme.panel;
    /** @type {(title: string, low: string, image: string, high: string) => HTMLElement} */
    const scale = (title, low, image, high) => {
      const node = textNode("", "scale");
      const bar = textNode("", "ramp");
      bar.style.backgroundImage = image;
      node.append(textNode(`${title}: ${low}`), bar, textNode(high));
      return node;
    };
    this.el.scales.replaceChildren(
      scale("upper map, tokens attended", "none", gradient(SEQUENTIAL), "all"),
      scale("lower map, full KV\u2019s attention not read exactly", "none", `linear-gradient(to right, ${theme.panel}, ${VERMILION})`, "all"),
      textNode("layers across, KV heads down"),
    );
  }

  /** @param {Lane} lane */
  opened(lane) {
    if (!lane.closed || lane.uid === null || !lane.frames.length) return;
    const step = lane.lost ?? Math.max(0, Math.min(Math.floor(this.at), lane.frames.length) - 1);
    this.open("open", { lane: lane.number, step });
  }
}

/** @param {{ data: RaceData, parentElement: ShadowRoot, setStateValue: (name: string, value: any) => void,
 *   setTriggerValue: (name: string, value: any) => void }} component */
export default function ({ data, parentElement: root, setStateValue, setTriggerValue }) {
  let race = LIVE_RACES.get(root);
  if (!race || race.el.lanes !== root.querySelector("#lanes")) {
    race = new Race(root);
    LIVE_RACES.set(root, race);
  }
  race.receive(data, setStateValue, setTriggerValue);
  race.stop?.();
  race.stop = animate(race);
  return () => race.stop?.();
}

/** Draws while the page is there; returns what ends it. @param {Race} race */
function animate(race) {
  let frame = 0;
  const tick = (/** @type {number} */ now) => {
    race.tick(now);
    frame = requestAnimationFrame(tick);
  };
  frame = requestAnimationFrame(tick);
  const redraw = () => { race.dirty = true; };
  const sizes = new ResizeObserver(redraw);
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  sizes.observe(race.el.race);
  scheme.addEventListener("change", redraw);
  return () => {
    cancelAnimationFrame(frame);
    sizes.disconnect();
    scheme.removeEventListener("change", redraw);
  };
}
