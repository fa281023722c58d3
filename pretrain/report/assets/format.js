// Formats of numbers.

const SI = [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

function trim(text) {
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}

/** Rounds to `digits` digits without an exponent: 210, not 2.1e+2. */
function plain(value, digits) {
  return String(Number(value.toPrecision(digits)));
}

/** Escapes control characters and direction marks. */
function visible(text) {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]/gu,
    (letter) => `\\u${letter.codePointAt(0).toString(16).padStart(4, "0")}`);
}

/** Formats with an SI letter: 10.4M. */
function compact(value, digits = 3) {
  for (const [size, letter] of SI) {
    if (Math.abs(value) >= size * 0.9995) return plain(value / size, digits) + letter;
  }
  return small(value, digits);
}

function small(value, digits = 4) {
  if (value === 0) return "0";
  if (Math.abs(value) >= 1e-3) return plain(value, digits);
  const [mantissa, power] = value.toExponential(digits - 1).split("e");
  return `${trim(mantissa)}e${power}`;
}

const format = {
  integer: (v) => Math.round(v).toLocaleString("en-US"),
  loss: (v) => v.toFixed(4),
  compact,
  rate: (v, digits = 4) => compact(v, digits) + "/s",
  small,
  percent: (v, digits = 3) => plain(100 * v, digits) + " %",
  mebibytes: (v, digits) => bytes(v * 2 ** 20, digits),
  bytes,
  seconds: duration,
};

function bytes(value, digits = 3) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let index = 0;
  while (Math.abs(value) >= 1024 && index < units.length - 1) { value /= 1024; index += 1; }
  return plain(value, value >= 1000 ? Math.max(4, digits) : digits) + " " + units[index];
}

/** Formats seconds: 3 h 20 min. */
function duration(value, digits = 3) {
  if (value === 0) return "0 s";
  if (value < 1) return plain(1000 * value, digits) + " ms";
  if (value < 120) return plain(value, digits) + " s";
  const minutes = Math.round(value / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.round(minutes / 60 * 10) / 10;
  if (hours < 48) return `${trim(hours.toFixed(1))} h`;
  return `${trim((hours / 24).toFixed(1))} d`;
}

/** Returns tick labels with as few digits as possible; a label that repeats is empty. */
function tickTexts(ticks, text) {
  let texts = [];
  for (let digits = 2; digits <= 7; digits += 1) {
    texts = ticks.map((tick) => text(tick, digits));
    if (new Set(texts).size === ticks.length && ticks.every((tick) => near(tick, digits))) break;
  }
  return texts.map((found, index) => (texts.indexOf(found) === index ? found : ""));
}

/** Returns whether `digits` digits are enough for a number, to a millionth. */
function near(value, digits) {
  return Math.abs(Number(value.toPrecision(digits)) - value) <= 1e-6 * Math.abs(value);
}

/** Returns about `count` ticks at round numbers, at least `least` apart. */
function niceTicks(low, high, count, least = 0) {
  if (!(high > low)) return [low];
  const raw = Math.max(least, (high - low) / Math.max(1, count));
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const ticks = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) {
    ticks.push(Number(tick.toPrecision(12)));
  }
  return ticks;
}

/** Returns ticks of a logarithmic axis: powers of ten, with 2 and 5 if they fit; round numbers within a decade. */
function logTicks(low, high, count) {
  const decades = Math.log10(high / low);
  if (decades < 1) return niceTicks(low, high, count);
  const factors = decades < 2.5 ? [1, 2, 5] : [1];
  const every = Math.max(1, Math.ceil(decades / Math.max(2, count)));
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += every) {
    for (const factor of factors) {
      const tick = Number((factor * 10 ** power).toPrecision(3));
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  return ticks;
}
