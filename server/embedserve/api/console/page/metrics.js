// Parses Prometheus' text format, and computes rates, means and quantiles between two readings.

/** Returns samples, [{labels, value}], by metric name. */
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    if (line === "" || line.startsWith("#")) continue;
    const [name, labels, rest] = head(line);
    const value = numberOf(rest.trim().split(" ")[0]);
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels, value });
  }
  return samples;
}

/** Splits a line into the sample's name, its labels, and the rest. */
function head(line) {
  const end = line.search(/[{ ]/);
  if (line[end] === " ") return [line.slice(0, end), {}, line.slice(end)];
  const labels = {};
  const pattern = /\s*,?\s*([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"/y;
  pattern.lastIndex = end + 1;
  let after = end + 1;
  for (let match = pattern.exec(line); match; match = pattern.exec(line)) {
    labels[match[1]] = match[2].replace(/\\(.)/g, (_, one) => (one === "n" ? "\n" : one));
    after = pattern.lastIndex;
  }
  return [line.slice(0, end), labels, line.slice(line.indexOf("}", after) + 1)];
}

function numberOf(text) {
  if (text === "+Inf") return Infinity;
  return text === "-Inf" ? -Infinity : Number(text);
}

/** Returns the sum of rates. */
export function sumOf(rates) {
  return [...rates.values()].reduce((sum, one) => sum + one, 0);
}

function keyOf(labels) {
  return JSON.stringify(Object.entries(labels).sort());
}

/** The server's metrics at one time. */
export class Reading {
  constructor(text, atMs) {
    this.atMs = atMs;
    this.samples = parse(text);
  }

  /** Returns the samples of a metric whose labels have the values of ``where``. */
  of(name, where = {}) {
    const wanted = Object.entries(where);
    return (this.samples.get(name) ?? []).filter(({ labels }) => wanted.every(([label, value]) => labels[label] === value));
  }

  has(name) {
    return this.samples.has(name);
  }

  sum(name, where = {}) {
    return this.of(name, where).reduce((sum, one) => sum + one.value, 0);
  }
}

/** The change between two readings. */
export class Between {
  constructor(before, now) {
    this.before = before;
    this.now = now;
    this.seconds = (now.atMs - before.atMs) / 1000;
  }

  /** Returns the increase of each counter, [{labels, value}]; a reset counter counts from zero. */
  increases(name, where = {}) {
    const before = new Map(this.before.of(name, where).map((one) => [keyOf(one.labels), one.value]));
    return this.now.of(name, where).map(({ labels, value }) => {
      const had = before.get(keyOf(labels)) ?? 0;
      return { labels, value: value < had ? value : value - had };
    });
  }

  /** Returns the increase of a counter, summed over its labels. */
  increase(name, where = {}) {
    return this.increases(name, where).reduce((sum, one) => sum + one.value, 0);
  }

  rate(name, where = {}) {
    return this.increase(name, where) / this.seconds;
  }

  /** Returns rates by the value of a label. */
  rates(name, label, where = {}) {
    const rates = new Map();
    for (const { labels, value } of this.increases(name, where)) {
      rates.set(labels[label], (rates.get(labels[label]) ?? 0) + value / this.seconds);
    }
    return rates;
  }

  /** Returns rates of requests that ended with an error, by its code. */
  rejections(name, where = {}) {
    const rates = this.rates(name, "outcome", where);
    for (const answered of ["OK", "CANCELLED"]) rates.delete(answered);
    return rates;
  }

  /** Returns the mean of a histogram's observations; null if there are none. */
  mean(name, where = {}) {
    const count = this.increase(`${name}_count`, where);
    return count ? this.increase(`${name}_sum`, where) / count : null;
  }

  /** Returns a quantile of a histogram, as PromQL's histogram_quantile does; null if it is empty. */
  quantile(name, share, where = {}) {
    const counts = new Map();
    for (const { labels, value } of this.increases(`${name}_bucket`, where)) {
      const bound = numberOf(labels.le);
      counts.set(bound, (counts.get(bound) ?? 0) + value);
    }
    const buckets = [...counts].sort((one, other) => one[0] - other[0]);
    const total = buckets.length ? buckets.at(-1)[1] : 0;
    if (!total) return null;
    const wanted = share * total;
    const at = buckets.findIndex(([, count]) => count >= wanted);
    const [below, had] = at ? buckets[at - 1] : [0, 0];
    const [bound, count] = buckets[at];
    return bound === Infinity ? below : below + ((bound - below) * (wanted - had)) / (count - had);
  }
}
