// The lookup form: a field for each feature, and the request as a curl command.

import { byId, element, fill, say } from "./page.js";
import { idAsJson, tableOf, textOf, weightAsJson, wordsOf } from "./ids.js";
import { ask, hasToken, inPath, RequestError } from "./server.js";
import { labelsOfModel } from "./neighbours.js";
import { nameOf, titleOf } from "./models.js";
import { showResponse } from "./response.js";

const EXAMPLE_IDS = 3;
const INVISIBLE = /[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu; // characters that move the cursor or turn the direction of text

let served = [];
let asked = null; // the model that the fields belong to
let named = new Map(); // the labels of the model's tables
let isDenied = false; // whether the last lookup was
let onDenied = null;

/** Starts the form, which calls ``whenDenied`` with the error of a lookup that is denied. */
export function startForm(whenDenied) {
  onDenied = whenDenied;
  byId("ask-form").addEventListener("submit", (event) => {
    event.preventDefault();
    lookUp();
  });
  byId("ask-form").addEventListener("input", showCurl);
  byId("ask-model").addEventListener("change", () => chooseModel());
  byId("ask-example").addEventListener("click", fillInExample);
  byId("curl-copy").addEventListener("click", copyCurl);
}

/** Offers the served models. The chosen one stays while it is served, also by another version. */
export async function offerModels(models) {
  const isAnew = !served.length;
  const isSame = models.map(titleOf).join() === served.map(titleOf).join();
  served = models;
  if (isSame) return;
  const select = byId("ask-model");
  select.replaceChildren(...models.map((model) => element("option", { value: nameOf(model) }, titleOf(model))));
  const chosen = models.find((model) => model.model === asked?.model && model.alias === asked.alias);
  if (chosen) select.value = nameOf(chosen);
  await chooseModel(isAnew);
}

/** Makes the next offer create the fields again: another token may have access to more labels. */
export function startAgain() {
  isDenied = false;
  served = [];
}

/** Returns whether the last lookup was denied; false once there is another token. */
export function wasDenied() {
  return isDenied;
}

async function chooseModel(isAnew = false) {
  const model = served.find((one) => nameOf(one) === byId("ask-model").value);
  if (!model) return;
  const isOther = isAnew || !asked || formOf(asked) !== formOf(model);
  const labels = isOther ? await labelsOfModel(model.model).catch(() => new Map()) : named;
  if (nameOf(model) !== byId("ask-model").value) return; // another was chosen meanwhile
  if (isOther) createFields(model, labels);
  else asked = model;
  showCurl();
}

/** Returns all that the fields depend on, to be compared. */
function formOf(model) {
  return JSON.stringify([model.model, model.features, model.tables, model.unpooled]);
}

/** Creates the fields of a model, without an error. Features that it had before keep what was typed, and the focus. */
function createFields(model, labels) {
  const valueOf = (id) => byId(id)?.value ?? "";
  const before = asked?.model === model.model ? asked.features : []; // ids of another model mean others
  const typed = new Map(before.map((feature, at) => [feature, [`ids-${at}`, `weights-${at}`].map(valueOf)]));
  const [, kind, place] = /^(ids|weights|label)-(\d+)$/.exec(document.activeElement?.id) ?? [];
  [asked, named] = [model, labels];
  const fields = model.features.map((feature, at) => fieldsOf(feature, at, typed.get(feature)));
  fill("ask-features", ...fields, ...[...labels].map(labelList));
  say("ask-error", ""); // it belongs to the fields before
  if (kind) byId(`${kind}-${model.features.indexOf(before[place])}`)?.focus();
}

function fieldsOf(feature, at, [idsTyped, weightsTyped] = ["", ""]) {
  const table = tableOf(asked, feature);
  const hint = element("p", { class: "hint", id: `hint-${at}` }, hintOf(table));
  const ids = element("input", { id: `ids-${at}`, autocomplete: "off", spellcheck: "false", "aria-describedby": `hint-${at}` });
  ids.value = idsTyped;
  const picker = named.has(table.name) ? [labelPicker(table.name, feature, at)] : [];
  const line = element("div", { class: "ids" }, ids, ...picker);
  const parts = [element("label", { for: `ids-${at}` }, feature), line, hint];
  if (!asked.unpooled) {
    const weights = element("input", { id: `weights-${at}`, autocomplete: "off", inputmode: "decimal" });
    weights.value = weightsTyped;
    parts.push(
      element("details", { open: weightsTyped ? "" : null }, element("summary", {}, "Weights"), element("label", { for: `weights-${at}` }, `weights of ${feature}`), weights),
    );
  }
  return element("div", { class: "feature" }, ...parts);
}

function hintOf(table) {
  const { rule, id_type: type, examples, entries } = table.ids;
  const count = (value) => value.toLocaleString("en");
  if (rule === "map" && type === "string") return `${count(entries)} strings, such as ${textOf(examples)}`;
  if (rule === "map") return `${count(entries)} ids of 64 bits; table ${table.name}`;
  if (rule === "modulo") return `any integers; table ${table.name}`;
  return `rows 0 to ${count(table.num_embeddings - 1)} of table ${table.name}`;
}

/** Returns the labels of a table as a list for its pickers. */
function labelList([table, labels]) {
  const list = element("datalist", { id: `labels-${table}` });
  for (const label of labels.values()) list.append(element("option", { value: label })); // too many for arguments of one call
  return list;
}

/** Returns an input that adds an id by its label. */
function labelPicker(table, feature, at) {
  const picker = element("input", {
    id: `label-${at}`,
    list: `labels-${table}`,
    autocomplete: "off",
    placeholder: "add by name",
    "aria-label": `add to ${feature} by name`,
  });
  picker.addEventListener("change", () => {
    const found = [...named.get(table)].find(([, label]) => label === picker.value);
    if (!found) return;
    byId(`ids-${at}`).value = textOf([...idWords(at), found[0]]);
    picker.value = "";
    showCurl();
  });
  return picker;
}

function idWords(at) {
  return wordsOf(byId(`ids-${at}`).value, tableOf(asked, asked.features[at]).ids.id_type === "string");
}

/** Returns the body of the request, as JSON. */
function body() {
  const features = [];
  const weights = [];
  asked.features.forEach((feature, at) => {
    const ids = idWords(at).map((word) => idAsJson(tableOf(asked, feature), word));
    const given = asked.unpooled ? [] : wordsOf(byId(`weights-${at}`).value).map(weightAsJson);
    if (ids.length || given.length) features.push(`${JSON.stringify(feature)}: [[${ids.join(", ")}]]`);
    if (given.length) weights.push(`${JSON.stringify(feature)}: [[${given.join(", ")}]]`);
  });
  if (!features.length) features.push(`${JSON.stringify(asked.features[0])}: [[]]`); // one example without ids
  const more = weights.length ? `, "weights": {${weights.join(", ")}}` : "";
  return `{"features": {${features.join(", ")}}${more}}`;
}

function path() {
  return `models/${inPath(nameOf(asked))}/embed`;
}

function showCurl() {
  if (!asked) return;
  const token = hasToken() ? ' -H "Authorization: Bearer $TOKEN"' : "";
  const url = new URL(path(), document.baseURI).href;
  say("copied", "");
  const json = body().replace(INVISIBLE, (one) => one.split("").map(escaped).join(""));
  say("curl", `curl -s${token} ${url} -d '${json.replaceAll("'", "'\\''")}'`);
}

/** Returns the escape of a UTF-16 code unit in JSON. */
function escaped(unit) {
  return `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`;
}

/** Copies the curl command, or selects it if the browser denies access to the clipboard. */
async function copyCurl() {
  try {
    await navigator.clipboard.writeText(byId("curl").textContent);
    say("copied", "Copied");
  } catch {
    getSelection().selectAllChildren(byId("curl"));
    say("copied", "Selected: copy it with the keyboard");
  }
}

function fillInExample() {
  if (!asked) return;
  asked.features.forEach((feature, at) => {
    byId(`ids-${at}`).value = textOf(exampleIds(tableOf(asked, feature)));
  });
  showCurl();
}

function exampleIds(table) {
  const { rule, id_type: type, examples } = table.ids;
  const from = named.has(table.name) ? [...named.get(table.name).keys()] : type === "string" ? examples : null;
  const any = (size) => Math.floor(Math.random() * size);
  if (from) return [...new Set(Array.from({ length: EXAMPLE_IDS }, () => from[any(from.length)]))];
  return rule === "map" ? [] : [any(table.num_embeddings)];
}

async function lookUp() {
  if (!asked) return;
  isDenied = false;
  showError(null);
  showCurl();
  say("answered", "Asking …");
  const model = asked;
  const words = model.features.map((_, at) => idWords(at));
  const start = performance.now();
  try {
    const response = await ask(path(), body());
    say("answered", `Answered by ${response.model} version ${response.version} in ${(performance.now() - start).toFixed(1)} ms, the way there and back included.`);
    await showResponse(response, model, words, named);
  } catch (error) {
    if (!(error instanceof RequestError)) throw error;
    say("answered", "");
    fill("response");
    showError(error);
    isDenied = error.isDenied;
    if (isDenied) onDenied(error);
  }
}

/** Shows the error, and marks and focuses the input that it names. */
function showError(error) {
  say("ask-error", error ? error.message : "");
  let marked = null;
  asked.features.forEach((feature, at) => {
    for (const kind of asked.unpooled ? ["features"] : ["features", "weights"]) {
      const input = byId(`${kind === "features" ? "ids" : "weights"}-${at}`);
      const isIt = Boolean(error) && isOf(error.field, `${kind}.${feature}`);
      input.removeAttribute("aria-invalid");
      input.removeAttribute("aria-errormessage");
      if (isIt) {
        input.setAttribute("aria-invalid", "true");
        input.setAttribute("aria-errormessage", "ask-error");
        input.closest("details")?.setAttribute("open", "");
        marked ??= input;
      }
    }
  });
  marked?.focus();
}

function isOf(field, name) {
  return field === name || field.startsWith(`${name}[`);
}
