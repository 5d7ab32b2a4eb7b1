// Lookups by table and rank, ids without a row, and the slowest requests.

import { byId, bytes, element, fill, number, seconds, table } from "./page.js";
import { sumOf } from "./metrics.js";
import { imbalance, labelsOf, titleOf } from "./models.js";

const TABLE = "embedserve_table_lookups_total";
const RANK = "embedserve_rank_lookups_total";
const UNKNOWN = "embedserve_unknown_ids_total";
const IDS = "embedserve_feature_ids_total";
const SLOW_MAX = 10;
const STAGES = ["read", "queue", "lookup", "encode", "write"];

/** Shows lookups by table and rank; hides the section if the server does not count them. */
export function showLookups(models, between) {
  const isCounted = between.now.has(TABLE) || between.now.has(RANK);
  byId("lookups-section").hidden = !isCounted;
  if (!isCounted) return;
  const shown = models.flatMap((model) => {
    const where = labelsOf(model);
    const parts = [];
    for (const [name, label] of [[TABLE, "table"], [RANK, "rank"]]) {
      if (between.now.has(name)) parts.push(...lookupsBy(name, label, where, between));
    }
    return [element("h3", {}, titleOf(model)), ...parts];
  });
  fill("lookups", ...shown);
}

function lookupsBy(name, label, where, between) {
  const rates = between.rates(name, label, where);
  const read = between.rates(name.replace("_lookups_", "_read_bytes_"), label, where);
  const total = sumOf(rates);
  const headings = [label, ["rows/s", "number"], "share"];
  if (read.size) headings.splice(2, 0, ["read", "number"]);
  const rows = [...rates].map(([one, rate]) => {
    const row = [label === "rank" ? `rank ${one}` : one, number(rate), shareOf(rate, total)];
    if (read.size) row.splice(2, 0, `${bytes(read.get(one) ?? 0)}/s`);
    return row;
  });
  const uneven = label === "rank" && rates.size > 1 && total;
  const said = uneven ? `The busiest rank is asked ${imbalance([...rates.values()])} times as much as the mean.` : "";
  return [table(`Lookups by ${label}`, headings, rows), element("p", { class: "hint" }, said)];
}

function shareOf(rate, total) {
  const percent = total ? (100 * rate) / total : 0;
  const bar = element("span", { class: "bar", "aria-hidden": "true" });
  bar.style.setProperty("--share", `${percent.toFixed(1)}%`);
  return element("span", { class: "share" }, bar, `${percent.toFixed(0)} %`);
}

export function showUnknown(models, between) {
  const hasShare = between.now.has(IDS);
  const rows = models.flatMap((model) => {
    const where = labelsOf(model);
    const [unknown, ids] = [UNKNOWN, IDS].map((name) => between.rates(name, "feature", where));
    const totals = new Map(between.now.of(UNKNOWN, where).map(({ labels, value }) => [labels.feature, value]));
    return [...unknown].map(([feature, rate]) => {
      const row = [feature, titleOf(model), number(rate), number(totals.get(feature))];
      if (hasShare) row.splice(3, 0, `${number((100 * rate) / (ids.get(feature) || 1))} %`);
      return row;
    });
  });
  byId("unknown-section").hidden = !rows.length;
  const headings = ["feature", "model", ["a second", "number"], ["in all", "number"]];
  if (hasShare) headings.splice(3, 0, ["of its ids", "number"]);
  fill("unknown", table("Ids without a row, by feature", headings, rows));
}

/** Shows the response of GET /slow. */
export function showSlow({ seconds: within, requests }) {
  if (!requests.length) {
    return fill("slow", element("p", { class: "hint" }, `None longer than --slow-ms in the last ${number(within / 60)} minutes.`));
  }
  const rows = requests.slice(0, SLOW_MAX).map((one) => [
    one.when.slice(11, 19),
    one.model ? `${one.model} ${one.version ?? ""}` : "–",
    `${one.examples ?? "–"} / ${one.ids ?? "–"}`,
    one.outcome,
    seconds(one.total_ms / 1000),
    longestStage(one),
    one.request_id,
  ]);
  const headings = ["ended (UTC)", "model", ["examples / ids", "number"], "outcome", ["took", "number"], ["most of it", "number"], "request id"];
  fill("slow", table("Slowest requests", headings, rows));
}

function longestStage(request) {
  const lengths = STAGES.map((stage) => [stage, request[`${stage}_ms`] ?? 0]);
  const [stage, ms] = lengths.reduce((most, one) => (one[1] > most[1] ? one : most));
  return `${stage} ${seconds(ms / 1000)}`;
}
