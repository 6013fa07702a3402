// B - A as a metric of its own, and the tracks of two runs under one name.
import assert from "node:assert/strict";
import { test } from "node:test";
import { difference, pairTracks } from "../../kvlens/app/ui/compare/player/pairparts.js";
import { decode } from "../../kvlens/player/web/codec.js";
import { NO, madeRun } from "./runs.js";

function withCube(codes, lo, hi) {
  const run = madeRun();
  run.arrays["cube:regret"] = Uint16Array.from(codes);
  return [run, { ...run.header.metrics[0], lo, hi }];
}

test("a difference is coded over its own range and is not recorded where one run has none", () => {
  const cells = 4 * 2 * 2;
  const [a, metricA] = withCube(Array.from({ length: cells }, (_, i) => (i === 0 ? NO : 0)), 0, 1);
  const [b, metricB] = withCube(Array.from({ length: cells }, (_, i) => (i === 2 ? 65534 : 32767)), 0, 2);
  const { run, metric, range } = difference(a, b, metricA, metricB);
  assert.deepEqual(range, [-2, 2]);
  assert.equal(metric.diverging, true);
  const value = (i) => decode(run.arrays["cube:regret"][i], metric.lo, metric.hi);
  assert.ok(Number.isNaN(value(0)));
  assert.ok(Math.abs(value(1) - 1) < 1e-4);
  assert.ok(Math.abs(value(2) - 2) < 1e-4);
  assert.equal(difference(madeRun(), b, metricA, metricB), null);
});

test("a track that one run did not record is empty there", () => {
  const [a, b] = [madeRun(), madeRun()];
  a.header.tracks = [{ name: "kl", title: "KL of A", unit: "nats", zero: true }];
  a.arrays["track:kl"] = Float64Array.from([1, 2]);
  b.header.tracks = [{ name: "h2d", title: "bytes", unit: "bytes" }];
  b.arrays["track:h2d"] = Float64Array.from([3]);
  const [kl, h2d] = pairTracks(a, b);
  assert.deepEqual([[...kl.values], [...kl.second.values], kl.unit], [[1, 2], [], "nats"]);
  assert.deepEqual([[...h2d.values], [...h2d.second.values]], [[], [3]]);
});
