// Tiles: rate, latency, batches, rejections and queue length, each with a line of the last minutes. To add one, add an
// entry to TILES.

import { byId, drawn, element, fill, number, say, seconds } from "./page.js";
import { sumOf } from "./metrics.js";

const POINTS_MAX = 90;
const WIDTH = 120;
const HEIGHT = 28;
const REQUESTS = "embedserve_requests_total";
const LATENCY = "embedserve_request_seconds";

const TILES = [
  {
    title: "Requests",
    value: (between) => between.rate(REQUESTS),
    shown: (value) => `${number(value)}/s`,
    more: (between) => listed(between.rates(REQUESTS, "protocol")),
  },
  {
    title: "Latency, p50",
    value: (between) => between.quantile(LATENCY, 0.5),
    shown: seconds,
    more: () => "arrival to encoded answer",
  },
  {
    title: "Latency, p99",
    value: (between) => between.quantile(LATENCY, 0.99),
    shown: seconds,
    more: (between) => `waiting p99 ${seconds(between.quantile("embedserve_queue_wait_seconds", 0.99))}`,
  },
  {
    title: "Batch size",
    value: (between) => between.mean("embedserve_batch_examples"),
    shown: number,
    unit: "examples",
    more: (between) =>
      `${number(between.rate("embedserve_batch_examples_count"))} batches/s of ` +
      `${number(between.mean("embedserve_batch_ids"))} ids`,
  },
  {
    title: "Rejections",
    value: rejected,
    shown: (value) => `${number(value)}/s`,
    more: (between) => `${number((100 * rejected(between)) / (between.rate(REQUESTS) || 1))} % of requests`,
  },
  {
    title: "Waiting",
    value: (between) => between.now.sum("embedserve_queue_requests"),
    shown: number,
    unit: "requests",
    more: (between) => `${number(between.now.sum("embedserve_queue_examples"))} examples`,
  },
];

const lines = TILES.map(() => []);

function rejected(between) {
  return sumOf(between.rejections(REQUESTS));
}

function listed(rates) {
  return [...rates].map(([name, rate]) => `${name} ${number(rate)}`).join(", ") || "none yet";
}

/** Adds a point to each tile's line, of the change since the last reading. */
export function addPoints(step) {
  TILES.forEach((tile, at) => {
    lines[at].push(tile.value(step));
    if (lines[at].length > POINTS_MAX) lines[at].shift();
  });
}

export function showFigures(between) {
  fill("tiles", ...TILES.map((tile, at) => tileOf(tile, between, lines[at])));
  const codes = new Map([...between.rejections(REQUESTS)].filter(([, rate]) => rate > 0));
  say("rejections", codes.size ? `Rejected with ${listed(codes)} a second` : "");
  byId("rejections").hidden = !codes.size;
}

function tileOf(tile, between, line) {
  return element(
    "div",
    { class: "card tile" },
    element("h3", {}, tile.title),
    element("p", { class: "value" }, tile.shown(tile.value(between)), element("small", {}, tile.unit ?? "")),
    lineOf(line),
    element("p", { class: "hint" }, tile.more(between)),
  );
}

/** Returns a line chart of the points, newest at the right end; null leaves a gap. */
function lineOf(points) {
  const known = points.filter((one) => one !== null);
  const most = Math.max(...known, 0) || 1;
  const start = POINTS_MAX - points.length;
  const x = (at) => (((start + at) / (POINTS_MAX - 1)) * WIDTH).toFixed(1);
  const y = (value) => (HEIGHT - 1 - (value / most) * (HEIGHT - 3)).toFixed(1);
  let path = "";
  points.forEach((value, at) => {
    if (value !== null) path += `${at && points[at - 1] !== null ? "L" : "M"}${x(at)} ${y(value)}`;
  });
  return drawn(
    "svg",
    { class: "line", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    drawn("path", { d: `M0 ${HEIGHT - 0.5}H${WIDTH}`, class: "axis" }),
    drawn("path", { d: path, class: "points" }),
  );
}
