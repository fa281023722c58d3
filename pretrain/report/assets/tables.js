// Tables of figures, events and recipes.

// Figures of a run beside its metrics.
const FIRST = [["step", "steps completed", format.integer], ["total_steps", "steps in the recipe", format.integer]];
const REST = [
  ["best_val_loss", "validation loss, lowest", format.loss], ["best_step", "step of the lowest validation loss", format.integer],
  ["params", "parameters", format.compact], ["active_params", "active parameters", format.compact],
  ["seconds", "time spent in steps", format.seconds], ["world_size", "processes", format.integer],
  ["skipped", "steps skipped", format.integer],
];

/** [name, label, format] of every figure. */
function figures() {
  const metrics = [...model.metrics.keys()].map(declared).filter(({ figure }) => figure);
  return [...FIRST, ...metrics.map(({ name, figure, format, read }) => [name, figure, read ?? format]), ...REST];
}

function head(cells, first) {
  return element("thead", {}, element("tr", {}, element("th", { scope: "col" }, first), ...cells));
}

function runName(run) {
  return [dot(runColour(run.index)), " ", element("span", { class: "run" }, run.name)];
}

/** Returns a figure's elements: value, range of a group, and the last finite step of a series that is not finite. */
function worth(run, key, text) {
  if (run.summary[key] === undefined) return ["–"];
  const [low, high] = (run.spread?.[key] ?? [0, 0]).map((value) => text(value));
  const parts = [text(run.summary[key])];
  if (low !== high) parts.push(element("div", { class: "spread" }, `${low} – ${high}`));
  if (run.lost[key] !== undefined) parts.push(element("div", { class: "lost" }, `at step ${format.integer(run.lost[key])}, then not finite`));
  return parts;
}

/** Sorts runs by a figure, those without it last; without a figure, keeps their order. */
function sorted(runs, { key, isUp }) {
  if (key === null) return runs;
  const of = (run) => (key === "name" ? run.name : run.summary[key]);
  const compare = (a, b) => (key === "name" ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
  const known = runs.filter((run) => of(run) !== undefined).sort((a, b) => (isUp ? 1 : -1) * compare(of(a), of(b)));
  return [...known, ...runs.filter((run) => of(run) === undefined)];
}

/** Draws the figures: tiles for one run, else a table with a column per run, or a row per run if there are many.
 * onSort(key) is called on a click on a figure's name. */
function drawNumbers(card, runs, order, onSort) {
  const known = figures().filter(([key]) => runs.some((run) => run.summary[key] !== undefined));
  card.classList.toggle("tiles", runs.length === 1);
  if (runs.length === 1) {
    card.replaceChildren(...known.map(([key, label, text]) =>
      element("dl", {}, element("dt", {}, label), element("dd", {}, ...worth(runs[0], key, text)))));
    return;
  }
  const sorter = (key, label, scope) => {
    const button = element("button", { type: "button", "data-key": key, title: "sort the runs by this figure" }, label);
    button.addEventListener("click", () => onSort(key));
    const sort = order.key === key ? (order.isUp ? "ascending" : "descending") : "none";
    return element("th", { scope, "aria-sort": sort, class: key === "name" || scope === "row" ? "" : "number" }, button);
  };
  const cell = (run, key, text) => element("td", { class: "number" }, ...worth(run, key, text));
  const list = sorted(runs, order);
  const isWide = list.length <= FEW;
  const heads = isWide ? list.map((run) => element("th", { scope: "col", class: "number" }, ...runName(run)))
    : known.map(([key, label]) => sorter(key, label, "col"));
  const rows = isWide
    ? known.map(([key, label, text]) => element("tr", {}, sorter(key, label, "row"), ...list.map((run) => cell(run, key, text))))
    : list.map((run) => element("tr", {}, element("th", { scope: "row" }, ...runName(run)), ...known.map(([key, , text]) => cell(run, key, text))));
  const focused = card.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  card.replaceChildren(element("table", { id: "final", class: isWide ? "few" : "many" },
    element("thead", {}, element("tr", {}, sorter("name", "run", "col"), ...heads)), element("tbody", {}, ...rows)));
  if (focused !== undefined) card.querySelector(`button[data-key="${focused}"]`)?.focus({ preventScroll: true });
}

function drawEvents(table, runs, withSaves) {
  const events = runs.flatMap((run) => run.runs).flatMap((run) => run.events.map((event) => ({ run, ...event })))
    .filter((event) => withSaves || event.kind !== "save")
    .sort((a, b) => (a.time ?? 0) - (b.time ?? 0) || a.step - b.step);
  const shown = events.slice(-1000);
  const rows = shown.map((event) => element("tr", { class: event.lost ? "lost" : "" },
    element("td", { class: "number" }, format.integer(event.step)),
    element("td", { class: "kind" }, `${event.kind}${event.lost ? " (undone by a resume)" : ""}`),
    element("td", { class: "long" }, event.text),
    element("td", {}, ...runName(event.run)),
    element("td", { class: "kind" }, event.time === null ? "–" : new Date(1000 * event.time).toLocaleString())));
  const heads = ["kind", "what", "run", "when"].map((name) => element("th", { scope: "col" }, name));
  if (events.length > shown.length) rows.unshift(element("tr", {}, element("td", { colspan: "5" }, `${events.length - shown.length} earlier events are not shown`)));
  if (!rows.length) rows.push(element("tr", {}, element("td", { colspan: "5" }, "none")));
  const first = head(heads, "step");
  first.querySelector("th").className = "number";
  table.replaceChildren(first, element("tbody", {}, ...rows));
}

/** Draws the keys of the recipes and marks those that differ. */
function drawRecipe(table, runs, { differing, find }) {
  const known = runs.filter((run) => Object.keys(run.recipe).length);
  const keys = [...new Set(known.flatMap((run) => Object.keys(run.recipe)))];
  const differs = (key) => known.some((run) => run.recipe[key] !== known[0].recipe[key]);
  const rows = keys.filter((key) => key.includes(find) && (!differing || differs(key))).map((key) =>
    element("tr", { class: differs(key) ? "differs" : "" }, element("th", { scope: "row" }, (differs(key) ? "≠ " : "") + key),
      ...known.map((run) => element("td", {}, run.recipe[key] ?? "–"))));
  if (!rows.length) {
    const why = !known.length ? "no run has a config.toml" : differing ? "the recipes are the same" : "no key matches";
    rows.push(element("tr", {}, element("td", { colspan: String(1 + known.length) }, why)));
  }
  const heads = known.map((run) => element("th", { scope: "col" }, ...runName(run)));
  table.replaceChildren(head(heads, "key"), element("tbody", {}, ...rows));
}
