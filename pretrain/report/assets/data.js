// Decoder of the payload of `pretrain/report/payload.py`.

async function inflate(bytes) {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("this browser is too old to unpack the report: it has no DecompressionStream");
  }
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

function fromBase64(text) {
  const binary = atob(text.trim());
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i += 1) bytes[i] = binary.charCodeAt(i);
  return bytes;
}

/** Unpacks deflated bytes to {runs, groups, metrics, fmoe, time}; metrics has the declarations by name. */
async function decode(bytes) {
  const buffer = await inflate(bytes);
  const size = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)));
  const array = (index) => arrayAt(buffer, 4 + size, header.arrays[index]);
  const runs = header.runs.map((run, index) => new Run(run, index, array));
  const groups = header.groups.map(({ name, runs: members }, index) =>
    new Group(name, members.map((number) => runs[number]), index));
  return { ...header, runs, groups, metrics: new Map(header.metrics.map((declared) => [declared.name, declared])) };
}

function arrayAt(buffer, start, [kind, length, offset]) {
  if (kind === "u1") return new Uint8Array(buffer, start + offset, length);
  const planes = new Uint8Array(buffer, start + offset, 4 * length);
  const bytes = new Uint8Array(4 * length);
  for (let plane = 0; plane < 4; plane += 1) {
    for (let i = 0; i < length; i += 1) bytes[4 * i + plane] = planes[plane * length + i];
  }
  // Every machine that runs a browser is little-endian.
  return kind === "u4" ? new Uint32Array(bytes.buffer) : new Float32Array(bytes.buffer);
}

function running(differences) {
  const sums = new Float64Array(differences.length);
  let sum = 0;
  for (let i = 0; i < sums.length; i += 1) sums[i] = sum += differences[i];
  return sums;
}

class Run {
  constructor(header, index, array) {
    Object.assign(this, header);
    // Their keys may be any string, including __proto__ and toString.
    for (const name of ["summary", "lost", "recipe", "versions", "curves", "layer_curves"]) Object.setPrototypeOf(this[name], null);
    this.name = visible(this.name);
    this.index = index; // selects its colour
    this.runs = [this];
    this._array = array;
    this._series = new Map();
    if (this.loads) this.loads = { ...this.loads, codes: array(this.loads.codes) };
  }

  has(name) { return Object.hasOwn(this.curves, name); }

  /** Returns steps and values {x, y} of a series and {mx, my} of its means; null without the series. */
  series(name, of = "curves") {
    const key = `${of} ${name}`;
    if (!this._series.has(key)) {
      const places = this[of][name];
      let found = null;
      if (places) {
        found = { x: running(this._array(places.x)), y: this._array(places.y) };
        found.mx = places.mx === undefined ? found.x : running(this._array(places.mx));
        found.my = places.my === undefined ? found.y : this._array(places.my);
      }
      this._series.set(key, found);
    }
    return this._series.get(key);
  }

  /** Returns the positions of steps on an axis: step, tokens or time. */
  places(steps, axis) {
    if (axis === "step") return steps;
    const clock = this.series(axis === "tokens" ? "tokens" : "seconds");
    return Float64Array.from(steps, (step) => interpolate(clock, step));
  }

  /** Returns whether the run has positions on an axis. */
  knows(axis) { return axis === "step" || this.has(axis === "tokens" ? "tokens" : "seconds"); }
}

/** Runs that differ only in their seed, with the interface of a `Run`: means and ranges. */
class Group {
  constructor(name, runs, index) {
    Object.assign(this, { name: runs.length > 1 ? `${visible(name)} (${runs.length} seeds)` : runs[0].name, runs, index });
    this.folder = runs.map((run) => run.folder).join("\n");
    this.curves = Object.assign(Object.create(null), ...runs.map((run) => run.curves));
    this.summary = Object.create(null);
    this.spread = Object.create(null);
    this.lost = Object.assign(Object.create(null), ...runs.map((run) => run.lost));
    for (const key of new Set(runs.flatMap((run) => Object.keys(run.summary)))) {
      const values = runs.map((run) => run.summary[key]).filter((value) => value !== undefined);
      this.summary[key] = values.reduce((a, b) => a + b, 0) / values.length;
      this.spread[key] = [Math.min(...values), Math.max(...values)];
    }
    this.recipe = Object.create(null);
    for (const key of new Set(runs.flatMap((run) => Object.keys(run.recipe)))) {
      this.recipe[key] = [...new Set(runs.map((run) => run.recipe[key] ?? "–"))].join(", ");
    }
    this._series = new Map();
  }

  has(name) { return this.runs.every((run) => run.has(name)); }

  knows(axis) { return this.runs.every((run) => run.knows(axis)); }

  places(steps, axis) { return this.runs[0].places(steps, axis); }

  /** Returns {x, y}, steps and means over the runs that are finite there, and {low, high}, their minimum and maximum.
   * Long runs contribute means of spans, because their spikes are at different steps. */
  series(name) {
    if (this.runs.length === 1) return this.runs[0].series(name);
    if (!this._series.has(name)) this._series.set(name, this._joined(name));
    return this._series.get(name);
  }

  _joined(name) {
    const all = this.runs.map((run) => run.series(name)).filter((series) => series?.mx.length);
    if (!all.length) return null;
    const x = all.reduce((a, b) => (b.mx.at(-1) > a.mx.at(-1) ? b : a)).mx;
    const [y, low, high] = [0, 1, 2].map(() => new Float64Array(x.length).fill(NaN));
    for (let i = 0; i < x.length; i += 1) {
      const values = all.filter(({ mx }) => x[i] >= mx[0] && x[i] <= mx[mx.length - 1])
        .map(({ mx, my }) => interpolate({ x: mx, y: my }, x[i])).filter(Number.isFinite);
      if (!values.length) continue;
      y[i] = values.reduce((a, b) => a + b, 0) / values.length;
      [low[i], high[i]] = [Math.min(...values), Math.max(...values)];
    }
    return { x, y, mx: x, my: y, low, high };
  }
}

/** Evaluates a piecewise linear curve at `at`; proportional before the first point, extrapolated after the last. */
function interpolate({ x, y }, at) {
  const last = x.length - 1;
  if (at <= x[0]) return x[0] > 0 ? y[0] * at / x[0] : y[0];
  if (at >= x[last]) {
    const slope = last ? (y[last] - y[0]) / (x[last] - x[0]) : y[last] / x[last];
    return y[last] + (at - x[last]) * slope;
  }
  const right = lowerBound(x, at);
  if (x[right] === at) return y[right];
  return y[right - 1] + (y[right] - y[right - 1]) * (at - x[right - 1]) / (x[right] - x[right - 1]);
}

/** Returns the first index whose value is at least `value`; the length if there is none. */
function lowerBound(sorted, value) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1; else high = middle;
  }
  return low;
}

/** Returns the index of the nearest value. */
function nearest(sorted, value) {
  const index = lowerBound(sorted, value);
  if (index === 0) return 0;
  if (index === sorted.length) return sorted.length - 1;
  return value - sorted[index - 1] <= sorted[index] - value ? index - 1 : index;
}

/** Returns means over neighbours on both sides, with weights that fall by a factor of e every `span` steps. A mean over
 * the past only would lag. */
function smooth({ mx, my }, span) {
  const sums = new Float64Array(my.length);
  const weights = new Float64Array(my.length);
  for (const order of [1, -1]) {
    let [sum, weight, before] = [0, 0, 0];
    for (let n = 0; n < my.length; n += 1) {
      const i = order === 1 ? n : my.length - 1 - n;
      if (!Number.isFinite(my[i])) continue;
      const kept = n ? Math.exp(-Math.abs(mx[i] - before) / span) : 0;
      [sum, weight, before] = [kept * sum, kept * weight, mx[i]];
      sums[i] += sum; // without the value itself, which is added once below
      weights[i] += weight;
      [sum, weight] = [sum + my[i], weight + 1];
    }
  }
  return my.map((value, i) => (value + sums[i]) / (1 + weights[i]));
}
