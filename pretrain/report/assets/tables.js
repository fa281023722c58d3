// Numbers, events and recipes.

const NUMBERS = [
  ["step", "steps made", format.integer], ["total_steps", "steps of the recipe", format.integer],
  ["loss", "training loss, last", format.loss], ["val/loss", "validation loss, last", format.loss],
  ["best_val_loss", "validation loss, lowest", format.loss], ["best_step", "at step", format.integer],
  ["corpus/unigram_entropy", "unigram entropy", format.loss],
  ["params", "parameters", format.compact], ["active_params", "active parameters", format.compact],
  ["tokens", "tokens", format.compact], ["flops", "FLOPs", format.compact], ["seconds", "time in steps", format.seconds],
  ["world_size", "processes", format.integer],
  ["tokens_per_second", "tokens a second, mean", format.rate], ["step_seconds", "seconds a step, mean", format.seconds],
  ["mfu", "model FLOPs utilization, mean", format.percent],
  ["memory_mb", "memory of rank 0", format.mebibytes], ["grad_norm", "gradient norm, last", format.small],
  ["moe/load_cv", "load imbalance, mean of the layers, last", format.small], ["moe/drop_rate", "drop rate, mean of the layers, last", format.percent],
  ["moe/dead_experts", "dead experts, mean of the layers, last", format.small], ["moe/entropy", "router entropy, mean of the layers, last", format.small],
  ["moe/exchange_bytes", "exchange a step, mean of the layers, last", format.bytes], ["skipped", "steps skipped", format.integer],
];

function head(cells, first) {
  return element("thead", {}, element("tr", {}, element("th", { scope: "col" }, first), ...cells));
}

function runHeads(runs, attributes = {}) {
  return runs.map((run) => element("th", { scope: "col", ...attributes }, dot(runColour(run.index)), ` ${run.name}`));
}

/** One run's numbers as tiles, those of several as a table. */
function drawNumbers(card, runs) {
  const alone = runs.length === 1 ? runs[0].summary : null;
  card.classList.toggle("tiles", Boolean(alone));
  if (alone) {
    card.replaceChildren(...NUMBERS.filter(([key]) => alone[key] !== undefined).map(([key, label, text]) =>
      element("dl", {}, element("dt", {}, label), element("dd", {}, text(alone[key])))));
    return;
  }
  const table = element("table", { id: "final" });
  const rows = NUMBERS.filter(([key]) => runs.some((run) => run.summary[key] !== undefined)).map(([key, label, text]) =>
    element("tr", {}, element("th", { scope: "row" }, label), ...runs.map((run) => {
      const value = run.summary[key];
      return element("td", { class: "number" }, value === undefined ? "–" : text(value));
    })));
  table.replaceChildren(head(runHeads(runs, { class: "number" }), "last step logged"), element("tbody", {}, ...rows));
  card.replaceChildren(table);
}

function drawEvents(table, runs, withSaves) {
  const events = runs.flatMap((run) => run.events.map((event) => ({ run, ...event })))
    .filter((event) => withSaves || event.kind !== "save")
    .sort((a, b) => (a.time ?? 0) - (b.time ?? 0) || a.step - b.step);
  const shown = events.slice(-1000);
  const rows = shown.map((event) => element("tr", { class: event.lost ? "lost" : "" },
    element("td", { class: "number" }, format.integer(event.step)),
    element("td", { class: "kind" }, `${event.kind}${event.lost ? " (gone back)" : ""}`),
    element("td", { class: "long" }, event.text),
    element("td", {}, dot(runColour(event.run.index)), ` ${event.run.name}`),
    element("td", { class: "kind" }, event.time === null ? "–" : new Date(1000 * event.time).toLocaleString())));
  const heads = ["kind", "what", "run", "when"].map((name) => element("th", { scope: "col" }, name));
  if (events.length > shown.length) rows.unshift(element("tr", {}, element("td", { colspan: "5" }, `${events.length - shown.length} earlier ones are left out`)));
  if (!rows.length) rows.push(element("tr", {}, element("td", { colspan: "5" }, "none")));
  const first = head(heads, "step");
  first.querySelector("th").className = "number";
  table.replaceChildren(first, element("tbody", {}, ...rows));
}

/** Keys of the recipes, those that differ marked; returns how many do. */
function drawRecipe(table, runs, { differing, find }) {
  const known = runs.filter((run) => Object.keys(run.recipe).length);
  const keys = [...new Set(known.flatMap((run) => Object.keys(run.recipe)))];
  const differs = (key) => known.some((run) => run.recipe[key] !== known[0].recipe[key]);
  const rows = keys.filter((key) => key.includes(find) && (!differing || differs(key))).map((key) =>
    element("tr", { class: differs(key) ? "differs" : "" }, element("th", { scope: "row" }, (differs(key) ? "≠ " : "") + key),
      ...known.map((run) => element("td", {}, run.recipe[key] ?? "–"))));
  if (!rows.length) {
    const why = !known.length ? "no run has a config.toml" : differing ? "the recipes are the same" : "no such key";
    rows.push(element("tr", {}, element("td", { colspan: String(1 + known.length) }, why)));
  }
  table.replaceChildren(head(runHeads(known), "key"), element("tbody", {}, ...rows));
}
