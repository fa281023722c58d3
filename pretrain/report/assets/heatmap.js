// Heatmaps of the expert load: all layers in a span of steps, and one layer over all steps.

class LoadMaps {
  /** onChange({frame, layer}) is called on a click or an arrow key. */
  constructor(onChange) {
    this._map = document.getElementById("map");
    this._history = document.getElementById("history");
    this._scale = document.getElementById("scale");
    this._readout = document.getElementById("map-value");
    this._onChange = onChange;
    this.cell = { layer: 0, expert: 0 };
    this._listen(this._map, (x, y) => ({ expert: x, layer: y }));
    this._listen(this._history, (x, y) => ({ frame: x, expert: y }));
    for (const canvas of [this._map, this._history]) new ResizeObserver(() => this._redraw()).observe(canvas.parentElement);
  }

  /** Draws a run's loads in a frame, and those of a layer (an index) over time. */
  draw(run, frame, layer) {
    Object.assign(this, { run, frame, layer });
    this.cell = { layer: Math.min(this.cell.layer, run.loads.layers.length - 1), expert: this.cell.expert };
    this._redraw();
    this._tell();
  }

  _redraw() {
    if (!this.run) return;
    const { experts, frames, log2 } = this.run.loads;
    const colours = loadColours(log2);
    const widest = Math.max(...experts);
    this._paint(this._map, widest, experts.length, (x, y) => (x < experts[y] ? this._code(y, x, this.frame) : 255), colours,
      { rows: (y) => this._label(y), columns: everyColumn(widest), axis: "expert", tallest: 30, widest: 64, chosen: [null, this.layer] });
    this._paint(this._history, frames.length, experts[this.layer], (x, y) => this._code(this.layer, y, x), colours,
      { rows: (y) => String(y), columns: (count) => stepColumns(frames, count), axis: "step", tallest: 30,
        widest: 64, chosen: [this.frame, null] });
    this._paintScale();
    const [first, last] = frames[this.frame];
    this._map.setAttribute("aria-label", `Load of every expert in steps ${first} to ${last}; arrow keys move the selection`);
    this._history.setAttribute("aria-label", `Load of each expert of ${this._label(this.layer)} over all steps`);
  }

  /** Returns the code of an expert's load in a layer (an index) and frame. */
  _code(layer, expert, frame) {
    const { experts, frames, codes } = this.run.loads;
    if (!this._starts || this._startsOf !== this.run) {
      this._starts = experts.map((_, i) => experts.slice(0, i).reduce((a, b) => a + b, 0));
      this._startsOf = this.run;
    }
    return codes[(this._starts[layer] + expert) * frames.length + frame];
  }

  _label(layer) {
    const number = this.run.loads.layers[layer];
    return this.run.layers.find((found) => found.number === number)?.label ?? `layer ${number}`;
  }

  _paint(canvas, columns, rows, code, colours, { rows: rowText, columns: columnTicks, axis, tallest, widest, chosen }) {
    const ratio = devicePixelRatio;
    const room = canvas.parentElement.clientWidth;
    const ctx = canvas.getContext("2d");
    ctx.font = FONT;
    const labels = Math.ceil(Math.max(...Array.from({ length: rows }, (_, y) => ctx.measureText(rowText(y)).width))) + 8;
    const width = Math.min(room, labels + 1 + columns * widest);
    const cellHeight = Math.max(rows > 400 ? 1 : 2, Math.min(tallest, Math.floor(330 / rows)));
    const height = rows * cellHeight + 36; // ticks and the axis label
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    ctx.scale(ratio, ratio);
    const [cellWidth, ink] = [(width - labels - 1) / columns, INK[theme()]];
    canvas.place = { labels, cellWidth, cellHeight, columns, rows };

    const image = new ImageData(columns, rows);
    for (let y = 0; y < rows; y += 1) {
      for (let x = 0; x < columns; x += 1) image.data.set(colours[code(x, y)], 4 * (y * columns + x));
    }
    const small = new OffscreenCanvas(columns, rows);
    small.getContext("2d").putImageData(image, 0, 0);
    ctx.imageSmoothingEnabled = cellWidth < 1; // several columns per pixel: average them
    ctx.drawImage(small, labels, 0, cellWidth * columns, cellHeight * rows);

    ctx.strokeStyle = ink.card;
    ctx.lineWidth = 1;
    if (cellWidth > 5) for (let x = 1; x < columns; x += 1) stroke(ctx, labels + x * cellWidth, 0, labels + x * cellWidth, rows * cellHeight);
    if (cellHeight > 5) for (let y = 1; y < rows; y += 1) stroke(ctx, labels, y * cellHeight, width, y * cellHeight);
    if (cellWidth > 7 && cellHeight > 7) this._cross(ctx, canvas.place, code);

    ctx.font = FONT;
    ctx.fillStyle = ink.text;
    ctx.textBaseline = "middle";
    ctx.textAlign = "right";
    for (let y = 0, every = Math.ceil(13 / cellHeight); y < rows; y += every) {
      ctx.fillText(rowText(y), labels - 6, (y + 0.5) * cellHeight);
    }
    ctx.textBaseline = "top";
    ctx.textAlign = "center";
    ctx.fillText(axis, (labels + width) / 2, rows * cellHeight + 21);
    const ticks = columnTicks((width - labels) / 60).map(([x, text]) => {
      const half = ctx.measureText(text).width / 2;
      return { text, half, at: Math.min(width - half - 1, Math.max(labels + half, labels + (x + 0.5) * cellWidth)) };
    });
    const last = ticks.at(-1);
    let end = -Infinity;
    for (const { text, half, at } of [...ticks.slice(0, -1).filter((tick) => tick.at + tick.half + 5 < last.at - last.half), last]) {
      if (at - half < end + 5) continue;
      ctx.fillText(text, at, rows * cellHeight + 7);
      end = at + half;
    }
    ctx.strokeStyle = ink.strong;
    ctx.lineWidth = 1.5;
    if (chosen[0] !== null) {
      ctx.strokeRect(labels + chosen[0] * cellWidth - 0.75, 0.75, Math.max(1.5, cellWidth), rows * cellHeight - 1.5);
    }
    if (chosen[1] !== null) ctx.strokeRect(labels, chosen[1] * cellHeight + 0.75, width - labels - 1, cellHeight - 1.5);
  }

  /** Marks dead experts with a cross if there is room. */
  _cross(ctx, { labels, cellWidth, cellHeight, columns, rows }, code) {
    ctx.strokeStyle = INK[theme()].card;
    for (let y = 0; y < rows; y += 1) {
      for (let x = 0; x < columns; x += 1) {
        if (code(x, y) === 0) {
          const size = Math.min(cellWidth, cellHeight) / 2 - 2;
          const [cx, cy] = [labels + (x + 0.5) * cellWidth, (y + 0.5) * cellHeight];
          stroke(ctx, cx - size, cy - size, cx + size, cy + size);
          stroke(ctx, cx - size, cy + size, cx + size, cy - size);
        }
      }
    }
  }

  _paintScale() {
    const ratio = devicePixelRatio;
    const [width, height, bar] = [Math.min(360, this._scale.parentElement.clientWidth), 34, 280];
    Object.assign(this._scale, { width: width * ratio, height: height * ratio });
    this._scale.style.width = `${width}px`;
    this._scale.style.height = `${height}px`;
    const ctx = this._scale.getContext("2d");
    ctx.scale(ratio, ratio);
    const ramp = LOAD_COLOURS[theme()];
    for (let x = 0; x < bar; x += 1) {
      ctx.fillStyle = `rgb(${between(ramp, x / (bar - 1)).join(" ")})`;
      ctx.fillRect(x, 2, 1.5, 11);
    }
    ctx.fillStyle = DEAD[theme()];
    ctx.fillRect(bar + 22, 2, 22, 11);
    ctx.font = FONT;
    ctx.fillStyle = INK[theme()].text;
    ctx.textBaseline = "top";
    ["⅛", "¼", "½", "even share", "2×", "4×", "8×"].forEach((text, index) => {
      ctx.textAlign = index === 0 ? "left" : index === 6 ? "right" : "center";
      ctx.fillText(text, index / 6 * bar, 18);
    });
    ctx.textAlign = "center";
    ctx.fillText("dead", bar + 33, 18);
  }

  _listen(canvas, cellOf) {
    const at = (event) => {
      const { labels, cellWidth, cellHeight, columns, rows } = canvas.place ?? {};
      const x = Math.floor((event.offsetX - labels) / cellWidth);
      const y = Math.floor(event.offsetY / cellHeight);
      return x >= 0 && x < columns && y >= 0 && y < rows ? cellOf(x, y) : null;
    };
    canvas.addEventListener("pointermove", (event) => {
      const cell = at(event);
      if (cell) this._tell({ ...this._here(), ...cell });
    });
    canvas.addEventListener("pointerleave", () => this._tell());
    canvas.addEventListener("click", (event) => {
      const cell = at(event);
      if (cell) this._go(canvas, cell);
    });
    canvas.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
      if (!move || !this.run) return;
      event.preventDefault();
      const { columns, rows } = canvas.place;
      const isMap = canvas === this._map;
      const [x, y] = isMap ? [this.cell.expert, this.layer] : [this.frame, this.cell.expert];
      const clamp = (value, count) => Math.min(count - 1, Math.max(0, value));
      this._go(canvas, cellOf(clamp(x + move[0], columns), clamp(y + move[1], rows)));
    });
  }

  _here() { return { layer: this.layer, expert: this.cell.expert, frame: this.frame }; }

  _go(canvas, cell) {
    this.cell = { ...this.cell, ...cell };
    this._onChange({ frame: cell.frame ?? this.frame, layer: cell.layer ?? this.layer });
  }

  /** Shows the load of a cell. */
  _tell({ layer, expert, frame } = this._here()) {
    if (!this.run) return;
    const { experts, frames, log2: [low, high] } = this.run.loads;
    const known = Math.min(expert, experts[layer] - 1);
    const code = this._code(layer, known, frame);
    const share = 2 ** (low + (code - 1) / 253 * (high - low));
    const worth = code === 255 ? "not logged" : code === 0 ? "dead: no token"
      : `${share.toPrecision(3)} × an even share (${format.percent(share / experts[layer])} of the assignments)`;
    this._readout.replaceChildren(
      element("span", {}, `${this._label(layer)}, expert ${known}, ${stepText(frames[frame])}: `, element("b", {}, worth)));
  }
}

/** Returns about `count` round integers, and the last one. */
function wholeTicks(first, last, count) {
  return [...new Set([...niceTicks(first, last, count).filter(Number.isInteger), last])];
}

/** Returns a function of `count`: [column, text] of about that many of the columns, including the last. */
function everyColumn(columns) {
  return (count) => wholeTicks(0, columns - 1, Math.min(columns - 1, 2 * count)).map((x) => [x, String(x)]);
}

/** Returns [frame, text] of the frames of round steps, and of the last. */
function stepColumns(frames, count) {
  const ends = frames.map(([, last]) => last);
  return wholeTicks(frames[0][0], ends[ends.length - 1], count).map((step) => [lowerBound(ends, step), format.integer(step)]);
}

function stepText([first, last]) {
  return first === last ? `step ${format.integer(first)}` : `steps ${format.integer(first)}–${format.integer(last)}`;
}
