// Served versions and aliases, and the plan of each version as a map of shards over ranks.

import { ask, inPath } from "./server.js";
import { bytes, element, fill, number, seconds, table } from "./page.js";
import { sumOf } from "./metrics.js";

const LOOKUP = "embedserve_lookup_seconds";
const REQUESTS = "embedserve_model_requests_total";
const LATENCY = "embedserve_model_request_seconds";
const plans = new Map();
let shown = "";

/** Returns the name that identifies one served version. */
export function nameOf(model) {
  return `${model.model}@${model.alias || model.version}`;
}

/** Returns a title for people, such as "movies 3 (canary)". */
export function titleOf(model) {
  const isNamed = model.alias && model.alias !== String(model.version);
  return `${model.model} ${model.version}${isNamed ? ` (${model.alias})` : ""}`;
}

export function labelsOf(model) {
  return { model: model.model, alias: model.alias, version: String(model.version) };
}

export function showModels(models, defaultModel, between) {
  const byDefault = models.find((model) => model.model === defaultModel); // the first one serves requests that name no version
  const rows = models.map((model) => {
    const where = labelsOf(model);
    const rate = between && between.rate("embedserve_batch_examples_sum", where);
    return [
      model.model + (model === byDefault ? " (default)" : ""),
      model.version,
      model.alias || "newest",
      answersOf(model),
      between ? number(between.rate(REQUESTS, where)) : "–",
      between ? failedOf(where, between) : "–",
      between ? seconds(between.quantile(LATENCY, 0.99, where)) : "–",
      between ? number(rate) : "–",
      between ? seconds(between.quantile(`${LOOKUP}`, 0.5, where)) : "–",
      element("time", { datetime: model.since }, model.since.replace("T", " ").replace("+00:00", "")),
    ];
  });
  const headings = ["model", ["version", "number"], "served as", "answers", ["requests/s", "number"], ["failed", "number"], ["p99", "number"], ["examples/s", "number"], ["lookup p50", "number"], "since (UTC)"];
  const coming = models.filter((model) => model.next).map(comingOf);
  const followed = models.filter((model) => model.deltas).map(deltasOf);
  const routed = models.filter((model) => model.shards).map(shardsOf);
  fill("models", table("Served versions", headings, rows), ...coming, ...followed, ...routed);
}

/** Returns the percentage of a version's requests that ended with an error. */
function failedOf(where, between) {
  const failed = sumOf(between.rejections(REQUESTS, where));
  return `${number((100 * failed) / (between.rate(REQUESTS, where) || 1))}\u00a0%`;
}

function answersOf(model) {
  const parts = [];
  if (model.share) parts.push(`${number(model.share)}\u00a0% of requests`);
  if (model.shadow) parts.push(`shadow of ${number(model.shadow)}\u00a0%`);
  if (model.leaving.length) parts.push(`after ${model.leaving.join(", ")}, which leaves`);
  return parts.join(", ") || "when asked";
}

function comingOf(model) {
  const { version, state, reason } = model.next;
  return element("p", { class: state === "failed" ? "error" : "hint" }, `${titleOf(model)}: version ${version} is ${state}${reason ? `: ${reason}` : ""}`);
}

function deltasOf(model) {
  const { seq, wanted_seq: wanted, at_seq: last, state, reason } = model.deltas;
  const isStopped = state === "stalled" || state === "full";
  const of = wanted > seq ? ` of ${wanted.toLocaleString("en")}` : "";
  const upTo = last == null ? "" : ` up to ${last.toLocaleString("en")}`;
  return element("p", { class: isStopped ? "error" : "hint" }, `${titleOf(model)}: delta ${seq.toLocaleString("en")}${of}, ${state}${upTo}${reason ? `: ${reason}` : ""}`);
}

function shardsOf(model) {
  const lost = model.shards.filter((one) => !one.replicas);
  const replicas = model.shards.map((one) => `part\u00a0${one.part}: ${one.replicas}`).join(", ");
  const local = model.local_tables.length ? `; looked up by the router itself: ${model.local_tables.join(", ")}` : "";
  return element("p", { class: lost.length ? "error" : "hint" }, `${titleOf(model)}: replicas of ${replicas}${lost.map((one) => `; ${one.why}`).join("")}${local}`);
}

/** Fetches plans that are not cached and draws all; drops those that a switch or a restart has changed. */
export async function showPlans(models) {
  const drawn = new Map(models.map((model) => [JSON.stringify([titleOf(model), model.tables, model.bytes_per_rank, model.lookup]), model]));
  for (const key of plans.keys()) if (!drawn.has(key)) plans.delete(key);
  for (const [key, model] of drawn) {
    if (!plans.has(key)) plans.set(key, await ask(`models/${inPath(nameOf(model))}/plan`));
  }
  const drawing = [...drawn.keys()].join();
  if (drawing === shown) return;
  shown = drawing;
  fill("plan", ...[...drawn].flatMap(([key, model]) => planOf(model, plans.get(key))));
}

function planOf(model, plan) {
  const most = Math.max(1, ...plan.tables.flatMap((one) => one.shards.map((shard) => shard.bytes)));
  const ranks = Array.from({ length: plan.ranks }, (_, rank) => rank);
  const rows = plan.tables.map((one) => {
    const sizes = model.tables.find((other) => other.name === one.name);
    const held = ranks.map((rank) => one.shards.filter((shard) => shard.rank === rank));
    const heading = element("span", {}, one.name, element("small", {}, `${one.sharding}, ${sizes.dtype}`));
    return [heading, ...held.map((shards) => element("div", {}, ...shards.map((shard) => shardOf(shard, sizes, most))))];
  });
  const totals = model.bytes_per_rank;
  const foot = ["all tables", ...totals.map((total) => element("strong", {}, bytes(total)))];
  const copies = model.replicas > 1 ? `${model.replicas} replicas of ` : "";
  const title = `${titleOf(model)}: ${copies}${model.tables.length} table${model.tables.length === 1 ? "" : "s"} over ${plan.ranks} ${plan.device} rank${plan.ranks > 1 ? "s" : ""}`;
  const said = [`Lookups are ${model.lookup}${model.replanned ? ", and the plan was made anew for this host" : ""}.`];
  if (plan.ranks > 1) said.push(`The fullest rank holds ${imbalance(totals)} times the mean.`);
  return [
    element("h3", {}, title),
    element(
      "div",
      { class: "map", role: "region", tabindex: "0", "aria-label": `Plan of ${title}` },
      table(`Shards of ${titleOf(model)}`, ["table", ...ranks.map((rank) => `rank ${rank}`)], rows, foot),
    ),
    element("p", { class: "hint" }, said.join(" ")),
  ];
}

function shardOf(shard, sizes, most) {
  const last = shard.row_offset + shard.row_count - 1;
  const rows = shard.row_count ? `rows ${number(shard.row_offset)} – ${last.toLocaleString("en")}` : "no rows";
  const isWhole = shard.col_count === sizes.embedding_dim;
  const columns = isWhole ? `${shard.col_count} columns` : `columns ${shard.col_offset} – ${shard.col_offset + shard.col_count - 1}`;
  const block = element("div", { class: "shard" }, element("b", {}, bytes(shard.bytes)), element("span", {}, rows), element("span", {}, columns));
  block.style.setProperty("--share", `${((100 * shard.bytes) / most).toFixed(1)}%`);
  return block;
}

/** Returns the ratio of the maximum to the mean, as text. */
export function imbalance(values) {
  const mean = values.reduce((sum, one) => sum + one, 0) / (values.length || 1);
  return mean ? (Math.max(...values) / mean).toFixed(2) : "–";
}
