// @ts-check
// One lane: a method's title, what it has said so far, two maps of layers by KV heads, its KL and the bytes it moved.

import { formatBytes, visibleText } from "../../../../player/web/codec.js";
import { GREY, SEQUENTIAL, VERMILION, context2d, rgb } from "../../../../player/web/color.js";
import { textNode } from "../../../../player/web/nodes.js";

/** @import { Color, Context, Theme } from "../../../../player/web/types.js" */

const LOSS = [213, 94, 0];
const TRACK = 30; // px, of KL and of bytes
const GAP = 4;
/** @type {Record<string, string>} */
const BEFORE = { waiting: "waits for full KV", prefill: "reading the prompt", place: "placing the prompt", running: "ready" };
const FEW = 2; // lanes: a single run and full KV beside it, whose maps are drawn larger
/** @type {Maps} */
const NO_MAPS = { read: null, missed: null };

/**
 * What a job reports: the race, then of each lane states, frames and maps.
 * @typedef {{ id: string, lanes: LaneHeader[], layers: number, kv_heads: number, steps: number, asked: number, full_kv_bytes: number }} RaceLine
 * @typedef {{ title: string, preset: string | null, differs?: string }} LaneHeader
 * @typedef {{ step: number, text: string, kl: number | null, resident: number, moved: number, agrees: boolean | null }} Frame
 * @typedef {{ read: Uint8Array | null, missed: Uint8Array | null }} Maps
 * @typedef {LaneHeader & { number: number, state: string, message: string | null, note?: string | null, uid: string | null,
 *   right: boolean | null, lost: number | null, ended: boolean, compared: boolean, closed?: boolean, frames: Frame[], maps: Maps[], moved: number[] }} Lane
 * @typedef {{ title: string, color: string, character: string }} Look
 * @typedef {{ kl: number, moved: number, steps: number }} Scales most nats, most bytes of a step, steps
 */

/** A map of a frame: bytes by layer, then KV head; null where it was not recorded. @param {string | null} text */
export function mapOf(text) {
  return text === null ? null : Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
}

/**
 * A step's KL in words, or why there is none; "" where the run was not compared or has not lost.
 * @param {number | null} kl nats @param {number} step @param {number | null} lost the step of loss
 */
export function klWords(kl, step, lost) {
  if (kl !== null) return `KL ${kl.toPrecision(3)} nats`;
  if (lost === null || step < lost) return "";
  return step > lost ? "after the loss, KL not compared" : "lost, KL not recorded";
}

export class LaneView {
  /** @param {number} number @param {() => void} onOpen */
  constructor(number, onOpen) {
    this.root = document.createElement("div");
    this.root.className = "lane";
    this.root.dataset.lane = String(number);
    this.key = "";
    /** @type {<Name extends "div" | "span" | "canvas">(kind: Name, name: string, parent?: HTMLElement) => HTMLElementTagNameMap[Name]} */
    const part = (kind, name, parent = this.root) => {
      const node = document.createElement(kind);
      node.className = name;
      parent.append(node);
      return node;
    };
    const head = part("div", "head");
    this.el = {
      mark: part("span", "mark", head), title: part("span", "title", head), badge: part("span", "badge", head),
      state: part("span", "state", head), text: part("div", "text"), canvas: part("canvas", "maps"),
      numbers: part("div", "numbers"), note: part("div", "note"),
    };
    this.el.canvas.setAttribute("role", "img");
    this.root.addEventListener("click", onOpen);
    this.root.addEventListener("keydown", (event) => { if (event.key === "Enter") onOpen(); });
  }

  /**
   * at: how many steps are shown, with a fraction of the next one.
   * @param {Lane} lane @param {Look} look @param {RaceLine} race @param {number} at @param {Scales} scales @param {Theme} theme
   */
  draw(lane, look, race, at, scales, theme) {
    const shown = Math.min(Math.floor(at), lane.frames.length);
    const lost = lane.lost !== null && lane.lost < shown;
    this.words(lane, look, race, shown, lost);
    const width = this.root.clientWidth - 22;
    const drawn = lane.frames.length > 0 && width > 40;
    this.el.canvas.hidden = !drawn;
    if (drawn) this.picture(lane, race, Math.min(at, lane.frames.length), width, scales, theme);
  }

  /** @param {Lane} lane @param {Look} look @param {RaceLine} race @param {number} shown @param {boolean} lost */
  words(lane, look, race, shown, lost) {
    const { el, root } = this;
    const over = lane.ended && shown >= lane.frames.length;
    root.dataset.lost = lost ? "yes" : "no";
    root.dataset.step = String(shown - 1);
    root.dataset.state = lane.state;
    const open = lane.closed && lane.uid !== null && lane.frames.length > 0;
    root.dataset.open = open ? "yes" : "no";
    root.tabIndex = open ? 0 : -1;
    root.title = open ? "Open in Replay at this step" : "";
    el.mark.textContent = look.character;
    el.mark.style.color = look.color;
    el.title.textContent = [look.title, lane.preset ? `(${lane.preset})` : "", lane.differs || ""].filter(Boolean).join(" ");
    const judged = over && lane.right !== null;
    el.badge.hidden = !judged;
    el.badge.className = `badge ${lane.right ? "right" : "wrong"}`;
    el.badge.textContent = lane.right ? "right answer" : "wrong answer";
    el.state.textContent = lost ? `left full KV at step ${lane.lost}` : over && lane.compared ? "as full KV" : lane.frames.length ? `step ${Math.max(0, shown - 1)}` : BEFORE[lane.state] || lane.state;
    const message = lane.frames.length ? null : lane.message;
    el.text.classList.toggle("said", message !== null);
    const key = `${shown} ${lane.message} ${over}`;
    if (this.key !== key) {
      this.key = key;
      el.text.replaceChildren(...(message !== null ? [textNode(message)] : this.output(lane, race, shown)));
      el.text.scrollTop = el.text.scrollHeight;
    }
    el.note.textContent = lane.note || "";
    el.note.title = lane.note || "";
    el.note.hidden = !lane.note;
    const frame = lane.frames[shown - 1];
    if (!frame) {
      el.numbers.textContent = "";
      return;
    }
    const kl = klWords(frame.kl, shown - 1, lane.lost);
    el.numbers.textContent = `${kl && `${kl} \u00b7 `}${formatBytes(frame.resident)} on the device (${Math.round((100 * frame.resident) / race.full_kv_bytes)} %)`
      + ` \u00b7 ${formatBytes(frame.moved)} moved, ${formatBytes(lane.moved[shown - 1])} in all`;
  }

  // The tokens so far: up to the loss, the one that parted, those after it.
  /** @param {Lane} lane @param {RaceLine} race @param {number} shown */
  output(lane, race, shown) {
    const pieces = lane.frames.slice(race.asked, shown).map((frame) => frame.text);
    const parted = lane.lost === null ? Infinity : lane.lost - race.asked;
    const whole = (/** @type {number} */ from, /** @type {number} */ to) => visibleText(pieces.slice(from, to).join("").replace(/\ufffd+/g, "\ufffd"));
    const nodes = parted > 0 && pieces.length ? [textNode(whole(0, Math.min(parted, pieces.length)))] : [];
    if (parted < pieces.length) nodes.push(textNode(whole(parted, parted + 1), "parted"));
    if (parted + 1 < pieces.length) nodes.push(textNode(whole(parted + 1, pieces.length), "after"));
    return nodes;
  }

  /** @param {Lane} lane @param {RaceLine} race @param {number} at @param {number} width @param {Scales} scales @param {Theme} theme */
  picture(lane, race, at, width, scales, theme) {
    const rows = race.kv_heads;
    const [most, room] = race.lanes.length > FEW ? [11, 48] : [22, 132];
    const cell = Math.max(3, Math.min(most, Math.floor(room / rows)));
    const high = rows * cell;
    const ctx = context2d(this.el.canvas, width, 2 * (high + GAP) + TRACK);
    ctx.clearRect(0, 0, width, 2 * (high + GAP) + TRACK);
    const step = Math.max(1, at);
    const [now, share] = [Math.floor(step) - 1, step - Math.floor(step)];
    let measured = now; // some steps behind while the lane goes on
    while (measured > 0 && !lane.maps[measured]) measured -= 1;
    const [here, next] = [lane.maps[measured] || NO_MAPS, lane.maps[measured + 1] || lane.maps[measured] || NO_MAPS];
    const ground = rgb(theme.panel);
    const place = { share: measured < now ? 0 : share, race, width, cell };
    this.map(ctx, here.read, next.read, { ...place, top: 0, color: (v) => SEQUENTIAL.subarray(v * 3, v * 3 + 3) });
    this.map(ctx, here.missed, next.missed, { ...place, top: high + GAP, color: (v) => blend(ground, LOSS, Math.sqrt(v / 254)) });
    const half = (width - 6) / 2;
    const box = { top: 2 * (high + GAP), width: half, steps: scales.steps, at: step };
    this.track(ctx, lane.frames, (f) => f.kl, { ...box, left: 0, most: scales.kl, name: "KL", lost: lane.lost }, theme);
    this.track(ctx, lane.frames, (f) => f.moved, { ...box, left: half + 6, most: scales.moved, name: "bytes moved", lost: null }, theme);
  }

  // A map at a place between two steps: layers across, KV heads down.
  /**
   * @param {Context} ctx @param {Uint8Array | null} now @param {Uint8Array | null} later
   * @param {{ share: number, race: RaceLine, width: number, cell: number, top: number,
   *   color: (value: number) => ArrayLike<number> & Iterable<number> }} place
   */
  map(ctx, now, later, { share, race, width, cell, top, color }) {
    const wide = width / race.layers;
    for (let layer = 0; layer < race.layers; layer++) {
      for (let head = 0; head < race.kv_heads; head++) {
        const i = layer * race.kv_heads + head;
        const known = now !== null && now[i] !== 255;
        const value = !known ? 255 : later === null || later[i] === 255 ? now[i] : Math.round(now[i] + share * (later[i] - now[i]));
        const [r, g, b] = value === 255 ? GREY : color(value);
        ctx.fillStyle = `rgb(${r},${g},${b})`;
        ctx.fillRect(layer * wide, top + head * cell, wide - 1, cell - 1);
      }
    }
  }

  // Bars of one figure by step, on the scale that all lanes share.
  /**
   * @param {Context} ctx @param {Frame[]} frames @param {(frame: Frame) => number | null} figure
   * @param {{ left: number, top: number, width: number, steps: number, at: number, most: number, name: string, lost: number | null }} box
   * @param {Theme} theme
   */
  track(ctx, frames, figure, { left, top, width, steps, at, most, name, lost }, theme) {
    const wide = width / steps;
    ctx.fillStyle = theme.panel;
    ctx.fillRect(left, top, width, TRACK);
    for (let step = 0; step < Math.min(Math.ceil(at), frames.length); step++) {
      const value = figure(frames[step]);
      if (value === null || most <= 0) continue;
      const grown = Math.min(1, at - step); // the newest one rises
      const high = Math.max(value > 0 ? 1 : 0, TRACK * Math.sqrt(Math.min(1, value / most)) * grown);
      ctx.fillStyle = lost !== null && step >= lost ? VERMILION : theme.accent;
      ctx.fillRect(left + step * wide, top + TRACK - high, Math.max(1, wide - 1), high);
    }
    if (lost !== null && lost < at) {
      ctx.fillStyle = VERMILION;
      ctx.fillRect(left + lost * wide, top, 2, TRACK);
    }
    ctx.fillStyle = theme.text;
    ctx.font = `11px ${theme.font}`;
    ctx.textBaseline = "top";
    ctx.textAlign = "right";
    ctx.lineWidth = 3;
    ctx.strokeStyle = theme.panel;
    ctx.strokeText(name, left + width - 3, top + 3);
    ctx.globalAlpha = 0.75;
    ctx.fillText(name, left + width - 3, top + 3);
    ctx.globalAlpha = 1;
  }
}

/** @param {Color} from @param {Color} to @param {number} share */
function blend(from, to, share) {
  return from.map((value, c) => Math.round(value + (to[c] - value) * share));
}
