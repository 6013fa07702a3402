// @ts-check
// The player in a file of its own: the trace is in the page, and a head's spans come from it instead of from Python.

import { sharedRuns, unpack } from "./codec.js";
import { listen } from "./listening.js";
import { Player } from "./player.js";

/** @import { Commit } from "./types.js" */

/** @param {string} text */
async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** The messages of a trace, each after its length. @param {Uint8Array} bytes */
function split(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const messages = [];
  for (let offset = 0; offset < bytes.byteLength;) {
    const length = view.getUint32(offset, true);
    messages.push(bytes.subarray(offset + 4, offset + 4 + length));
    offset += 4 + length;
  }
  return messages;
}

// The place that a player opens at: the first head's message has it.
/** @param {Player} player @param {Uint8Array[]} messages @param {Element} note */
function show(player, messages, note) {
  const [run, ...slices] = messages.map((message) => unpack(message));
  sharedRuns().set(run.header.payload, run);
  const known = new Map(slices.map((slice) => [`${slice.header.layer},${slice.header.head}`, slice]));
  const remark = note.textContent;
  /** @type {Commit} */
  const commit = (_, { layer, head }) => {
    const slice = known.get(`${layer},${head}`);
    note.textContent = slice ? remark : `${remark} It does not hold those of ${player.headName(layer, head)}.`;
    if (slice && slice !== player.slice) player.receive(slice, commit);
  };
  player.receive(known.values().next().value, commit);
}

async function open() {
  const player = new Player(document);
  listen(player);
  show(player, split(await inflate(document.getElementById("trace").textContent)), document.getElementById("note"));
}

open();
