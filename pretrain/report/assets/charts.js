// Charts and their curves.

// By unit of a metric: `format` of the axis, `read` of readouts (default: `format`), `unitOf`, whose multiples are ticks,
// and `unit`, which replaces the text beside the title.
const FORMATS = {
  "nats per token": { format: format.small, read: format.loss },
  fraction: { unit: "", format: format.percent },
  "tokens/s": { format: format.rate },
  s: { unit: "", format: format.seconds },
  MiB: { unit: "", format: format.mebibytes, unitOf: binaryUnit(2 ** 20) },
  bytes: { unit: "", format: format.bytes, unitOf: binaryUnit(1) },
  steps: { format: format.integer },
};
for (const unit of ["tokens", "FLOPs", "factor"]) FORMATS[unit] = { format: format.compact };

/** Returns the declaration of a metric (`pretrain/tracking/metrics.py`), or at least its name, with its formats. */
function declared(name) {
  const found = { format: format.small, ...(model.metrics.get(name) ?? { name, title: name, unit: "" }) };
  return { ...found, ...(Object.hasOwn(FORMATS, found.unit) ? FORMATS[found.unit] : {}) };
}

/** A chart with a curve of each run that has the metric; not smoothed if it is exact. */
function metric(name) {
  const found = declared(name);
  const seen = found.exact ? (view) => ({ ...view, smoothing: 0 }) : (view) => view;
  return {
    ...found, title: model.metrics.has(name) ? capital(found.title) : name,
    lines: (view) => view.runs.flatMap((run) => curve(run, name, seen(view), run.name)),
  };
}

/** Charts of the declared metrics of a section. */
function section(name) {
  return [...model.metrics.values()].filter((found) => found.section === name).map((found) => metric(found.name));
}

function capital(text) { return text.charAt(0).toUpperCase() + text.slice(1); }

/** Returns the lines of a run's series; with smoothing, the faint series below its mean. */
function curve(run, name, view, label, { colour = runColour(run.index), of = "curves", ...style } = {}) {
  const series = run.series(name, of);
  if (!series) return [];
  const base = { label, colour, dash: runDash(run.index), x: run.places(series.x, view.axis), y: series.y, ...style };
  if (series.low) { // the band, below the mean
    const edges = view.smoothing && !style.dots ? [series.low, series.high].map((my) => smooth({ ...series, my }, view.smoothing))
      : [series.low, series.high];
    const band = { ...base, quiet: true, width: 0, dots: false, fill: faint(colour, 0.2) };
    const mean = view.smoothing && !style.dots ? { ...base, y: smooth(series, view.smoothing), raw: base } : base;
    return [{ ...band, y: edges[1], isTop: true }, { ...band, y: edges[0] }, { ...mean, width: 2 }];
  }
  if (!view.smoothing || style.dots) return [base];
  const mean = { ...base, x: run.places(series.mx, view.axis), y: smooth(series, view.smoothing), raw: base };
  if (of !== "curves") return [mean]; // faint curves of many layers would hide the others
  return [{ ...base, quiet: true, width: 1, colour: faint(colour) }, { ...mean, width: 2 }];
}

/** Returns unitOf for binary units of a value that is `scale` bytes per 1. */
function binaryUnit(scale) {
  return (value) => 1024 ** Math.max(0, Math.floor(Math.log(Math.max(1, value * scale)) / Math.log(1024))) / scale;
}

function faint(colour, share = 0.4) {
  const alpha = Math.round(255 * share).toString(16).padStart(2, "0");
  return colour.startsWith("#") ? colour + alpha : colour.replace(")", ` / ${100 * share}%)`);
}

function lossChart() {
  return {
    title: "Training and validation loss", unit: "nats per token; validation dashed", format: format.small, read: format.loss,
    wide: true, height: 340,
    lines: (view) => view.runs.flatMap((run) => [
      ...curve(run, "loss", view, `${run.name} training`),
      ...curve(run, "val/loss", view, `${run.name} validation`, { dots: true, dash: [6, 4], width: 1.5 }),
    ]),
    level: (view) => {
      const levels = new Map();
      for (const run of view.runs) {
        const entropy = run.summary["corpus/unigram_entropy"];
        if (entropy !== undefined) levels.set(entropy.toFixed(4), entropy);
      }
      return [...levels.values()].map((y) => ({ y, label: "unigram entropy", colour: INK[theme()].text }));
    },
  };
}

const LAYER_ORDER = { light: "from the first layer, dark, to the last", dark: "from the first layer, blue, to the last" };
const isFew = (view) => (view.routing?.layers.length ?? 0) <= FEW;

/** A chart of the metric chosen in `select`, with a curve for each layer of the selected run. Few layers have distinct
 * colours, many have a colour ramp. */
function layerChart(select) {
  const chosen = () => declared(`moe/${select.value}`);
  return {
    title: "By layer", unit: (view) => (isFew(view) ? "" : LAYER_ORDER[theme()]), wide: true, height: 280, pick: true,
    tools: [element("label", { class: "pick" }, "metric ", select)],
    format: (...value) => chosen().format(...value), unitOf: (value) => chosen().unitOf?.(value) ?? 1,
    lines: (view) => (view.routing?.layers ?? []).flatMap((layer, index, all) => curve(
      view.routing, `${layer.number}/${select.value}`, view, layer.label,
      { of: "layer_curves", width: 1.25, ...(isFew(view) ? { colour: runColour(index), dash: runDash(index) }
        : { colour: layerColour(index, all.length), dash: undefined }) })),
  };
}

/** Charts of the metrics that are in no other section. */
function others(runs) {
  const names = new Set(runs.flatMap((run) => Object.keys(run.curves)));
  names.delete("seconds"); // an x axis
  return [...names].filter((name) => (model.metrics.get(name)?.section ?? "more") === "more").sort().map(metric);
}
