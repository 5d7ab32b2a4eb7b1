"""Tests of the console's scripts in Chromium: metrics, nearest rows, and tables of models."""

import pytest
from browser import Page
from e2e.console_page import page, reset_page
from e2e.demo_server import Demo

__all__ = ["page", "reset_page"]
READ_METRICS = """
import('/console/metrics.js').then(({ Between, Reading }) => {
  const text = (ok, low, high, all) => `# HELP h of {x="y"} 1
n_total{model="a",outcome="O\\\\"K, }\\\\n\\\\\\\\"} ${ok}
n_total{model="b",outcome="NO"} 7
h_bucket{le="0.1"} ${low}
h_bucket{le="0.2"} ${high}
h_bucket{le="+Inf"} ${all}
h_sum ${all * 2}
h_count ${all}
`;
  const first = new Reading(text(10, 0, 0, 0), 0);
  const between = new Between(first, new Reading(text(30, 10, 20, 20), 4000));
  const anew = new Between(first, new Reading(text(4, 0, 0, 0), 1000));
  return {
    rates: [...between.rates("n_total", "outcome")],
    quantiles: [0.25, 0.5, 0.99].map((share) => between.quantile("h", share)),
    mean: between.mean("h"),
    nothing: [anew.mean("h"), anew.quantile("h", 0.5), anew.quantile("x", 0.5)],
    anew: anew.rate("n_total", { model: "a" }),
  };
})
"""


def test_rates_and_quantiles_between_two_metric_readings(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    metrics = page.value(READ_METRICS)
    assert metrics["rates"] == [['O"K, }\n\\', 5], ["NO", 0]]
    assert metrics["quantiles"] == pytest.approx([0.05, 0.1, 0.198])
    assert metrics["mean"] == 2
    assert metrics["nothing"] == [None, None, None]
    assert metrics["anew"] == 4  # a counter that was reset


SPLIT_WORDS = """
import("/console/ids.js").then(({ wordsOf, textOf }) => {
  const words = ["Sci-Fi", "Crosby, Stills", 'the "Boss"', " outer ", ""];
  return {
    strings: wordsOf('a b, "c, d" , "e', true),
    integers: wordsOf("1 2,3"),
    typed: textOf(words),
    again: JSON.stringify(wordsOf(textOf(words), true)) === JSON.stringify(words),
  };
})
"""


def test_string_ids_with_commas_are_typed_in_double_quotes(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    words = page.value(SPLIT_WORDS)
    assert words["strings"] == ["a b", "c, d", '"e']
    assert words["integers"] == ["1", "2", "3"]
    assert words["typed"] == r'''Sci-Fi, "Crosby, Stills", "the \"Boss\"", " outer ", ""'''
    assert words["again"]


NEAREST = """
import("/console/neighbours.js").then(async ({ nearest }) => {
  const { models } = await fetch("models").then((answer) => answer.json());
  const named = new Map([["1375666", "Inception"], ["133093", "The Matrix"]]);
  const ask = (seq) => nearest(Array(models[0].length_per_key[0]).fill(1), { ...models[0], seq },
    "candidate", "candidate", named, new Set(), String);
  await ask(1);
  await ask(1);
  await ask(2);
})
"""


def test_nearest_rows_are_fetched_again_after_a_delta(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    page.value(NEAREST)
    page.value("1")  # waits for earlier events
    assert sum(url.endswith("/embed") for url in page.requests) == 2


LOST_PART = """
import("/console/neighbours.js").then(async ({ nearest }) => {
  let asked = 0;
  const really = globalThis.fetch;
  globalThis.fetch = async (path, options) => {
    if (!path.endsWith("/embed")) return really(path, options);  // of the page itself
    asked += 1;
    const lost = { values: [[0, 0], [1, 1]], missing_ids: { f: 1 } };
    return new Response(JSON.stringify(asked === 1 ? lost : { values: [[1, 0], [1, 1]] }));
  };
  const named = new Map([["1", ""], ["2", ""]]);
  const ask = async () => {
    const answer = { model: "m", version: 1 };
    const found = await nearest([1, 0], answer, "f", "f", named, new Set(), String);
    return [found.map(({ id }) => id).join(" "), asked];
  };
  return [await ask(), await ask(), await ask()];
})
"""


def test_nearest_rows_of_a_lost_part_are_fetched_once_it_is_back(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    assert page.value(LOST_PART) == [["2", 1], ["1 2", 2], ["1 2", 2]]


REJECTED_IDS = """
import("/console/neighbours.js").then(async ({ nearest }) => {
  let known, asked;
  const really = globalThis.fetch;
  globalThis.fetch = async (path, options) => {
    if (!path.endsWith("/embed")) return really(path, options);  // of the page itself
    asked += 1;
    const ids = JSON.parse(options.body).features.f.map(([id]) => id);
    const at = ids.findIndex((id) => id > known);
    const field = `features.f[${at}][0]`;
    const error = { code: "INVALID_ARGUMENT", message: "no such id", field };
    if (at >= 0) return new Response(JSON.stringify({ error }), { status: 400 });
    return new Response(JSON.stringify({ values: ids.map((id) => [id, 1]) }));
  };
  const named = new Map(Array.from({ length: 20 }, (_, at) => [String(at + 1), ""]));
  const ask = async (seq, key, last) => {
    [known, asked] = [last, 0];
    const answer = { model: "m", version: 1, seq };
    const found = await nearest([1, 1], answer, "f", key, named, new Set(), String)
      .catch((error) => [{ id: error.message }]);
    return [found.map(({ id }) => id).join(" "), asked];
  };
  const answers = [await ask(1, "f", 3), await ask(1, "f", 3)];
  for (const key of ["f", "g", "f"]) answers.push(await ask(2, key, 18));
  return answers;
})
"""


def test_rejected_id_is_requested_again_only_after_a_delta(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    rejected, still_rejected, found, other, again = page.value(REJECTED_IDS)
    assert rejected == ["INVALID_ARGUMENT: no such id", 17]  # gives up after 16 of 20 ids
    assert still_rejected == ["INVALID_ARGUMENT: no such id", 0]
    assert found == other == ["1 2 3 4 5 6", 3]
    assert again == ["1 2 3 4 5 6", 1]


VERSIONS = """
Promise.all([import('/console/metrics.js'), import('/console/models.js')]).then(
  ([{ Between, Reading }, { showModels }]) => {
    const line = (alias, version, outcome, count) => `embedserve_model_requests_total` +
      `{model="m",alias="${alias}",version="${version}",outcome="${outcome}"} ${count}\\n`;
    const bucket = (alias, version, le, count) => `embedserve_model_request_seconds_bucket` +
      `{model="m",alias="${alias}",version="${version}",le="${le}"} ${count}\\n`;
    const text = (times) => line("stable", 3, "OK", 90 * times)
      + line("stable", 3, "CANCELLED", times)
      + line("canary", 4, "OK", 6 * times) + line("canary", 4, "INTERNAL", 2 * times)
      + bucket("canary", 4, "0.1", 8 * times) + bucket("canary", 4, "+Inf", 8 * times);
    const between = new Between(new Reading(text(0), 0), new Reading(text(2), 2000));
    const other = { model: "m", since: "", leaving: [], next: null };
    const models = [["stable", 3], ["canary", 4]];
    showModels(models.map(([alias, version]) => ({ alias, version, ...other })), "m", between);
    return [...document.querySelectorAll("#models tbody tr")].map((row) => row.innerText);
  })
"""


def test_requests_and_failures_are_shown_by_version(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    stable, canary = (" ".join(row.split()) for row in page.value(VERSIONS))
    assert "stable when asked 91 0 % " in stable
    assert "canary when asked 8 25 % 99 ms" in canary
    assert ("(default)" in stable, "(default)" in canary) == (True, False)  # default: the first


ROUNDED_RATES = """
Promise.all(["metrics", "figures", "models"].map((one) => import(`/console/${one}.js`))).then(
  ([{ Between, Reading }, { showFigures }, { showModels }]) => {
    const line = (name, more, outcome, count) =>
      `embedserve_${name}requests_total{${more},outcome="${outcome}"} ${count}\n`;
    const both = (outcome, count) => line("", 'protocol="rest"', outcome, count)
      + line("model_", 'model="m",alias="",version="1"', outcome, count);
    const text = (times) => both("OK", 69 * times) + both("CANCELLED", 19 * times);
    const between = new Between(new Reading(text(0), 0), new Reading(text(1), 11735));
    showFigures(between);
    showModels([{ model: "m", alias: "", version: 1, since: "", leaving: [] }], "m", between);
    return document.querySelector("#tiles").innerText + document.querySelector("#models").innerText;
  })
"""


def test_no_rejection_is_shown_if_the_rates_of_other_outcomes_are_rounded(
    page: Page, demo: Demo
) -> None:
    page.open(f"{demo.server.http}/console")
    shown = " ".join(page.value(ROUNDED_RATES).split())
    assert "Rejections 0/s 0 % of requests" in shown
    assert "when asked 7.5 0 % " in shown


DELTAS = """
import('/console/models.js').then(({ showModels }) => {
  const other = { model: "m", alias: "", since: "", leaving: [], next: null };
  const follows = { seq: 1234567, wanted_seq: 1234567, state: "following", reason: "" };
  const stalls = { seq: 12, wanted_seq: 14, state: "stalled", reason: "delta 13 is missing" };
  const holds = { seq: 12, wanted_seq: 14, state: "held", reason: "" };
  const stays = { seq: 1200, wanted_seq: 1200, state: "following", reason: "", at_seq: 1200 };
  const each = [undefined, follows, stalls, holds, stays];
  const models = each.map((deltas, version) => ({ ...other, version, deltas }));
  showModels(models, "m", null);
  return [...document.querySelectorAll("#models p")].map((one) => [one.className, one.innerText]);
})
"""


def test_delta_progress_of_each_version_is_shown(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    assert page.value(DELTAS) == [
        ["hint", "m 1: delta 1,234,567, following"],
        ["error", "m 2: delta 12 of 14, stalled: delta 13 is missing"],
        ["hint", "m 3: delta 12 of 14, held"],
        ["hint", "m 4: delta 1,200, following up to 1,200"],
    ]


PARTS = """
import('/console/models.js').then(({ showModels }) => {
  const shards = [{ part: 0, replicas: 2, why: "" }, { part: 1, replicas: 1, why: "" }];
  const router = { model: "m", alias: "", since: "", leaving: [], next: null, shards };
  const each = [[], ["day", "genre"]];
  const models = each.map((local_tables, at) => ({ ...router, version: at + 1, local_tables }));
  showModels(models, "m", null);
  return [...document.querySelectorAll("#models p")].map((one) => one.innerText);
})
"""


def test_router_parts_and_local_tables_are_shown(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    replicas = "replicas of part\u00a00: 2, part\u00a01: 1"
    assert page.value(PARTS) == [
        f"m 1: {replicas}",
        f"m 2: {replicas}; looked up by the router itself: day, genre",
    ]


MISSING_IDS = """
import('/console/response.js').then(async ({ showResponse }) => {
  const features = ["user", "constructor"];
  const tables = features.map((one) => ({ name: `t_${one}`, features: [one] }));
  const model = { features, tables };
  const answer = { keys: features, length_per_key: [2, 2], values: [[0, 0, 0, 0]] };
  await showResponse({ ...answer, missing_ids: { user: 3 } }, model, [], new Map());
  return [...document.querySelectorAll("#response p")].map((one) => one.innerText);
})
"""


def test_ids_of_lost_parts_are_shown_with_the_result(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    assert page.value(MISSING_IDS) == [
        "Ids of lost parts, whose rows the vectors lack: 3 of user",
        "Zeros, of empty bags: constructor",
    ]


HEBREW_COUNTS = """
import('/console/response.js').then(async ({ showResponse }) => {
  const features = ["\u05d0", "\u05d1"];
  const model = { features, tables: features.map((one) => ({ name: one, features: [one] })) };
  const answer = { keys: features, length_per_key: [1, 1], values: [[0, 0]] };
  const unknown_ids = { "\u05d0": 3, "\u05d1": 4 };
  await showResponse({ ...answer, unknown_ids }, model, [], new Map());
  const texts = document.createTreeWalker(document.querySelector(".note"), NodeFilter.SHOW_TEXT);
  const places = [];
  for (let node = texts.nextNode(); node; node = texts.nextNode()) {
    [...node.data].forEach((letter, at) => {
      const range = new Range();
      range.setStart(node, at);
      range.setEnd(node, at + 1);
      places.push([range.getBoundingClientRect().left, letter]);
    });
  }
  return places.sort(([one], [other]) => one - other).map(([, letter]) => letter).join("");
})
"""


def test_count_stands_before_its_feature_whatever_its_script(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    assert page.value(HEBREW_COUNTS) == "Ids without a row: 3 of \u05d0, 4 of \u05d1"


COUNTED_LOOKUPS = """
Promise.all([import('/console/metrics.js'), import('/console/traffic.js')]).then(
  ([{ Between, Reading }, { showLookups }]) => {
    const of = (kind, one) => `{model="m",alias="",version="1",${kind}="${one}"}`;
    const line = (kind, one, ids) => `embedserve_${kind}_lookups_total${of(kind, one)} ${ids}
embedserve_${kind}_read_bytes_total${of(kind, one)} ${ids * 64}
`;
    const text = (times) => ["table", "rank"]
      .map((kind) => line(kind, "0", 24 * times) + line(kind, "1", 8 * times)).join("");
    const between = new Between(new Reading(text(0), 0), new Reading(text(2), 1000));
    showLookups([{ model: "m", alias: "", version: 1 }], between);
    return document.querySelector("#lookups-section").innerText;
  })
"""


def test_lookup_shares_and_imbalance_are_shown(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    lookups = " ".join(page.value(COUNTED_LOOKUPS).split())
    assert "rows/s read share 0 48 3 KiB/s 75 % 1 16 1 KiB/s 25 %" in lookups
    assert "rank 0 48 3 KiB/s 75 % rank 1 16 1 KiB/s 25 %" in lookups
    assert "busiest rank is asked 1.50 times as much as the mean" in lookups


UNKNOWN_IDS = """
Promise.all([import('/console/metrics.js'), import('/console/traffic.js')]).then(
  ([{ Between, Reading }, { showUnknown }]) => {
    const line = (kind, at, ids) => `embedserve_${kind}_ids_total` +
      `{model="m",alias="",version="1",feature="f${at}"} ${ids}\\n`;
    const text = (count, times) => Array.from({ length: count }, (_, at) =>
      line("unknown", at, 3 * times) + line("feature", at, 12 * times)).join("");
    let readings = 0;
    const read = Reading.prototype.of;
    Reading.prototype.of = function (...given) { readings += 1; return read.apply(this, given); };
    const readFor = (count) => {
      readings = 0;
      const [first, last] = [1, 2].map((times) => new Reading(text(count, times), 1000 * times));
      showUnknown([{ model: "m", alias: "", version: 1 }], new Between(first, last));
      return readings;
    };
    return {
      few: readFor(1),
      many: readFor(100),
      last: document.querySelector("#unknown tbody tr:last-child").innerText,
    };
  })
"""


def test_unknown_ids_of_many_features_take_no_more_readings(page: Page, demo: Demo) -> None:
    page.open(f"{demo.server.http}/console")
    shown = page.value(UNKNOWN_IDS)
    assert shown["last"].split() == ["f99", "m", "1", "3", "25", "%", "6"]
    assert shown["many"] == shown["few"]
