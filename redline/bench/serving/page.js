"use strict";

// Draws the page's sections from its embedded JSON. All text becomes text nodes, never markup.
// page_numbers.js precedes this file in the same script.

const COLOURS = 7;
const DASHES = ["", "7 4", "2 3", "9 3 2 3"];

/** An element with attributes and children; a string child becomes a text node. */
function html(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null));
  return element;
}

const textWidth = (text) => 6.6 * text.length; // estimate at 12 px
const px = (value) => Math.round(value * 10) / 10;

/** A marker around (x, y) that distinguishes series without colour: disc, square, triangle, diamond. */
function shape(kind, x, y, r) {
  [x, y] = [px(x), px(y)];
  if (kind === 1) return `M${px(x - r)} ${px(y - r)}h${2 * r}v${2 * r}h${-2 * r}z`;
  if (kind === 2) return `M${x} ${px(y - 1.3 * r)}l${1.3 * r} ${2.3 * r}h${-2.6 * r}z`;
  if (kind === 3) return `M${x} ${px(y - 1.4 * r)}l${1.4 * r} ${1.4 * r}l${-1.4 * r} ${1.4 * r}l${-1.4 * r} ${-1.4 * r}z`;
  return `M${px(x - r)} ${y}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0`;
}

function saveFile(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  html("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

/** Copies a text and shows "Copied" on the button; if copying is not permitted, saves the text as a file. */
async function copy(button, name, text) {
  try {
    await navigator.clipboard.writeText(text);
    const before = button.textContent;
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = before), 1500);
  } catch {
    saveFile(name, "text/csv", text);
  }
}

function fileName(title, ending) {
  return `${title.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 60) || "plot"}.${ending}`;
}

function tool(text, title, act) {
  return html("button", { type: "button", title, onclick: act }, text);
}

/** One plot. `view` is the visible range, `home` the full one: both {x: range, y: range}. */
class Chart {
  constructor(plot) {
    this.plot = plot;
    this.hidden = new Set();
    this.pointers = new Map();
    this.current = null; // the point of the tooltip
    this.reset = tool("Reset zoom", "Show the full range (double click, or the key 0)", () => this.show(null));
    const csv = tool("Copy CSV", "Copy the plot's data as CSV", () =>
      copy(csv, fileName(plot.title, "csv"), plotCsv(plot)));
    const image = tool("Save SVG", "Save the visible plot", () => this.save());
    this.svg = svg("svg", {
      class: "chart", tabindex: 0, role: "application", "aria-label":
        `${plot.title}. Left and right select points, up and down another series, plus and minus zoom, ` +
        "shift and arrows move the view, 0 shows the full range.",
    });
    this.tip = html("div", { class: "tip", role: "status", hidden: true });
    this.figure = html("figure", {},
      html("div", { class: "head" }, html("h3", {}, plot.title),
        html("span", { class: "tools" }, this.reset, csv, image)),
      plot.series.length > 1 ? this.legend() : null, this.svg, this.tip,
      plot.note ? html("figcaption", { class: "note" }, plot.note) : null);
    this.listen();
    new ResizeObserver(() => requestAnimationFrame(() => this.resize())).observe(this.figure);
  }

  legend() {
    return html("div", { class: "legend", role: "group", "aria-label": "Series" }, ...this.plot.series.map((one, i) => {
      const button = html("button", { type: "button", "aria-pressed": "true", title: "Show or hide" },
        svg("svg", { width: 22, height: 10, "aria-hidden": "true" },
          one.style === "points" || one.style === "bars" ? null : svg("path", { d: "M0 5H22", ...this.stroke(i) }),
          one.style === "line" || one.style === "steps" ? null :
            svg("path", { d: shape(i % 4, 11, 5, 3.5), class: `points s${i % COLOURS}` })),
        one.name);
      button.addEventListener("click", () => {
        if (!this.hidden.delete(i)) this.hidden.add(i);
        button.setAttribute("aria-pressed", String(!this.hidden.has(i)));
        this.measure();
      });
      return button;
    }));
  }

  /** The colour of a series; further series repeat the colours with another dash pattern. */
  stroke(i) {
    const dash = DASHES[Math.floor(i / COLOURS) % DASHES.length];
    return { class: `line s${i % COLOURS}`, ...(dash && { "stroke-dasharray": dash }) };
  }

  /** Computes the full range from the visible series; a zoomed view is kept. */
  measure() {
    const { plot } = this;
    const seen = plot.series.filter((_, i) => !this.hidden.has(i));
    const bars = seen.filter((one) => one.style === "bars");
    const width = this.barWidth(bars);
    const xs = [...seen.flatMap((one) => one.x), ...plot.marks.map((mark) => mark.x)];
    const ys = [...seen.flatMap((one) => [...one.y, ...one.low, ...one.high]), ...plot.marks.map((mark) => mark.y)];
    // Lines and bars start at zero: otherwise small differences would look large.
    const near = seen.every((one) => one.style === "points") ? 0.5 : 1;
    const home = { x: rangeOf(xs, plot.log_x, bars.length ? 0 : 0.2), y: rangeOf(ys, plot.log_y, near) };
    if (bars.length) home.x = [home.x[0] - width / 3, home.x[1] + width / 3];
    const chosen = this.view && this.isZoomed();
    this.home = home;
    const countable = (values) => values.every((value) => value == null || Number.isInteger(value));
    this.whole = { x: countable(xs), y: countable(ys) };
    this.show(chosen ? { x: within(this.view.x, home.x), y: within(this.view.y, home.y) } : null);
  }

  /** The width for the bars at one position: the least distance between two positions. */
  barWidth(bars) {
    const at = [...new Set(bars.flatMap((one) => one.x.map((x) => place(x, this.plot.log_x))))].filter(Number.isFinite);
    at.sort((a, b) => a - b);
    const least = Math.min(...at.slice(1).map((x, i) => x - at[i]));
    return Number.isFinite(least) ? least : 1;
  }

  isZoomed() {
    return ["x", "y"].some((axis) => this.view[axis].some((end, i) => end !== this.home[axis][i]));
  }

  show(view) {
    this.view = view ?? { x: [...this.home.x], y: [...this.home.y] };
    this.reset.hidden = !this.isZoomed();
    this.point(null);
    this.draw();
  }

  resize() {
    const width = Math.round(this.figure.clientWidth);
    if (!width || width === this.width) return;
    this.width = width;
    this.height = Math.round(Math.min(380, Math.max(240, width * 0.5)));
    if (this.home) this.draw();
    else this.measure();
  }

  x(at) { return ((at - this.view.x[0]) / (this.view.x[1] - this.view.x[0])) * this.inner.width; }

  y(at) { return (1 - (at - this.view.y[0]) / (this.view.y[1] - this.view.y[0])) * this.inner.height; }

  draw() {
    if (!this.width) return;
    const { plot, view } = this;
    const yTicks = ticks(view.y, plot.log_y, Math.floor(this.height / 45), this.whole.y);
    const longest = Math.max(1, ...yTicks.map((tick) => tick.text.length));
    this.inner = { left: 10 + 7 * longest, top: 24, height: this.height - 24 - 44 };
    this.inner.width = this.width - this.inner.left - 14;
    const { left, top, width, height } = this.inner;
    const named = plot.series.find((one) => one.style === "bars" && one.labels.length);
    const xTicks = named
      ? named.x.map((at, n) => ({ at, text: named.labels[n] })).filter((tick) => tick.at >= view.x[0] && tick.at <= view.x[1])
      : ticks(view.x, plot.log_x, Math.floor(width / 65), this.whole.x);
    const grid = xTicks.map((tick) => `M${px(this.x(tick.at))} 0V${height}`)
      .concat(yTicks.map((tick) => `M0 ${px(this.y(tick.at))}H${width}`)).join("");
    this.locate();
    const area = svg("svg", { class: "area", x: left, y: top, width, height },
      svg("rect", { width, height, fill: "transparent" }), svg("path", { class: "grid", d: grid }),
      ...plot.series.flatMap((one, i) => (this.hidden.has(i) ? [] : this.series(one, i))), ...this.marks());
    this.over = svg("g");
    area.append(this.over);
    const frame = svg("path", { class: "axis", d: `M${left} ${top}V${top + height}H${left + width}` });
    const texts = [
      ...yTicks.map((tick) => svg("text", { x: left - 7, y: px(top + this.y(tick.at) + 4), "text-anchor": "end" }, tick.text)),
      ...xTicks.map((tick) => svg("text", { x: px(left + this.x(tick.at)), y: top + height + 17, "text-anchor": "middle" },
        tick.text)),
      svg("text", { x: 0, y: 12 }, plot.y_label),
      svg("text", { x: left + width, y: top + height + 37, "text-anchor": "end" }, plot.x_label),
    ];
    if (!this.points.some((points) => points.some((one) => !Number.isNaN(one.py)))) {
      texts.push(svg("text", { x: left + width / 2, y: top + height / 2, "text-anchor": "middle" }, "nothing to show"));
    }
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    this.svg.replaceChildren(area, frame, ...texts);
  }

  /** The pixel positions of all points; NaN for a gap. Bars of several series are placed next to each other. */
  locate() {
    const { plot } = this;
    const bars = plot.series.map((one, i) => i).filter((i) => plot.series[i].style === "bars" && !this.hidden.has(i));
    const room = this.barWidth(bars.map((i) => plot.series[i])) * 0.84;
    this.bar = (room / Math.max(1, bars.length) / (this.view.x[1] - this.view.x[0])) * this.inner.width;
    this.base = plot.log_y ? this.inner.height : Math.min(Math.max(this.y(0), 0), this.inner.height);
    this.points = plot.series.map((one, i) => this.hidden.has(i) ? [] : one.x.map((x, n) => {
      const shift = one.style === "bars" ? (bars.indexOf(i) - (bars.length - 1) / 2) * this.bar : 0;
      const pixel = (value) => this.y(place(value, plot.log_y));
      const at = this.x(place(x, plot.log_x)) + shift;
      const py = Number.isNaN(at) ? NaN : pixel(one.y[n]);
      return { series: i, n, px: at, py, low: pixel(one.low[n]), high: pixel(one.high[n]) };
    }));
  }

  series(one, i) {
    const [points, width] = [this.points[i], this.inner.width];
    const bound = (value) => Math.min(Math.max(value, -1e4), 1e4); // SVG paths cannot contain arbitrarily large numbers
    const seen = points.filter((point) => !Number.isNaN(point.py) && point.px > -9 - this.bar && point.px < width + 9 + this.bar);
    const colour = `s${i % COLOURS}`;
    const found = [];
    const spread = seen.filter((point) => !Number.isNaN(point.low) && !Number.isNaN(point.high));
    if (spread.length && (one.style === "line" || one.style === "line and points")) {
      const upper = points.filter((point) => !Number.isNaN(point.low) && !Number.isNaN(point.high));
      const corner = (key) => (point) => `${px(bound(point.px))} ${px(bound(point[key]))}`;
      const ring = [...upper.map(corner("high")), ...upper.reverse().map(corner("low"))];
      found.push(svg("path", { class: `band ${colour}`, d: `M${ring.join("L")}z` }));
    }
    if (one.style === "bars") {
      const box = (point) => `M${px(point.px - this.bar / 2)} ${px(this.base)}V${px(bound(point.py))}h${px(Math.max(1, this.bar - 1))}V${px(this.base)}z`;
      found.push(svg("path", { class: `bars ${colour}`, d: seen.map(box).join("") }));
    }
    if (spread.length && (one.style === "bars" || one.style === "points")) {
      const whisker = (point) => `M${px(point.px)} ${px(bound(point.low))}V${px(bound(point.high))}`;
      const kind = one.style === "bars" ? "whiskers over" : `whiskers ${colour}`;
      found.push(svg("path", { class: kind, d: spread.map(whisker).join("") }));
    }
    if (one.style !== "points" && one.style !== "bars") {
      let after = false;
      const path = thinned(points, width).map((point) => {
        const [x, y, joined] = [px(bound(point.px)), px(bound(point.py)), after];
        after = !Number.isNaN(point.py);
        if (!after) return "";
        return joined ? (one.style === "steps" ? `H${x}V${y}` : `L${x} ${y}`) : `M${x} ${y}`;
      });
      found.push(svg("path", { ...this.stroke(i), d: path.join("") }));
    }
    const alone = one.style === "line" && seen.length < 2; // a line of one point would be invisible
    if (one.style === "points" || one.style === "line and points" || alone) {
      const many = seen.length > 150;
      const places = new Map(seen.map((point) => [`${Math.round(2 * point.px)} ${Math.round(2 * point.py)}`, point]));
      const dots = [...places.values()].map((point) => shape(i % 4, point.px, bound(point.py), many ? (seen.length > 1000 ? 1.6 : 2.3) : 3.25));
      found.push(svg("path", { class: `points ${colour}${many ? " many" : ""}`, d: dots.join("") }));
    }
    return found;
  }

  marks() {
    const { plot, inner } = this;
    let line = 0;
    return plot.marks.flatMap((mark) => {
      const [x, y] = [this.x(place(mark.x, plot.log_x)), this.y(place(mark.y, plot.log_y))];
      const [hasX, hasY] = [!Number.isNaN(x), !Number.isNaN(y)];
      if (!hasX && !hasY) return [];
      if ((hasX && (x < 0 || x > inner.width)) || (hasY && (y < 0 || y > inner.height))) return [];
      const left = hasX && x + 16 + textWidth(mark.text) > inner.width && x > inner.width / 2;
      const path = hasX && hasY ? `M${x - 8} ${y}a8 8 0 1 0 16 0a8 8 0 1 0 -16 0`
        : hasX ? `M${x} 0V${inner.height}` : `M0 ${y}H${inner.width}`;
      const at = hasX && hasY ? { x: x + (left ? -13 : 13), y: y < 20 || (left && y < inner.height - 24) ? y + 20 : y - 8 }
        : hasX ? { x: x + (left ? -6 : 6), y: 13 + 15 * line++ } : { x: inner.width - 4, y: y < 18 ? y + 15 : y - 6 };
      const anchor = left || !hasX ? "end" : "start";
      return [svg("path", { class: "mark", d: path }), svg("text", { class: "said", ...at, "text-anchor": anchor }, mark.text)];
    });
  }

  // Pointing ------------------------------------------------------------------------------------------------------------

  /** The position of an event inside the axes, in pixels of the drawing. */
  where(event) {
    const box = this.svg.getBoundingClientRect();
    const factor = this.width / box.width;
    return { x: (event.clientX - box.left) * factor - this.inner.left, y: (event.clientY - box.top) * factor - this.inner.top };
  }

  /** The axis coordinates of a pixel. */
  under({ x, y }) {
    const [a, b] = [this.view.x, this.view.y];
    return { x: a[0] + (x / this.inner.width) * (a[1] - a[0]), y: b[1] - (y / this.inner.height) * (b[1] - b[0]) };
  }

  zoom(pixel, factor) {
    const at = this.under(pixel);
    this.show({ x: zoomed(this.view.x, at.x, factor, this.home.x), y: zoomed(this.view.y, at.y, factor, this.home.y) });
  }

  /** Moves the view by shares of its width and height. */
  move(right, up) {
    const moved = ([low, high], share, home) => within([low + share * (high - low), high + share * (high - low)], home);
    this.show({ x: moved(this.view.x, right, this.home.x), y: moved(this.view.y, up, this.home.y) });
  }

  inside(point) {
    return point.px >= -1 && point.px <= this.inner.width + 1 && point.py >= -1 && point.py <= this.inner.height + 1;
  }

  nearest(at) {
    let [best, least] = [null, 60];
    for (const points of this.points) {
      for (const point of points) {
        if (Number.isNaN(point.py) || !this.inside(point)) continue;
        const bars = this.plot.series[point.series].style === "bars";
        const ends = bars ? [point.py, this.base] : [point.low, point.high, point.py].filter((end) => !Number.isNaN(end));
        const dy = Math.max(0, Math.min(...ends) - at.y, at.y - Math.max(...ends));
        // If two intervals or bars contain the position, prefer the nearer point.
        const distance = Math.hypot(at.x - point.px, dy) + Math.abs(at.y - point.py) * 1e-3;
        if (distance < least) [best, least] = [point, distance];
      }
    }
    return best;
  }

  /** Shows the tooltip of a point, or with null none. */
  point(one) {
    this.current = one;
    this.tip.hidden = one === null;
    this.over?.replaceChildren();
    if (one === null) return;
    const { plot, inner } = this;
    const series = plot.series[one.series];
    this.over.append(svg("path", { class: "cross", d: `M${one.px} 0V${inner.height}M0 ${one.py}H${inner.width}` }),
      svg("circle", { class: "spot", cx: one.px, cy: one.py, r: 4 }));
    const [low, high] = [series.low[one.n], series.high[one.n]];
    const line = (text, kind) => html("span", kind ? { class: kind } : {}, text);
    this.tip.replaceChildren(...[
      plot.series.length > 1 ? line(series.name, "quiet") : null,
      series.labels[one.n] ? line(series.labels[one.n]) : null,
      line(valueText(plot.y_label, series.y[one.n])),
      Number.isFinite(low) && Number.isFinite(high) ? line(`${numberText(low)} to ${numberText(high)}`) : null,
      line(valueText(plot.x_label, series.x[one.n]), "quiet"),
    ].filter((part) => part !== null));
    const [box, outer] = [this.svg.getBoundingClientRect(), this.figure.getBoundingClientRect()];
    const scale = box.width / this.width;
    const [x, y] = [(inner.left + one.px) * scale, box.top - outer.top + (inner.top + one.py) * scale];
    const beyond = x + 14 + this.tip.offsetWidth > this.figure.clientWidth;
    this.tip.style.left = `${Math.max(0, beyond ? x - 14 - this.tip.offsetWidth : x + 14)}px`;
    this.tip.style.top = `${y + 12}px`;
  }

  /** Moves the tooltip from the current point by `by` points to the right, or by `other` series down. */
  step(by, other) {
    const rows = this.points.map((points) => points.filter((point) => !Number.isNaN(point.py) && this.inside(point)));
    const kept = rows.filter((points) => points.length);
    if (!kept.length) return;
    const row = this.current ? kept.findIndex((points) => points[0].series === this.current.series) : -1;
    const next = kept[row < 0 ? 0 : (row + other + kept.length) % kept.length];
    const byX = [...next].sort((a, b) => a.px - b.px);
    const far = (point) => Math.abs(point.px - (this.current?.px ?? 0));
    const same = other || row < 0 ? byX.reduce((a, b) => (far(b) < far(a) ? b : a)) : byX.find((one) => one.n === this.current.n);
    this.point(byX[Math.min(Math.max(byX.indexOf(same) + (row < 0 ? 0 : by), 0), byX.length - 1)]);
  }

  listen() {
    const on = (name, act, options) => this.svg.addEventListener(name, act, options);
    on("pointerdown", (event) => this.press(event));
    on("pointermove", (event) => this.drag(event));
    on("pointerup", (event) => this.release(event));
    on("pointercancel", (event) => this.release(event, true));
    on("pointerleave", () => this.pointers.size || this.point(null));
    on("dblclick", () => this.show(null));
    on("blur", () => this.point(null));
    on("wheel", (event) => {
      // The wheel scrolls the page; it zooms the plot only with focus or with Ctrl.
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== this.svg) return;
      event.preventDefault();
      this.zoom(this.where(event), 1.0015 ** Math.min(Math.max(event.deltaY * (event.deltaMode ? 30 : 1), -300), 300));
    }, { passive: false });
    on("keydown", (event) => this.key(event));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const arrows = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    const middle = { x: this.inner.width / 2, y: this.inner.height / 2 };
    if (arrows && event.shiftKey) this.move(arrows[0] / 5, arrows[1] / 5);
    else if (arrows) this.step(arrows[0], -arrows[1]);
    else if (event.key === "+" || event.key === "=") this.zoom(middle, 0.7);
    else if (event.key === "-") this.zoom(middle, 1 / 0.7);
    else if (event.key === "0" || event.key === "Home") this.show(null);
    else if (event.key === "Escape") this.point(null);
    else return;
    event.preventDefault();
  }

  press(event) {
    if (event.button) return;
    this.pointers.set(event.pointerId, { from: this.where(event), to: this.where(event) });
    if (event.pointerType === "touch") this.point(this.nearest(this.where(event)));
    else this.svg.setPointerCapture(event.pointerId);
  }

  drag(event) {
    const pointer = this.pointers.get(event.pointerId);
    if (!pointer) return this.point(this.nearest(this.where(event)));
    const others = [...this.pointers.values()].filter((one) => one !== pointer);
    const before = pointer.to;
    pointer.to = this.where(event);
    if (event.pointerType === "touch") {
      if (!others.length) return this.point(this.nearest(pointer.to));
      const apart = (one) => Math.max(20, Math.hypot(one.x - others[0].to.x, one.y - others[0].to.y));
      return this.zoom(others[0].to, apart(before) / apart(pointer.to));
    }
    this.point(null);
    const { x: [left, right], y: [top, bottom] } = this.chosen(pointer);
    this.over.replaceChildren(svg("rect", { class: "selection", x: left, y: top, width: right - left, height: bottom - top }));
  }

  /** The pixels selected by a drag: a rectangle, or a strip if the drag is nearly straight. */
  chosen({ from, to }) {
    const cut = (value, end) => Math.min(Math.max(value, 0), end);
    const span = (a, b, end) => [cut(Math.min(a, b), end), cut(Math.max(a, b), end)];
    const { width, height } = this.inner;
    const [wide, high] = [Math.abs(to.x - from.x), Math.abs(to.y - from.y)];
    return {
      x: wide < 12 && high > 24 ? [0, width] : span(from.x, to.x, width),
      y: high < 12 && wide > 24 ? [0, height] : span(from.y, to.y, height),
    };
  }

  release(event, cancelled = false) {
    const pointer = this.pointers.get(event.pointerId);
    this.pointers.delete(event.pointerId);
    if (!pointer || cancelled || event.pointerType === "touch") return;
    const { x, y } = this.chosen(pointer);
    if (x[1] - x[0] < 6 || y[1] - y[0] < 6) return this.over.replaceChildren();
    const [from, to] = [this.under({ x: x[0], y: y[1] }), this.under({ x: x[1], y: y[0] })];
    this.show({ x: within([from.x, to.x], this.home.x), y: within([from.y, to.y], this.home.y) });
  }

  /** Saves the plot as SVG with its current colours. */
  save() {
    this.point(null);
    const clone = this.svg.cloneNode(true);
    const originals = [this.svg, ...this.svg.querySelectorAll("*")];
    const kept = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-opacity", "stroke-linejoin",
      "paint-order", "opacity", "font-family", "font-size"];
    [clone, ...clone.querySelectorAll("*")].forEach((element, i) => {
      const style = getComputedStyle(originals[i]);
      for (const name of kept) element.setAttribute(name, style.getPropertyValue(name));
      for (const name of ["class", "tabindex", "role", "aria-label"]) element.removeAttribute(name);
    });
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
    const font = { "font-family": "system-ui, sans-serif", fill: colour("--text") };
    const names = this.plot.series.length < 2 ? [] : this.plot.series.map((one, i) => [one.name, i]);
    const head = [svg("text", { x: 0, y: 16, "font-size": 15, "font-weight": 650, ...font }, this.plot.title)];
    let [x, y] = [0, names.length ? 38 : 20];
    for (const [name, i] of names.filter(([, i]) => !this.hidden.has(i))) {
      if (x > 0 && x + 20 + textWidth(name) > this.width) [x, y] = [0, y + 18];
      head.push(svg("path", { d: shape(i % 4, x + 6, y - 4, 4), fill: colour(`--s${i % COLOURS}`) }),
        svg("text", { x: x + 16, y, "font-size": 12, ...font }, name));
      x += 36 + textWidth(name);
    }
    const height = this.height + y + 12;
    clone.setAttribute("viewBox", `-12 -12 ${this.width + 24} ${height + 24}`);
    clone.setAttribute("width", this.width + 24);
    clone.setAttribute("height", height + 24);
    const drawn = svg("g", { transform: `translate(0 ${y + 12})` }, ...clone.childNodes);
    const paper = { x: -12, y: -12, width: this.width + 24, height: height + 24, fill: colour("--page") };
    clone.append(svg("title", {}, this.plot.title), svg("rect", paper), ...head, drawn);
    saveFile(fileName(this.plot.title, "svg"), "image/svg+xml", new XMLSerializer().serializeToString(clone));
  }
}

function tableOf(table) {
  const numeric = table.columns.map((_, i) => isNumeric(table.rows.map((row) => row[i] ?? "")));
  const body = html("tbody");
  const fill = (rows) => body.replaceChildren(...rows.map((row) =>
    html("tr", {}, ...row.map((cell, i) => html("td", numeric[i] ? { class: "number" } : {}, cell)))));
  const heads = table.columns.map((name, i) => {
    const sort = () => {
      const descending = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((one) => one.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", descending ? "descending" : "ascending");
      fill(sorted(table.rows, i, descending));
    };
    const head = html("th", { scope: "col", ...(numeric[i] && { class: "number" }) },
      name && table.rows.length > 1 ? html("button", { type: "button", title: "Sort", onclick: sort }, name) : name);
    return head;
  });
  fill(table.rows);
  const csv = tool("Copy CSV", "Copy the table as CSV", () =>
    copy(csv, fileName(table.title, "csv"), csvOf([table.columns, ...table.rows])));
  return html("figure", {},
    html("div", { class: "head" }, html("h3", {}, table.title), html("span", { class: "tools" }, csv)),
    html("div", { class: "scroll", tabindex: 0, role: "group", "aria-label": table.title }, html("table", {},
      table.columns.some((name) => name) ? html("thead", {}, html("tr", {}, ...heads)) : null, body)),
    table.note ? html("figcaption", { class: "note" }, table.note) : null);
}

function words({ text, warning }) {
  return warning ? html("p", { class: "warning" }, html("b", {}, "Note. "), text) : html("p", {}, text);
}

function page({ title, subtitle, sections, provenance }) {
  const main = html("main");
  const contents = [];
  const charts = [];
  let plots = null; // consecutive plots share a grid
  for (const section of sections) {
    if (section.type !== "Plot") plots = null;
    if (section.type === "Plot") {
      if (!plots) main.append((plots = html("div", { class: "plots" })));
      charts.push(new Chart(section));
      plots.append(charts.at(-1).figure);
    } else if (section.type === "Heading") {
      const id = `part-${contents.length + 1}`;
      contents.push(html("li", {}, html("a", { href: `#${id}` }, section.text)));
      main.append(html("h2", { id }, section.text));
    } else main.append(section.type === "Table" ? tableOf(section) : words(section));
  }
  document.body.append(
    html("header", {}, html("h1", {}, title), subtitle ? html("p", { class: "subtitle" }, subtitle) : "",
      contents.length > 1 ? html("nav", { "aria-label": "Contents" }, html("ul", {}, ...contents)) : ""),
    main,
    provenance.length ? html("footer", {}, html("dl", {}, ...provenance.flatMap(([name, value]) =>
      [html("dt", {}, name), html("dd", {}, value)]))) : "");
  for (const chart of charts) chart.resize(); // now, not in the next animation frame: a page in the background has none
}

if (typeof document !== "undefined") page(JSON.parse(document.getElementById("data").textContent));
