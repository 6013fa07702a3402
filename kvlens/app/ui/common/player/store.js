// @ts-check
// Zero-height component: keeps the payload of a run in the page, where the player finds it. The two latest runs are kept.

import { sharedRuns, unpack } from "../../../../player/web/codec.js";

/** @param {{ data: Uint8Array }} component */
export default function ({ data }) {
  const { header, arrays } = unpack(data);
  const runs = sharedRuns();
  runs.delete(header.payload);
  runs.set(header.payload, { header, arrays });
  while (runs.size > 2) runs.delete(runs.keys().next().value);
  window.dispatchEvent(new CustomEvent("kvlens:run", { detail: header.payload }));
}
