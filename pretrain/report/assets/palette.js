// Colours for both themes. Runs, and up to 8 layers, have the colour-blind safe palette of Okabe and Ito, which repeats
// with three dash patterns.

const RUN_COLOURS = {
  light: ["#0072b2", "#d55e00", "#009e73", "#b0508a", "#4a4a4a", "#b37d00", "#3d9bd1"],
  dark: ["#56b4e9", "#ff9447", "#2ccf9f", "#e79cc6", "#c9ced6", "#f0c24b", "#8f9dff"],
};
// Load: below, at and above an even share.
const LOAD_COLOURS = {
  light: ["#08519c", "#3182bd", "#9ecae1", "#f3f3f1", "#fdbe85", "#e6550d", "#8c2d04"],
  dark: ["#8accff", "#3b8fd6", "#1f4f7d", "#252a31", "#7d4518", "#e07b2a", "#ffc794"],
};
const DEAD = { light: "#c2187a", dark: "#ff5cb8" };
// Ramp over many layers (cividis).
const LAYER_COLOURS = {
  light: ["#00306f", "#35486e", "#575d6d", "#747475", "#8f8c78", "#b1a26f", "#c9a200"],
  dark: ["#4f8ee0", "#6f9bd0", "#8ea9bf", "#a9b3a8", "#c4bd8c", "#dec96b", "#fde74c"],
};
const INK = {
  light: { text: "#59636f", grid: "#e9ecf0", card: "#ffffff", strong: "#1b2027" },
  dark: { text: "#9aa5b3", grid: "#262c34", card: "#171b21", strong: "#e6e9ee" },
};
const EVENT_COLOURS = {
  light: { save: "#8a94a1", start: "#8a94a1", end: "#8a94a1", resume: "#0b62a8", stop: "#0b62a8", skip: "#b34700",
    warning: "#8a6100", error: "#c00030" },
  dark: { save: "#77828f", start: "#77828f", end: "#77828f", resume: "#6cb6f5", stop: "#6cb6f5", skip: "#ff9447",
    warning: "#f0c24b", error: "#ff6b81" },
};
const LOAD_LIMIT = 3; // powers of two to either side of an even share

function theme() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen === "light" || chosen === "dark") return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

function runColour(index) {
  const colours = RUN_COLOURS[theme()];
  return colours[index % colours.length];
}

function runDash(index) {
  return [undefined, [8, 4], [2, 3], [12, 3, 2, 3]][Math.floor(index / RUN_COLOURS.light.length) % 4];
}

function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

/** Interpolates a colour ramp, as [r, g, b]. */
function between(ramp, share) {
  const place = Math.min(1, Math.max(0, share)) * (ramp.length - 1);
  const index = Math.min(ramp.length - 2, Math.floor(place));
  const [a, b] = [rgb(ramp[index]), rgb(ramp[index + 1])];
  return a.map((value, i) => Math.round(value + (b[i] - value) * (place - index)));
}

function layerColour(index, count) {
  return `rgb(${between(LAYER_COLOURS[theme()], count < 2 ? 0 : index / (count - 1)).join(" ")})`;
}

/** Returns the colours of the 256 load codes, as [r, g, b, a]. */
function loadColours([low, high]) {
  const ramp = LOAD_COLOURS[theme()];
  const colours = [[...rgb(DEAD[theme()]), 255]];
  for (let code = 1; code < 255; code += 1) {
    const power = low + (code - 1) / 253 * (high - low);
    colours.push([...between(ramp, (power + LOAD_LIMIT) / (2 * LOAD_LIMIT)), 255]);
  }
  return [...colours, [0, 0, 0, 0]];
}
