"use strict";

// The computations of a page of results: axis coordinates and ticks, zoom, number formatting, CSV, sorting, without the
// DOM. Ranges of axes are in the axis's own coordinate: the value, or its decimal logarithm.

/** The coordinate of a value; NaN if it cannot be shown on the axis. */
function place(value, log) {
  if (value === null || value === undefined) return NaN;
  return log ? (value > 0 ? Math.log10(value) : NaN) : value;
}

/** A number on an axis whose ticks are `step` apart, with just enough digits to distinguish two ticks. */
function tickText(value, step) {
  const size = Math.abs(value);
  if (size < step * 1e-6) return "0";
  if (size >= 1e9 && step >= 1e7) return `${tickText(value / 1e9, step / 1e9)} G`;
  if (size >= 1e6 && step >= 1e4) return `${tickText(value / 1e6, step / 1e6)} M`;
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  if (digits > 5) return value.toExponential(Math.max(0, digits + Math.floor(Math.log10(size) + 1e-9)));
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

/** A number with five significant digits. */
function numberText(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e12)) return value.toExponential(3);
  return Number(value.toPrecision(5)).toLocaleString("en-US", { maximumFractionDigits: 9 });
}

/** A value with its axis label: "TTFT, ms" and 12 give "TTFT 12 ms"; "ms" and 12 give "12 ms". */
function valueText(label, value) {
  const comma = label.indexOf(",");
  if (comma < 0) return /^[mµ]?s$|^%|\/s$/.test(label) ? `${numberText(value)} ${label}` : `${label} ${numberText(value)}`;
  return `${label.slice(0, comma)} ${numberText(value)} ${label.slice(comma + 1).trim()}`;
}

/** The distance between ticks: 1, 2 or 5 times a power of ten, so that at most `most` fit between low and high. */
function stepOf(low, high, most) {
  const rough = (high - low) / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((times) => times * power >= rough * (1 - 1e-9));
}

function evenTicks(low, high, most, whole) {
  const step = Math.max(whole ? 1 : 0, stepOf(low, high, most));
  const found = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) {
    const at = Number((n * step).toPrecision(12));
    found.push({ at, text: tickText(at, step) });
  }
  return found;
}

/**
 * Ticks of a range: positions and texts; a tick without text is a grid line only.
 * whole: the values are integers, so ticks are too.
 */
function ticks([low, high], log, most, whole = false) {
  if (!log) return evenTicks(low, high, most, whole);
  if (high - low < 0.7) {
    return evenTicks(10 ** low, 10 ** high, most, whole).map(({ at, text }) => ({ at: Math.log10(at), text }));
  }
  const stride = Math.max(1, Math.ceil((high - low) / Math.max(1, most)));
  const named = 3 * (high - low) <= most + 1 ? [1, 2, 5] : [1];
  const found = [];
  for (let power = Math.floor(low); power <= Math.ceil(high); power++) {
    for (const digit of stride === 1 ? [1, 2, 3, 4, 5, 6, 7, 8, 9] : [1]) {
      const at = power + Math.log10(digit);
      if (at < low - 1e-9 || at > high + 1e-9) continue;
      const value = Number((digit * 10 ** power).toPrecision(3));
      found.push({ at, text: named.includes(digit) && power % stride === 0 ? tickText(value, value) : "" });
    }
  }
  return found;
}

/** The range of all values with a margin; it starts at zero if the least value is below `near` times the largest. */
function rangeOf(values, log, near) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    const at = place(value, log);
    if (at < low) low = at;
    if (at > high) high = at;
  }
  if (low > high || (low === 0 && high === 0 && !log && near > 0)) return [0, 1];
  if (!log && low > 0 && low <= near * high) low = 0;
  if (!log && high < 0 && high >= near * low) high = 0;
  const margin = (high - low) * 0.05 || (log ? 0.2 : Math.abs(high) * 0.1 || 1);
  const end = (value, by) => (value === 0 && !log && near > 0 ? 0 : value + by);
  return [end(low, -margin), end(high, margin)];
}

/** The range moved, and cut if too long, to fit into `home`; at least a millionth of its length. */
function within([low, high], home) {
  const whole = home[1] - home[0];
  const span = Math.max(high - low, whole * 1e-6);
  if (span >= whole) return [...home];
  const start = Math.min(Math.max((low + high - span) / 2, home[0]), home[1] - span);
  return [start, start + span];
}

/** The range scaled by `factor` around `at`, within `home`. */
function zoomed([low, high], at, factor, home) {
  return within([at - (at - low) * factor, at + (high - at) * factor], home);
}

/** The visible points of a line: of many points in one pixel column, the first, lowest, highest and last. */
function thinned(points, width) {
  if (points.length < 4 * width) return points;
  const found = [];
  let column = [];
  const close = () => {
    if (column.length === 0) return;
    const byHeight = [...column].sort((a, b) => a.py - b.py);
    const kept = new Set([column[0], byHeight[0], byHeight[byHeight.length - 1], column[column.length - 1]]);
    found.push(...column.filter((point) => kept.has(point)));
    column = [];
  };
  for (const point of points) {
    const gap = Number.isNaN(point.py);
    if (gap || (column.length && Math.floor(point.px) !== Math.floor(column[0].px))) close();
    if (gap) found.push(point);
    else column.push(point);
  }
  close();
  return found;
}

function csvCell(value) {
  if (typeof value === "number") return String(value);
  // A spreadsheet would evaluate text that starts like a formula.
  const text = /^[=+\-@\t\r]./.test(value) && !/^[-+]?[\d.,]+( ?%)?$/.test(value) ? `'${value}` : value;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function csvOf(rows) {
  return rows.map((row) => row.map((cell) => csvCell(cell ?? "")).join(",")).join("\r\n") + "\r\n";
}

/** A plot's points as CSV, one per row. */
function plotCsv(plot) {
  const rows = [["series", plot.x_label, plot.y_label, "low", "high", "label"]];
  for (const one of plot.series) {
    one.x.forEach((x, i) => rows.push([one.name, x, one.y[i], one.low[i], one.high[i], one.labels[i]]));
  }
  return csvOf(rows);
}

/** The number at the start of a cell, such as 1234.5 in "1,234.5 ms"; NaN if there is none. */
function cellNumber(cell) {
  const found = /^[±]?([-+−]?)(\d[\d,]*\.?\d*(?:e[-+]?\d+)?|\.\d+)/i.exec(cell.trim());
  return found ? Number(found[2].replaceAll(",", "")) * (found[1] === "-" || found[1] === "−" ? -1 : 1) : NaN;
}

/** Whether a column is numeric, such as "1,234", "12 %" or "3 of 10": all non-empty cells are, and there is one. */
function isNumeric(cells) {
  const said = cells.map((cell) => cell.trim()).filter((cell) => !/^[-–—]?$/.test(cell));
  return said.length > 0 && said.every((cell) => /^[±]?[-+−]?[\d.][\d.,]*(e[-+]?\d+)?( ?[^\s\d,]{1,10}| of [\d,]+)?$/i.test(cell));
}

/** The rows sorted by one column, numerically if it is numeric; empty cells come last in both directions. */
function sorted(rows, column, descending) {
  const numeric = isNumeric(rows.map((row) => row[column]));
  const sign = descending ? -1 : 1;
  const key = (row) => (numeric ? cellNumber(row[column]) : row[column].trim() || NaN);
  return [...rows].sort((a, b) => {
    const [one, other] = [key(a), key(b)];
    if (Number.isNaN(one) || Number.isNaN(other)) return Number.isNaN(one) - Number.isNaN(other);
    return sign * (numeric ? one - other : one.localeCompare(other, "en", { numeric: true }));
  });
}

if (typeof module !== "undefined") {
  module.exports = {
    place, tickText, numberText, valueText, ticks, rangeOf, within, zoomed, thinned, csvOf, plotCsv, cellNumber, sorted,
  };
}
