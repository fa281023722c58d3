// State of the page, and its drawing.

const SPANS = [0, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000];
const LIVE_MS = 2000;
const byId = (id) => document.getElementById(id);

const state = {
  axis: "step", smoothing: 0, marks: true, hidden: new Set(), zoom: null, // hidden: names of runs
  together: true, find: "", order: { key: null, isUp: true },
  routing: 0, frame: null, layer: 0, // frame null: the newest
};
let model = null;
let plots = [];
let maps = null;
let playing = null;

/** Returns the drawn items: runs, or groups of seeds. */
function items() {
  const found = state.together && model.groups.length < model.runs.length ? model.groups : model.runs;
  found.forEach((item, index) => [item, ...item.runs].forEach((one) => { one.index = index; }));
  return found;
}

function isShown(item) { return item.runs.some((run) => !state.hidden.has(run.name)); }

function setShown(found, isOn) {
  for (const run of found.flatMap((item) => item.runs)) if (isOn) state.hidden.delete(run.name); else state.hidden.add(run.name);
  draw();
}

function isFound(item) {
  return [item, ...item.runs].some((one) => one.name.toLowerCase().includes(state.find.toLowerCase()));
}

function view() {
  const runs = items().filter(isShown);
  const axis = runs.every((run) => run.knows(state.axis)) ? state.axis : "step";
  const marks = !state.marks ? [] : runs.flatMap((run) => run.runs).flatMap((run) => {
    const events = run.events.filter((event) => !event.lost && event.kind !== "start" && event.kind !== "end");
    const places = run.places(events.map((event) => event.step), axis);
    return events.map((event, i) => ({ x: places[i], kind: event.kind, text: event.text }));
  });
  const routing = routed()[state.routing] ?? routed()[0] ?? null;
  return { runs, axis, marks, routing, smoothing: SPANS[state.smoothing], zoom: state.zoom, extent: extent(runs, axis), onZoom };
}

function extent(runs, axis) {
  let [low, high] = [Infinity, -Infinity];
  for (const run of runs.flatMap((item) => item.runs)) {
    for (const name of Object.keys(run.curves)) {
      const { x } = run.series(name);
      const ends = run.places([x[0], x[x.length - 1]], axis);
      [low, high] = [Math.min(low, ends[0]), Math.max(high, ends[1])];
    }
  }
  if (!(low <= high)) return [0, 1];
  if (low === high) return axis === "step" ? [low - 1, high + 1] : [0, 2 * high || 1];
  return [low, high];
}

/** Returns the runs with expert layers. */
function routed() { return model.runs.filter((run) => run.layers.length); }

function onZoom(zoom) {
  state.zoom = zoom;
  byId("reset").hidden = zoom === null;
  drawPlots();
}

function drawPlots() {
  const now = view();
  for (const plot of plots) plot.draw(now);
  for (const radio of byId("bar").elements.axis) {
    radio.disabled = !now.runs.every((run) => run.knows(radio.value));
    radio.checked = radio.value === now.axis;
  }
}

function drawMaps() {
  const run = view().routing;
  const loads = run?.loads;
  byId("loads").hidden = !loads;
  if (!loads) return;
  const last = loads.frames.length - 1;
  const frame = state.frame === null ? last : Math.min(state.frame, last);
  state.layer = Math.min(state.layer, loads.layers.length - 1);
  const slider = byId("frame");
  slider.max = last;
  slider.value = frame;
  const text = stepText(loads.frames[frame]);
  slider.setAttribute("aria-valuetext", text);
  byId("frame-value").textContent = text;
  const names = loads.layers.map((number) => run.layers.find((layer) => layer.number === number)?.label ?? `layer ${number}`);
  fill(byId("layer"), names.map((name, index) => [String(index), name]), String(state.layer));
  maps.draw(run, frame, state.layer);
}

/** Sets the value of a select, and its options if they changed. */
function fill(select, options, value) {
  if (JSON.stringify(options) !== select.dataset.options) {
    select.replaceChildren(...options.map(([key, text]) => element("option", { value: key }, text)));
    select.dataset.options = JSON.stringify(options);
  }
  select.value = value;
}

function drawHead() {
  const names = model.runs.map((run) => run.name);
  byId("title").textContent = names.length === 1 ? names[0] : `${names.length} runs`;
  document.title = `${names.slice(0, 8).join(", ")}${names.length > 8 ? ", …" : ""} – fmoe report`;
  byId("runs").replaceChildren(...items().map((item) => {
    const isOn = isShown(item);
    const button = element("button", { type: "button", "aria-pressed": String(isOn), title: visible(item.folder) },
      dot(runColour(item.index)), element("span", {}, item.name));
    button.addEventListener("click", () => {
      setShown([item], !isOn);
      byId("runs").querySelectorAll("button")[item.index].focus();
    });
    const place = element("li", {}, button);
    place.hidden = !isFound(item);
    return place;
  }));
  byId("choose").hidden = names.length < 2;
  byId("choose-tools").hidden = names.length < 3 && model.groups.length === names.length;
  byId("together-label").hidden = model.groups.length === names.length;
  byId("together").checked = state.together;
  const versions = Object.entries(model.runs[0].versions).map(([name, text]) => `${name} ${text}`);
  byId("footer").textContent = visible([`Written by fmoe ${model.fmoe}, ${new Date(1000 * model.time).toLocaleString()}`,
    model.runs.length === 1 && versions.length ? `run with ${versions.join(", ")}` : null].filter(Boolean).join("; "));
  if (document.documentElement.dataset.mode !== "live") byId("status").textContent = progress();
}

function progress() {
  const more = model.runs.length > 4 ? ` · and ${model.runs.length - 4} more` : "";
  return model.runs.slice(0, 4).map((run) => {
    const { step, total_steps: total, tokens } = run.summary;
    const done = step === undefined ? "no step yet" : `step ${format.integer(step)}${total ? ` of ${format.integer(total)}` : ""}`;
    return (model.runs.length > 1 ? `${run.name}: ` : "") + done + (tokens ? `, ${compact(tokens)} tokens` : "");
  }).join(" · ") + more;
}

function draw() {
  const runs = view().runs;
  drawHead();
  drawPlots();
  byId("routing-section").hidden = !routed().length;
  byId("other-section").hidden = plots.filter((plot) => byId("other").contains(plot.card)).every((plot) => plot.card.hidden);
  fill(byId("routing-run"), routed().map((run, index) => [String(index), run.name]), String(state.routing));
  byId("routing-run-label").hidden = routed().length < 2;
  drawMaps();
  drawTables(runs);
}

function drawTables(runs) {
  drawNumbers(byId("numbers"), runs, state.order, (key) => {
    state.order = { key, isUp: state.order.key !== key || !state.order.isUp };
    drawTables(view().runs);
  });
  drawEvents(byId("events"), runs, byId("saves").checked);
  byId("differing-label").hidden = model.runs.length < 2;
  drawRecipe(byId("recipe"), runs, { differing: byId("differing").checked && model.runs.length > 1, find: byId("find").value });
}

function build() {
  const add = (id, specs) => specs.map((spec) => new Plot(byId(id), spec));
  const select = element("select", { id: "layer-metric", "aria-label": "Metric by layer" });
  const names = new Set(model.runs.flatMap((run) => Object.keys(run.layer_curves).map((name) => name.split("/")[1])));
  const known = section("routing").map(({ name, title }) => [name.replace("moe/", ""), title]).filter(([name]) => names.delete(name));
  const options = [...known, ...[...names].map((name) => [name, name])];
  fill(select, options, options[0]?.[0] ?? "");
  select.addEventListener("change", drawPlots);
  plots = [...add("loss", [lossChart()]), ...add("optimizer", section("optimizer")), ...add("speed", section("speed")),
    ...add("by-layer", [layerChart(select)]), ...add("routing", section("routing")), ...add("other", others(model.runs))];
}

/** Sets the initial smoothing: about a hundredth of the longest run. */
function chooseSmoothing() {
  const steps = Math.max(0, ...model.runs.map((run) => run.summary.step ?? 0));
  setSmoothing(Math.max(0, SPANS.findLastIndex((span) => span <= steps / 100)));
}

function setSmoothing(index) {
  state.smoothing = index;
  const text = index ? `${SPANS[index]} steps` : "off";
  byId("smoothing").value = index;
  byId("smoothing").setAttribute("aria-valuetext", text);
  byId("smoothing-value").textContent = text;
}

function listen() {
  const frames = new Map();
  const soon = (what) => { // at most once per frame
    if (!frames.has(what)) frames.set(what, requestAnimationFrame(() => { frames.delete(what); what(); }));
  };
  byId("bar").addEventListener("submit", (event) => event.preventDefault());
  for (const radio of byId("bar").elements.axis) {
    radio.addEventListener("change", () => { state.axis = radio.value; onZoom(null); });
  }
  byId("smoothing").addEventListener("input", (event) => {
    setSmoothing(Number(event.target.value));
    soon(drawPlots);
  });
  byId("together").addEventListener("change", (event) => { state.together = event.target.checked; draw(); });
  byId("find-runs").addEventListener("input", (event) => { state.find = event.target.value; drawHead(); });
  byId("show-runs").addEventListener("click", () => setShown(items().filter(isFound), true));
  byId("hide-runs").addEventListener("click", () => setShown(items().filter(isFound), false));
  byId("marks").addEventListener("change", (event) => { state.marks = event.target.checked; drawPlots(); });
  byId("reset").addEventListener("click", () => { onZoom(null); byId("smoothing").focus(); });
  byId("frame").addEventListener("input", (event) => {
    const frame = Number(event.target.value);
    state.frame = frame === Number(event.target.max) ? null : frame;
    soon(drawMaps);
  });
  byId("play").addEventListener("click", () => play(playing === null));
  byId("layer").addEventListener("change", (event) => { state.layer = Number(event.target.value); drawMaps(); });
  byId("routing-run").addEventListener("change", (event) => {
    Object.assign(state, { routing: Number(event.target.value), frame: null });
    drawPlots();
    drawMaps();
  });
  byId("saves").addEventListener("change", () => drawTables(view().runs));
  byId("differing").addEventListener("change", () => drawTables(view().runs));
  byId("find").addEventListener("input", () => drawTables(view().runs));
  for (const radio of byId("bar").elements.theme) {
    radio.addEventListener("change", () => { remember(radio.value); setTheme(radio.value); draw(); });
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

function play(isOn) {
  clearInterval(playing);
  playing = null;
  byId("play").setAttribute("aria-pressed", String(isOn));
  byId("play").textContent = isOn ? "stop" : "play";
  if (!isOn) return;
  const count = Number(byId("frame").max);
  if (state.frame === null) state.frame = 0;
  playing = setInterval(() => {
    state.frame = (state.frame ?? count) + 1;
    if (state.frame >= count) { state.frame = null; play(false); }
    drawMaps();
  }, Math.max(40, 8000 / (count + 1)));
}

function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme; else document.documentElement.dataset.theme = name;
  for (const radio of byId("bar").elements.theme) radio.checked = radio.value === name;
}

function remember(name) {
  try { localStorage.setItem("fmoe-theme", name); } catch { /* storage is unavailable for files in some browsers */ }
}

function remembered() {
  try { return localStorage.getItem("fmoe-theme") ?? "auto"; } catch { return "auto"; }
}

async function show(bytes) {
  const before = model && JSON.stringify(model.runs.map((run) => [Object.keys(run.curves), Object.keys(run.layer_curves)]));
  model = await decode(bytes);
  if (before === null) chooseSmoothing();
  const after = JSON.stringify(model.runs.map((run) => [Object.keys(run.curves), Object.keys(run.layer_curves)]));
  if (before !== after) { // new metrics need new charts
    for (const plot of plots) plot.remove();
    build();
  }
  draw();
}

/** Polls for new data. */
async function follow() {
  let version = "0";
  for (;;) {
    try {
      const answer = await fetch(`data?after=${version}`, { cache: "no-store" });
      if (answer.status === 200) {
        version = answer.headers.get("X-Version");
        await show(await answer.arrayBuffer());
      } else if (answer.status !== 204) {
        throw new Error((await answer.text()).trim());
      }
      byId("status").textContent = `live: ${progress()}`;
    } catch (error) {
      byId("status").textContent = `no longer live: ${error.message}; ${progress()}`;
    }
    await new Promise((done) => setTimeout(done, LIVE_MS));
  }
}

async function start() {
  setTheme(remembered());
  try {
    maps = new LoadMaps(({ frame, layer }) => {
      state.frame = frame === Number(byId("frame").max) ? null : frame;
      state.layer = layer;
      drawMaps();
    });
    byId("main").hidden = false;
    await show(fromBase64(byId("data").textContent));
    byId("differing").checked = model.runs.length > 1;
    drawTables(view().runs);
    listen();
  } catch (error) {
    byId("status").textContent = `the report is unreadable: ${error.message}`;
    throw error;
  }
  document.documentElement.dataset.ready = String(performance.now());
  if (document.documentElement.dataset.mode === "live") follow();
}

start();
