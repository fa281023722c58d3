// Which curves there are.

const KNOWN = new Set(["tokens", "flops", "seconds", "corpus/unigram_entropy", "guard/skipped", "guard/collapsed_layers",
  "loss", "val/loss"]);

/** A metric of the whole model: a curve of each run that has it; not smoothed if it is exact. */
function metric(name, title, unit, format, more = {}) {
  KNOWN.add(name);
  const seen = more.exact ? (view) => ({ ...view, smoothing: 0 }) : (view) => view;
  return { title, unit, format, lines: (view) => view.runs.flatMap((run) => curve(run, name, seen(view), run.name)), ...more };
}

/** The curve of a run; with smoothing a faint one, and its mean over it. */
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
  if (of !== "curves") return [mean]; // of many layers the faint ones would hide the others
  return [{ ...base, quiet: true, width: 1, colour: faint(colour) }, { ...mean, width: 2 }];
}

/** Of 1024 bytes each, as so many mebibytes or of bytes. */
function binaryUnit(scale) {
  return (value) => 1024 ** Math.max(0, Math.floor(Math.log(Math.max(1, value * scale)) / Math.log(1024))) / scale;
}

function faint(colour, share = 0.4) {
  const alpha = Math.round(255 * share).toString(16).padStart(2, "0");
  return colour.startsWith("#") ? colour + alpha : colour.replace(")", ` / ${100 * share}%)`);
}

function lossChart() {
  return {
    title: "Training and validation loss", unit: "nats a token; validation dashed", format: format.small, read: format.loss,
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

const OPTIMIZER = () => [
  metric("lr", "Learning rate", "", format.small, { exact: true }),
  metric("grad_norm", "Gradient norm", "before clipping", format.small, { log: true }),
  metric("loss_scale", "Loss scale", "fp16", format.compact, { log: true, exact: true }),
  metric("skipped_steps", "Steps skipped for an overflow", "fp16, since the beginning", format.integer, { exact: true }),
  metric("trust/dense_median", "Trust ratio of dense matrices", "median", format.small, { log: true }),
  metric("trust/experts_median", "Trust ratio of experts", "median", format.small, { log: true }),
];

const SPEED = () => [
  metric("tokens_per_second", "Throughput", "tokens a second", format.rate),
  metric("mfu", "Model FLOPs utilization", "of the devices' peak", format.percent),
  metric("step_seconds", "Seconds a step", "", format.seconds),
  metric("memory_mb", "Memory", "largest of rank 0 so far", format.mebibytes,
    { exact: true, unitOf: binaryUnit(2 ** 20) }),
];

// Of a layer, and their means over the layers.
const ROUTING = [
  ["entropy", "Router entropy", "nats a token", format.small],
  ["drop_rate", "Drop rate", "assignments over capacity", format.percent],
  ["dead_experts", "Dead experts", "without a token in a step", format.small],
  ["balance_loss", "Balance loss", "before its coefficient", format.small],
  ["z_loss", "Router z-loss", "before its coefficient", format.small],
  ["load_cv", "Load imbalance", "coefficient of variation of the load", format.small],
  ["exchange_bytes", "Exchange", "what a rank sends in a step", format.bytes, binaryUnit(1)],
];

const MEANS = () => ROUTING.map(([name, title, unit, text, unitOf]) =>
  metric(`moe/${name}`, title, unit, text, { unitOf }));

const LAYER_ORDER = { light: "from the first layer, dark, to the last", dark: "from the first layer, blue, to the last" };
const isFew = (view) => (view.routing?.layers.length ?? 0) <= FEW;

/** A curve of each layer of the run whose routing is shown, of the metric that `select` has. A few have colours that
 * are easily told apart, many have a ramp. */
function layerChart(select) {
  const known = () => ROUTING.find(([name]) => name === select.value) ?? [select.value, select.value, "", format.small];
  return {
    title: "By layer", unit: (view) => (isFew(view) ? "" : LAYER_ORDER[theme()]), wide: true, height: 280, pick: true,
    tools: [element("label", { class: "pick" }, "metric ", select)],
    format: (...value) => known()[3](...value), unitOf: (value) => known()[4]?.(value) ?? 1,
    lines: (view) => (view.routing?.layers ?? []).flatMap((layer, index, all) => curve(
      view.routing, `${layer.number}/${select.value}`, view, layer.label,
      { of: "layer_curves", width: 1.25, ...(isFew(view) ? { colour: runColour(index), dash: runDash(index) }
        : { colour: layerColour(index, all.length), dash: undefined }) })),
  };
}

/** Metrics that no other chart has. */
function others(runs) {
  const names = new Set(runs.flatMap((run) => Object.keys(run.curves)));
  return [...names].filter((name) => !KNOWN.has(name)).sort().map((name) => metric(name, name, "", format.small));
}
