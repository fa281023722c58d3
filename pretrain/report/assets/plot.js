// Cards with curves, drawn by uPlot.

const SYNC = "fmoe";
const FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";

const FEW = 8; // up to this many lines, each has its own colour and readout
const LEAST_SPACE = 52; // pixels between ticks of an x axis

/** Approximate number of ticks on an x axis: one per 90 pixels, more on a small chart. */
function tickCount(width) {
  return Math.max(width / 90, Math.min(5, width / LEAST_SPACE));
}

class Plot {
  /**
   * spec: title, unit (text or a function of the view), format(value, digits), lines(view) -> [{label, colour, x, y,
   * width, dash, dots, quiet, raw}], and optionally: doc; wide; height; log (initial scale); read (format of readouts);
   * level(view) -> [{y, label, colour}]; pick (read out only the nearest of many lines); tools (elements next to the
   * title); unitOf(value) (ticks are round multiples of it). Readouts show `raw` {x, y} of a line that has it.
   */
  constructor(parent, spec) {
    this.spec = spec;
    this.log = Boolean(spec.log);
    this._uplot = null;
    this._shape = "";
    this._body = element("div", { class: "plot", tabindex: "0", role: "img" });
    this._readout = element("p", { class: "readout" });
    this._button = element("button", { type: "button", class: "small", "aria-pressed": String(this.log) }, "log");
    this._button.setAttribute("aria-label", `logarithmic axis: ${spec.title}`);
    this._button.addEventListener("click", () => {
      this.log = !this.log;
      this._button.setAttribute("aria-pressed", String(this.log));
      this.draw(this._view);
    });
    const tools = element("div", { class: "tools" }, ...(spec.tools ?? []), this._button);
    this._unit = element("span", { class: "unit" });
    this.card = element("div", { class: spec.wide ? "card wide" : "card" },
      element("div", { class: "head" }, element("h3", {}, spec.title), this._unit, tools),
      ...(spec.doc ? [element("p", { class: "doc", title: spec.doc }, spec.doc)] : []), this._readout, this._body);
    this.card.dataset.plot = spec.title;
    parent.append(this.card);
    this._body.addEventListener("keydown", (event) => this._key(event));
    this._observer = new ResizeObserver(() => this._resize());
    this._observer.observe(this._body);
  }

  /** Draws a view: axis, extent, zoom, marks, onZoom. Hides the card if there are no lines. */
  draw(view) {
    this._view = view;
    const lines = this.spec.lines(view);
    this._lines = [...lines.filter((line) => line.quiet), ...lines.filter((line) => !line.quiet)]; // quiet ones below
    this._isPicked = this.spec.pick || this._lines.filter((line) => !line.quiet).length > FEW;
    this.card.hidden = !this._lines.length;
    if (this.card.hidden) return;
    this._unit.textContent = (typeof this.spec.unit === "function" ? this.spec.unit(view) : this.spec.unit) ?? "";
    const tables = this._lines.map((line) => [line.x, this.log ? Array.from(line.y, positive) : Array.from(line.y, gap)]);
    const data = uPlot.join(tables);
    const shape = JSON.stringify([view.axis, this.log, theme(), this._isPicked,
      this._lines.map((l) => [l.colour, l.width, l.dash, l.dots, l.fill, l.isTop])]);
    if (this._uplot && shape === this._shape) {
      this._uplot.setData(data);
    } else {
      this._uplot?.destroy();
      this._shape = shape;
      this._uplot = new uPlot(this._options(view), data, this._body);
    }
    this._read(null);
    this._body.setAttribute("aria-label", this._spoken());
  }

  _options(view) {
    const ink = INK[theme()];
    const axis = { stroke: ink.text, font: FONT, grid: { stroke: ink.grid, width: 1 }, ticks: { show: false } };
    return {
      width: this._width(), height: this.spec.height ?? 210, padding: [10, 20, 0, 0],
      legend: { show: false },
      focus: this._isPicked ? { alpha: 0.25 } : undefined,
      cursor: {
        y: false, points: { size: 7 },
        focus: this._isPicked ? { prox: 24 } : undefined,
        drag: { x: true, y: false, setScale: false },
        sync: { key: SYNC, scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        bind: { dblclick: () => () => { this._view.onZoom(null); return null; } },
      },
      scales: {
        x: { time: false, range: () => this._view.zoom ?? this._view.extent },
        y: { distr: this.log ? 3 : 1, range: (_, low, high) => this._range(low, high) },
      },
      axes: [
        { ...axis, size: 30, space: LEAST_SPACE, splits: (u, _, low, high) => axisTicks(view.axis, low, high, tickCount(u.bbox.width / devicePixelRatio)),
          values: (_, ticks) => tickTexts(ticks, (tick) => axisText(view.axis, tick)) },
        { ...axis, size: (u, texts) => 14 + 6.3 * Math.max(3, ...(texts ?? []).map((text) => text.length)), gap: 4,
          splits: (u, _, low, high) => this._ticks(low, high, u.bbox.height / devicePixelRatio / 36),
          filter: (_, ticks) => ticks, values: (_, ticks) => tickTexts(ticks, this.spec.format) },
      ],
      series: [{}, ...this._lines.map((line) => ({
        stroke: line.fill ? "transparent" : line.colour, width: line.width ?? 1.5, dash: line.dash,
        points: { show: Boolean(line.dots), size: 5, fill: line.colour, stroke: line.colour, filter: line.fill ? undefined : lonely },
      }))],
      bands: this._lines.flatMap((line, index) => (line.isTop ? [{ series: [index + 1, index + 2], fill: line.fill }] : [])),
      hooks: {
        draw: [(u) => this._marks(u)],
        setCursor: [(u) => this._read(u.cursor.left >= 0 ? u.posToVal(u.cursor.left, "x") : null)],
        setSelect: [(u) => this._select(u)],
      },
    };
  }

  _ticks(low, high, count) {
    if (this.log) return logTicks(low, high, count);
    const unit = this.spec.unitOf?.(Math.max(Math.abs(low), Math.abs(high))) ?? 1;
    const least = this.spec.format === format.integer ? 1 : 0;
    return niceTicks(low / unit, high / unit, count, least).map((tick) => tick * unit);
  }

  _range(low, high) {
    if (low === null || high === null || !Number.isFinite(low)) return this.log ? [0.1, 1] : [0, 1];
    if (this.log) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.04, high * (high / low) ** 0.04];
    const pad = high === low ? Math.abs(high) / 10 || 1 : (high - low) * 0.06;
    const bottom = low >= 0 && low < pad * 3 ? Math.min(0, low) : low - pad;
    return [bottom, high + pad];
  }

  _select(u) {
    if (u.select.width < 4) return;
    const ends = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this._view.onZoom(ends);
  }

  /** Reads out the lines at x, or at their ends if x is null. */
  _read(x) {
    const seen = this._lines.filter((line) => !line.quiet && line.x.length);
    const values = seen.map((line) => {
      const { x: xs, y: ys } = line.raw ?? line;
      const index = x === null ? xs.length - 1 : nearest(xs, x);
      return { line, value: ys[index], at: xs[index] };
    });
    const shown = this._isPicked ? this._picked(values, x) : values;
    const parts = shown.map(({ line, value }) => {
      const text = Number.isFinite(value) ? (this.spec.read ?? this.spec.format)(value) : this._lost(line, x);
      return element("span", {}, dot(line.colour), element("bdi", {}, line.label), " ", element("b", {}, text));
    });
    if (!shown.length && x === null) parts.push(element("span", {}, `${values.length} curves: point at one to read it`));
    if (x !== null) {
      const at = shown.length === 1 ? shown[0].at : x;
      parts.unshift(element("span", {}, `${axisText(this._view.axis, at, true)}`));
      const [low, high] = this._view.zoom ?? this._view.extent;
      const close = this._view.marks.filter((mark) => Math.abs(mark.x - x) <= (high - low) * 0.006).slice(0, 3);
      parts.push(...close.map((mark) => element("span", {}, element("b", {}, mark.kind), ` ${mark.text.slice(0, 160)}`)));
    }
    this._readout.replaceChildren(...parts);
  }

  /** Text for a value that is not finite; without a cursor, the last finite value. */
  _lost(line, x) {
    const { x: xs, y: ys } = line.raw ?? line;
    const last = x === null ? ys.findLastIndex(Number.isFinite) : -1;
    if (last < 0) return "not finite";
    return `${(this.spec.read ?? this.spec.format)(ys[last])} at ${axisText(this._view.axis, xs[last], true)}, then not finite`;
  }

  /** Selects the lines to read out: all of a few, else the one nearest to the cursor. Without a cursor: the first and
   * the last layer, or no run. */
  _picked(values, x) {
    if (values.length <= FEW) return values;
    const u = this._uplot;
    if (x === null || !u || u.cursor.top < 0) return this.spec.pick ? [values[0], values.at(-1)] : [];
    const away = ({ value }) => Math.abs(u.valToPos(value, "y") - u.cursor.top);
    return values.filter(({ value }) => Number.isFinite(value)).sort((a, b) => away(a) - away(b)).slice(0, 1);
  }

  _marks(u) {
    const ctx = u.ctx;
    const { left, top, width, height } = u.bbox;
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top - 8 * devicePixelRatio, width, height + 8 * devicePixelRatio);
    ctx.clip();
    for (const { y, label, colour } of this.spec.level?.(this._view) ?? []) {
      const at = u.valToPos(y, "y", true);
      if (at < top || at > top + height) continue;
      ctx.strokeStyle = ctx.fillStyle = colour;
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
      stroke(ctx, left, at, left + width, at);
      ctx.font = `${11 * devicePixelRatio}px ${FONT.slice(5)}`;
      ctx.textAlign = "right";
      const isAbove = at - 16 * devicePixelRatio >= top; // else it would leave the plot
      ctx.textBaseline = isAbove ? "bottom" : "top";
      ctx.fillText(label, left + width - 4 * devicePixelRatio, at + (isAbove ? -3 : 4) * devicePixelRatio);
    }
    const drawn = new Map(); // position of the last mark of each kind, to skip marks that would overlap
    for (const mark of this._view.marks) {
      const at = u.valToPos(mark.x, "x", true);
      if (Math.abs(at - (drawn.get(mark.kind) ?? -Infinity)) < 8 * devicePixelRatio) continue;
      drawn.set(mark.kind, at);
      drawMark(ctx, mark, at, u.bbox);
    }
    ctx.restore();
  }

  _key(event) {
    const u = this._uplot;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!u || (!step && event.key !== "Escape" && event.key !== "Home" && event.key !== "End")) return;
    event.preventDefault();
    if (event.key === "Escape") { this._view.onZoom(null); return; }
    const width = u.over.clientWidth;
    const now = u.cursor.left >= 0 ? u.cursor.left : width / 2;
    const left = event.key === "Home" ? 0 : event.key === "End" ? width : now + step * (event.shiftKey ? 40 : 4);
    u.setCursor({ left: Math.min(width, Math.max(0, left)), top: u.over.clientHeight / 2 });
  }

  _spoken() {
    const ends = this._lines.filter((line) => !line.quiet && line.x.length).slice(0, 6)
      .map((line) => {
        const value = (line.raw ?? line).y.at(-1);
        return `${line.label} ends at ${Number.isFinite(value) ? (this.spec.read ?? this.spec.format)(value) : this._lost(line, null)}`;
      });
    return `${this.spec.title}: ${ends.join(", ")}`;
  }

  /** Removes the card. */
  remove() {
    this._observer.disconnect();
    this._uplot?.destroy();
    this.card.remove();
  }

  _width() { return Math.max(200, this._body.clientWidth); }

  _resize() {
    const width = this._width();
    if (this._uplot && this._uplot.width !== width) this._uplot.setSize({ width, height: this.spec.height ?? 210 });
  }
}

function gap(value) { return Number.isFinite(value) ? value : null; }

function positive(value) { return value > 0 && Number.isFinite(value) ? value : null; }

/** Returns ticks of an x axis: whole steps; round minutes, hours or days. */
function axisTicks(axis, low, high, count) {
  if (axis !== "time") return niceTicks(low, high, count, axis === "step" ? 1 : 0);
  const unit = [86400 * 2, 3600 * 2, 60 * 2].find((size) => high >= size) / 2 || 1;
  return niceTicks(low / unit, high / unit, count).map((tick) => tick * unit);
}

/** uPlot's points filter: points without a neighbour to draw a line to; null for uPlot's default. */
function lonely(u, index, isShown) {
  if (isShown) return null;
  const values = u.data[index];
  const found = [];
  let [before, at] = [null, -1]; // own points of this curve: undefined belongs to another curve
  for (let i = 0; i <= values.length; i += 1) {
    if (i < values.length && values[i] === undefined) continue;
    if (at >= 0 && values[at] !== null && before === null && (values[i] ?? null) === null) found.push(at);
    if (at >= 0) before = values[at];
    at = i;
  }
  return found.length ? found : null;
}

function axisText(axis, value, isLong = false) {
  if (axis === "tokens") return compact(value, 4) + (isLong ? " tokens" : "");
  if (axis === "time") return duration(Math.max(0, value));
  return (isLong ? "step " : "") + (isLong || Math.abs(value) < 1e5 ? format.integer(value) : compact(value, 4));
}

function stroke(ctx, x0, y0, x1, y1) {
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.lineTo(x1, y1);
  ctx.stroke();
}

/** Draws an event mark: a tick at the bottom for a save; a line with a square for a resume or a stop; a line with a
 * triangle for other events. */
function drawMark(ctx, mark, x, { left, top, width, height }) {
  if (x < left || x > left + width) return;
  const unit = devicePixelRatio;
  ctx.strokeStyle = ctx.fillStyle = EVENT_COLOURS[theme()][mark.kind];
  ctx.lineWidth = unit;
  if (mark.kind === "save") {
    ctx.setLineDash([]);
    stroke(ctx, x, top + height - 5 * unit, x, top + height);
    return;
  }
  ctx.setLineDash(mark.kind === "resume" || mark.kind === "stop" ? [4 * unit, 3 * unit] : [unit, 2 * unit]);
  stroke(ctx, x, top, x, top + height);
  ctx.setLineDash([]);
  if (mark.kind === "resume" || mark.kind === "stop") {
    ctx.fillRect(x - 3 * unit, top - 7 * unit, 6 * unit, 6 * unit);
    return;
  }
  ctx.beginPath();
  ctx.moveTo(x - 4.5 * unit, top - 7 * unit);
  ctx.lineTo(x + 4.5 * unit, top - 7 * unit);
  ctx.lineTo(x, top + unit);
  ctx.fill();
}
