// The shapes that the player's modules hand each other, for `// @ts-check`. Nothing here is shipped.

export type Numbers = Uint8Array | Uint16Array | Int32Array | Float32Array | Float64Array;
export type Arrays = Record<string, Numbers>;
/** [start, end) */
export type Range = [number, number];
/** red, green, blue, 0..255 */
export type Color = number[];
/** 256 colours, three numbers each; entry 255 means 'not recorded' */
export type ColorTable = Uint8ClampedArray;

export interface Message<Header> {
  header: Header;
  arrays: Arrays;
}

/** What does not depend on the selection: kvlens/player/payload.py, run_payload. */
export type Run = Message<RunHeader>;
/** What belongs to the selected query head: kvlens/player/payload.py, slice_payload. */
export type Slice = Message<SliceHeader>;

export interface RunHeader {
  payload: string;
  uid: string;
  steps: number;
  layers: number;
  q_heads: number;
  kv_heads: number;
  /** tokens of the prompt */
  prompt: number;
  /** steps that feed the question */
  asked: number;
  texts: string[];
  continued: number[];
  spans: Span[];
  span_masses: boolean;
  needle: Range[];
  metrics: Metric[];
  tracks: TrackHeader[];
  jumps: Jump[];
  diverged: number | null;
  oracle: boolean;
  reference: boolean;
  sampling: string;
  sampled: boolean[];
  /** model, prompt, question, budget and n, in one line */
  condition: string;
}

export interface SliceHeader extends Selection {
  payload: string;
  rev: number;
}

export interface Selection {
  step: number;
  layer: number;
  head: number;
  span?: number | null;
  metric?: string | null;
}

export interface Span {
  id: number;
  kind: string;
  start: number;
  end: number;
  born: number;
  died: number | null;
}

export interface Metric {
  name: string;
  title: string;
  unit: string;
  /** q or kv */
  level: string;
  doc: string;
  diverging: boolean;
  loaded: boolean;
  zero: boolean;
  /** the values of codes 0 and 65534 */
  lo: number;
  hi: number;
  seen: Range;
  natural: Range;
}

export interface TrackHeader {
  name: string;
  title: string;
  unit: string;
  dots?: boolean;
  zero?: boolean;
  /** name of the array of marked steps */
  marks?: string;
  line?: { value: number };
  second?: { name: string };
}

export interface Track {
  title: string;
  unit: string;
  values: ArrayLike<number>;
  dots?: boolean;
  zero?: boolean;
  marks?: ArrayLike<number>;
  line?: { value: number };
  second?: { values: ArrayLike<number> };
  pending?: boolean;
}

export interface Jump {
  kind: string;
  step: number;
  layer: number | null;
  head: number | null;
  span: number | null;
}

export interface Hole {
  from: number;
  to: number;
  /** index into the run's spans, -1: none */
  span: number;
  mass: number;
  /** layer * query heads + query head, null: the selected head */
  head: number | null;
  /** the run attended the span, as its summary alone */
  summary: boolean;
}

export interface MapPlace {
  pos: number;
  step: number;
  hole: Hole | null;
}

export interface WantedRow {
  id: number;
  /** index into the run's spans */
  span: number;
  full: number;
  own: number;
  mass: number;
}

export interface Legend {
  table: ColorTable;
  note: string;
  states?: boolean;
  lo?: string;
  hi?: string;
  missing?: string;
}

export interface Theme {
  text: string;
  background: string;
  panel: string;
  border: string;
  accent: string;
  font: string;
  code: string;
}

export type Context = CanvasRenderingContext2D & { vector?: boolean };

/** A canvas, or a place for its drawing that is not in the page. `vector`: takes the drawing as vectors, while it is set. */
export interface Surface {
  width: number;
  height: number;
  style?: { width: string; height: string };
  vector?: any;
  getContext(kind: "2d"): any;
}

export type Commit = (name: string, selection: Selection) => void;
export type Cell = [number, number];

/** What a token strip draws from. */
export interface StripView {
  clock: { spanOf: Int32Array };
  current: number;
  span: number | null;
  colors: Uint8Array;
  legend: Legend;
  follow: boolean;
  ground?: Color;
}

/** What a head map draws from. */
export interface HeadView {
  run: { header: RunHeader; arrays: Arrays };
  step: number;
  layer: number;
  head: number;
  metric: Metric;
  range: Range;
}

/** The nodes with an id in player.html and in app/ui/compare/player/pair.html. */
export interface Nodes {
  player: HTMLElement;
  play: HTMLButtonElement;
  rate: HTMLSelectElement;
  scrub: HTMLInputElement;
  number: HTMLInputElement;
  of: HTMLElement;
  mode: HTMLSelectElement;
  legend: HTMLElement;
  cell: HTMLElement;
  scale: HTMLElement;
  tracks: HTMLCanvasElement;
  follow: HTMLInputElement;
  now: HTMLElement;
  jumps: HTMLElement;
  strip: HTMLElement;
  mapTitle: HTMLElement;
  worst: HTMLSelectElement;
  mapLegend: HTMLElement;
  map: HTMLCanvasElement;
  token: HTMLElement;
  metric: HTMLSelectElement;
  fit: HTMLInputElement;
  heads: HTMLCanvasElement;
  wanted: HTMLCanvasElement;
  help: HTMLElement;
  part: HTMLButtonElement;
  context: HTMLElement;
  whose: HTMLSelectElement;
  stripP: HTMLElement;
  stripA: HTMLElement;
  stripB: HTMLElement;
  nowA: HTMLElement;
  nowB: HTMLElement;
  mapA: HTMLCanvasElement;
  mapB: HTMLCanvasElement;
  mapD: HTMLCanvasElement;
  difference: HTMLElement;
}
