// Finds the labelled ids with the nearest vectors: fetched from the server, compared in the browser.

import { ask, inPath } from "./server.js";

const EXAMPLES_MAX = 1000;
const NEAREST_MAX = 6;
const REJECTED_MAX = 16; // each rejected id costs a request, which counts as failed
const labels = new Map();
const vectors = new Map();
const rejected = new Map(); // by version and key: the ids rejected as of a delta, and the error once they are too many

/** Returns the label of each id of a model, by table. */
export async function labelsOfModel(model) {
  if (!labels.has(model)) {
    const { tables } = await ask(`console/labels/${inPath(model)}`);
    labels.set(model, new Map(Object.entries(tables).map(([table, ids]) => [table, new Map(Object.entries(ids))])));
  }
  return labels.get(model);
}

/** Returns the ids of ``named`` nearest to ``vector`` of ``response``, except ``but``, as [{id, label, cosine}]. */
export async function nearest(vector, response, feature, key, named, but, written) {
  const name = `${response.model}@${response.version}`;
  const kept = `${name} ${response.seq} ${key}`; // a delta changes rows and ids of the same version
  let all = vectors.get(kept);
  if (!all) {
    vectors.clear(); // only one table's vectors are cached
    const place = `${name} ${key}`;
    const isSame = rejected.has(place) && rejected.get(place).seq === response.seq; // none without deltas
    if (!isSame) rejected.set(place, { seq: response.seq, ids: new Set(), error: null });
    all = await vectorsOf([...named.keys()], name, feature, key, written, rejected.get(place));
    if (!all.lacksPart) vectors.set(kept, all);
  }
  const found = [...all].map(([id, other]) => ({ id, label: named.get(id), cosine: cosine(vector, other) }));
  return found
    .filter((one) => !but.has(one.id) && one.cosine > -1)
    .sort((one, other) => other.cosine - one.cosine)
    .slice(0, NEAREST_MAX);
}

/**
 * Returns the vectors by id, and in ``lacksPart`` whether rows of lost parts are missing in them. Ids that the version
 * rejects are left out: labels are of all versions.
 */
async function vectorsOf(ids, name, feature, key, written, known) {
  const found = new Map();
  if (known.error) throw known.error;
  const left = ids.filter((id) => !known.ids.has(id));
  while (left.length) {
    const some = left.slice(0, EXAMPLES_MAX);
    const bags = some.map((id) => `[${written(id)}]`);
    const body = `{"features":{${JSON.stringify(feature)}:[${bags}]},"output_keys":[${JSON.stringify(key)}]}`;
    try {
      const { values, missing_ids: missing } = await ask(`models/${inPath(name)}/embed`, body);
      const rows = Array.isArray(values) ? values : values[key]; // by key if the model is unpooled
      some.forEach((id, at) => found.set(id, rows[at]));
      found.lacksPart ||= missing !== undefined;
      left.splice(0, some.length);
    } catch (error) {
      const at = /\[(\d+)\]\[0\]$/.exec(error.field)?.[1];
      if (at === undefined) throw error;
      if (known.ids.size === REJECTED_MAX) throw (known.error = error);
      known.ids.add(...left.splice(Number(at), 1));
    }
  }
  return found;
}

function cosine(one, other) {
  const size = norm(one) * norm(other);
  return size ? one.reduce((sum, value, at) => sum + value * other[at], 0) / size : -2;
}

export function norm(vector) {
  return Math.sqrt(vector.reduce((sum, value) => sum + value * value, 0));
}
