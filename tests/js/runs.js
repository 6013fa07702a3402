// A made-up run of 6 prompt tokens and 4 steps, with 2 layers and 2 query heads over 1 KV head.

export const NO = 65535;
const code = (share) => Math.round(share * 65534);

export function madeRun() {
  const spans = [
    { id: 10, kind: "sink", start: 0, end: 2, born: -1, died: null },
    { id: 11, kind: "page", start: 2, end: 4, born: -1, died: 2 },
    { id: 12, kind: "window", start: 4, end: 6, born: -1, died: null },
    { id: 13, kind: "page", start: 4, end: 7, born: 2, died: null },
  ];
  const metric = { name: "regret", title: "Regret", unit: "share", level: "q", doc: "", diverging: false, loaded: true, zero: true, lo: 0, hi: 1, seen: [0, 1], natural: [0, 1] };
  return {
    header: {
      payload: "p", uid: "u", steps: 4, layers: 2, q_heads: 2, kv_heads: 1, prompt: 6, asked: 0, texts: [..."abcdefghij"], continued: [], spans,
      span_masses: true, needle: [[2, 3]], metrics: [metric], tracks: [], jumps: [], diverged: null, oracle: true, sampling: "", reference: true, sampled: [true, false, true, false], condition: "",
    },
    arrays: {
      surprisal: Float32Array.from([NaN, 1, 2, 5, 10, 20, 0, 0, 0, 0]), pos_of_step: Int32Array.from([6, 7, 8, 9]),
      mean_start: Int32Array.from([0, 2, 2, 2, 3]), mean_span: Int32Array.from([0, 1, 3]), mean_mass: Uint16Array.from([code(0.5), code(0.2), code(0.3)]),
      worst_start: Int32Array.from([0, 1, 1, 1, 1]), worst_span: Int32Array.from([1]), worst_hole: Uint16Array.from([code(0.4)]), worst_head: Int32Array.from([3]),
    },
  };
}

export function madeSlice() {
  return {
    header: { payload: "p", rev: 0, step: 0, layer: 0, head: 0, span: null, metric: "regret" },
    arrays: {
      change_step: Int32Array.from([-1, -1, -1, 1, 2]), change_span: Int32Array.from([0, 1, 2, 1, 3]), change_state: Uint8Array.from([0, 0, 0, 5, 4]),
      head_start: Int32Array.from([0, 1, 1, 1, 1]), head_span: Int32Array.from([0]), head_mass: Uint16Array.from([code(1)]),
      wanted_start: Int32Array.from([0, 2, 3, 3, 3]), wanted_span: Int32Array.from([0, 1, 1]), wanted_full: Uint16Array.from([code(0.6), code(0.4), code(0.5)]),
      wanted_mass: Uint16Array.from([code(0.6), 0, 0]), wanted_own: Uint16Array.from([code(0.5), code(0.1), code(0.5)]), wanted_hole: Uint16Array.from([code(0.001), code(0.4), code(0.5)]), wanted_regret: Uint16Array.from([code(0.001), code(0.4), code(0.5)]), wanted_tail: Float32Array.from([0, 0.1, NaN, 0]),
      lost_start: Int32Array.from([0, 1, 2, 2, 2]), lost_pos: Int32Array.from([3, 3]), lost_mass: Uint16Array.from([code(0.4), code(0.45)]),
    },
  };
}
