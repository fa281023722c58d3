// The page of a plan: the values of `pretrain/planner/splits.py` as a plot and tables.

const byId = (id) => document.getElementById(id);
const plot = byId("plot");
const HEIGHT = 360;
const EDGE = { left: 58, right: 16, top: 20, bottom: 42 };
const NEAR = 30; // largest distance of the pointer from the point that it chooses, in pixels
const ROUTING = { p50: "median", p99: "99th percentile", max: "maximum", placed: "with experts placed by load" };

let plan = null;
let points = []; // predicted splits, by memory
let chosen = 0; // index of the point that the readout shows

function splitText(split) {
  const keys = Object.keys(plan.columns).filter((key) => key in split);
  return keys.map((key) => `${plan.columns[key]} ${split[key] ?? 1}`).join(", ");
}

/** Adds to each predicted split its speed, and whether it is the best one or on the Pareto front. */
function readPoints() {
  const best = plan.plans[0];
  const tokens = best.tokens_per_second * best.seconds; // of a step
  points = [...plan.tried].sort((a, b) => a.bytes - b.bytes || a.seconds - b.seconds);
  let highest = 0;
  for (const point of points) {
    point.speed = tokens / point.seconds;
    point.isBest = Object.keys(point.split).every((key) => point.split[key] === best.split[key]);
    point.isFront = point.fits && point.speed > highest;
    if (point.isFront) highest = point.speed;
  }
  chosen = Math.max(0, points.findIndex((point) => point.isBest));
}

function shape(tag, attributes, text = "") {
  const made = document.createElementNS(plot.namespaceURI, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = visible(text);
  return made;
}

function drawPlot() {
  const width = Math.max(240, plot.clientWidth);
  const limit = plan.cluster.memory;
  const unit = 1024 ** Math.floor(Math.log(limit) / Math.log(1024));
  const sizes = [...points.map((point) => point.bytes), limit];
  const [least, most] = [Math.min(...sizes) / 1.1, Math.max(...sizes) * 1.1];
  const speeds = points.map((point) => point.speed);
  const pad = 0.06 * Math.max(...speeds);
  const [low, high] = [Math.max(0, Math.min(...speeds) - pad), Math.max(...speeds) + pad];
  const bottom = HEIGHT - EDGE.bottom;
  const right = width - EDGE.right;
  const xOf = (bytes) => EDGE.left + Math.log(bytes / least) / Math.log(most / least) * (right - EDGE.left);
  const yOf = (speed) => bottom - (speed - low) / (high - low) * (bottom - EDGE.top);

  const parts = [];
  const columns = logTicks(least / unit, most / unit, width / 90);
  tickTexts(columns, plain).forEach((text, index) => {
    const x = xOf(columns[index] * unit);
    parts.push(shape("line", { x1: x, x2: x, y1: EDGE.top, y2: bottom }));
    parts.push(shape("text", { x, y: bottom + 16, "text-anchor": "middle" }, text));
  });
  const rows = niceTicks(low, high, 6);
  tickTexts(rows, compact).forEach((text, index) => {
    const y = yOf(rows[index]);
    parts.push(shape("line", { x1: EDGE.left, x2: right, y1: y, y2: y }));
    parts.push(shape("text", { x: EDGE.left - 8, y: y + 4, "text-anchor": "end" }, text));
  });
  parts.push(shape("text", { x: right, y: HEIGHT - 6, "text-anchor": "end" }, `memory per rank (${bytes(unit).split(" ")[1]})`));
  parts.push(shape("text", { x: 0, y: 11 }, "tokens/s"));
  const x = xOf(limit);
  const isLeft = x > width / 2;
  parts.push(shape("line", { class: "limit", x1: x, x2: x, y1: EDGE.top, y2: bottom }));
  parts.push(shape("text", { class: "limit", x: x + (isLeft ? -5 : 5), y: bottom - 8, "text-anchor": isLeft ? "end" : "start" },
    `device memory ${bytes(limit)}`));
  const front = points.filter((point) => point.isFront);
  parts.push(shape("polyline", { points: front.map((point) => `${xOf(point.bytes)},${yOf(point.speed)}`).join(" ") }));
  for (const point of points) {
    const kinds = [point.fits && "fits", point.isFront && "front", point.isBest && "best"].filter(Boolean);
    point.circle = shape("circle", {
      class: kinds.join(" "), cx: xOf(point.bytes), cy: yOf(point.speed), r: point.isBest ? 6 : 4,
      role: "img", "aria-label": `${visible(splitText(point.split))}: ${figuresOf(point)}`,
    });
    parts.push(point.circle);
  }
  plot.replaceChildren(...parts);
  choose(chosen);
}

function figuresOf(point) {
  return `${format.seconds(point.seconds)} per step, ${format.rate(point.speed)}, ${bytes(point.bytes)}` +
    (point.fits ? "" : ", does not fit");
}

/** Shows a point's split below the plot. */
function choose(index) {
  points[chosen].circle.classList.remove("chosen");
  for (const point of points) point.circle.setAttribute("tabindex", "-1");
  chosen = index;
  const point = points[index];
  point.circle.classList.add("chosen");
  point.circle.setAttribute("tabindex", "0");
  byId("point").replaceChildren(element("b", {}, splitText(point.split)), element("span", {}, figuresOf(point)));
}

function listen() {
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const away = points.map(({ circle }) => Math.hypot(
      circle.cx.baseVal.value + box.left - event.clientX, circle.cy.baseVal.value + box.top - event.clientY));
    const index = away.indexOf(Math.min(...away));
    if (away[index] <= NEAR && index !== chosen) choose(index);
  });
  plot.addEventListener("keydown", (event) => {
    const last = points.length - 1;
    const index = { ArrowLeft: chosen - 1, ArrowRight: chosen + 1, Home: 0, End: last }[event.key];
    if (index === undefined) return;
    event.preventDefault();
    choose(Math.min(last, Math.max(0, index)));
    points[chosen].circle.focus();
  });
  new ResizeObserver(drawPlot).observe(plot);
}

/** Fills a table with rows of texts and elements. Columns whose texts all begin with a digit are aligned as numbers. */
function fillTable(table, heads, rows) {
  const kinds = heads.map((_, index) => (rows.length && rows.every((row) => /^\d/.test(row[index])) ? "number" : ""));
  const cells = (row) => row.map((cell, index) => (index === 0 ? element("th", { scope: "row" }, cell)
    : element("td", { class: cell instanceof Element ? "wide" : kinds[index] }, cell)));
  const names = heads.map((name, index) => element("th", { scope: "col", class: index ? kinds[index] : "" }, name));
  table.replaceChildren(element("thead", {}, element("tr", {}, ...names)),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row)))));
}

function fillParts(table, heads, values, text) {
  const parts = Object.entries(values).filter(([, value]) => value > 0).sort((a, b) => b[1] - a[1]);
  const total = parts.reduce((sum, [, value]) => sum + value, 0);
  fillTable(table, [...heads, "share", ""], parts.map(([name, value]) => {
    const bar = element("div", { class: "part" });
    bar.style.width = `${100 * value / parts[0][1]}%`;
    return [name, text(value), format.percent(value / total, 2), bar];
  }));
}

function cost(one) {
  return `${format.integer(one.cost)} ${one.currency}`;
}

function drawHead() {
  const best = plan.plans[0];
  byId("title").textContent = visible(plan.recipe);
  document.title = `${visible(plan.recipe)} – fmoe plan`;
  byId("status").textContent = visible(`${format.integer(plan.ranks)} ranks of ${plan.cluster.name} · ${compact(plan.tokens)} tokens · ` +
    `${format.integer(points.length)} splits predicted`);
  byId("source").textContent = visible(`Cluster: ${plan.cluster.source}`);
  const ratios = Object.keys(ROUTING).filter((key) => key in plan.routing).map((key) => `${ROUTING[key]} ${small(plan.routing[key], 3)}`);
  byId("loads").hidden = !ratios.length; // a dense model
  byId("loads").textContent = `Busiest rank's rows over equal ones: ${ratios.join(", ")}; ` +
    `assignments dropped: ${format.percent(plan.routing.dropped ?? 0)}`;
  const figures = [["step", format.seconds(best.seconds)], ["tokens per second", compact(best.tokens_per_second)],
    ["MFU", format.percent(best.mfu)], ["memory per rank", bytes(best.bytes)], ["days", small(best.days, 3)]];
  if (best.cost !== null) figures.push(["cost", cost(best)]);
  byId("figures").replaceChildren(...figures.map(([name, text]) => element("dl", {}, element("dt", {}, name), element("dd", {}, text))));
}

function drawTables() {
  const best = plan.plans[0];
  const hasCost = best.cost !== null;
  const heads = ["", ...Object.values(plan.columns), "step", "tokens/s", "MFU", "memory", "limit", "days", ...(hasCost ? ["cost"] : [])];
  fillTable(byId("best"), heads, plan.plans.map((one, index) => [
    String(index + 1), ...Object.keys(plan.columns).map((key) => String(one.split[key] ?? 1)), format.seconds(one.seconds),
    compact(one.tokens_per_second), format.percent(one.mfu), bytes(one.bytes), one.limit, small(one.days, 3), ...(hasCost ? [cost(one)] : []),
  ]));
  fillParts(byId("terms"), ["term", "time"], best.terms, format.seconds);
  fillParts(byId("memory"), ["part", "memory"], best.memory, bytes);
  fillTable(byId("neighbors"), ["change", "result"], plan.neighbors.map(({ change, why }) => [change, why]));
}

async function start() {
  try {
    const buffer = await inflate(fromBase64(byId("data").textContent));
    plan = JSON.parse(new TextDecoder().decode(buffer));
    readPoints();
    byId("main").hidden = false;
    drawHead();
    drawTables();
    drawPlot();
    listen();
  } catch (error) {
    byId("status").textContent = `the plan is unreadable: ${error.message}`;
    throw error;
  }
  document.documentElement.dataset.ready = "";
}

start();
