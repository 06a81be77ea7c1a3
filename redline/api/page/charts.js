// Line charts of the last minutes, drawn as SVG.

const [WIDTH, HEIGHT] = [600, 120];
const LEAST_S = 60; // of the time axis, at least
const GAP_S = 6; // without a point: the line is interrupted

export const number = (value, digits = 0) =>
  value === null || value === undefined || Number.isNaN(value)
    ? "–"
    : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

const svg = (name, attributes = {}) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
};

function element(name, className, text = "") {
  const made = document.createElement(name);
  [made.className, made.textContent] = [className, text];
  return made;
}

/** The next value of the series 1, 2, 5, 10, 20 ... */
function round(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.9999);
}

/** One chart. seconds: longest time shown. lines: their names. unit: of all lines. least: minimum of the axis's upper end. most: fixed upper end. */
export class Chart {
  constructor({ title, unit = "", lines, digits = 0, least = 1, most = null }, seconds) {
    Object.assign(this, { title, unit, digits, least, most, longest: seconds, seconds: LEAST_S, points: [], hover: null });
    this.figure = element("figure", "chart");
    const caption = element("figcaption", "", title);
    if (unit) caption.append(element("small", "", ` ${unit}`));
    this.when = caption.appendChild(element("small", "when"));
    const legend = element("ul", "lines");
    this.values = lines.map((name, place) => {
      const line = legend.appendChild(element("li", `line-${place}`));
      const key = line.appendChild(svg("svg", { viewBox: "0 0 24 6", "aria-hidden": "true" }));
      key.append(svg("path", { d: "M0 3H24" }));
      line.append(`${name} `);
      return line.appendChild(element("b", ""));
    });
    const plot = element("div", "plot");
    this.top = plot.appendChild(element("span", "top"));
    this.svg = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.svg.append(svg("path", { class: "grid", d: `M0 1H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT - 1}H${WIDTH}` }));
    this.paths = lines.map((_, place) => this.svg.appendChild(svg("path", { class: `line-${place}` })));
    this.cursor = this.svg.appendChild(svg("path", { class: "cursor" }));
    plot.append(this.svg);
    const axis = element("div", "axis");
    this.from = axis.appendChild(element("span", ""));
    axis.append(element("span", "", "now"));
    this.figure.append(caption, legend, plot, axis);
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.hover = (1 - (event.clientX - box.left) / box.width) * this.seconds;
      this.read();
    });
    this.svg.addEventListener("pointerleave", () => {
      this.hover = null;
      this.read();
    });
  }

  /** points: [seconds, value of each line or null], in order; the axis ends at the last one. most: upper end of the axis. */
  draw(points, most = this.most) {
    this.points = points;
    const values = points.flatMap(([, ...all]) => all).filter((value) => value !== null);
    const top = most ?? round(Math.max(this.least, ...values));
    const now = points.at(-1)?.[0] ?? 0;
    this.seconds = Math.min(this.longest, Math.max(1, Math.ceil((now - (points[0]?.[0] ?? now)) / LEAST_S)) * LEAST_S);
    this.from.textContent = `${this.seconds / 60} min ago`;
    this.top.textContent = number(top, top < 1 ? 1 : 0);
    this.paths.forEach((path, line) => {
      let drawn = "";
      let before = -Infinity;
      for (const [at, ...all] of points) {
        if (all[line] === null) continue;
        const x = WIDTH * (1 - (now - at) / this.seconds);
        const y = HEIGHT - 1 - (HEIGHT - 2) * Math.min(1, all[line] / top);
        drawn += `${at - before > GAP_S ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`;
        before = at;
      }
      path.setAttribute("d", drawn);
    });
    this.read();
  }

  /** Updates the displayed values: the current ones, or those at the pointer. */
  read() {
    const now = this.points.at(-1)?.[0] ?? 0;
    const ago = this.hover ?? 0;
    const point = this.hover === null ? this.points.at(-1) : this.points.findLast(([at]) => now - at >= ago - 0.5);
    this.values.forEach((value, line) => (value.textContent = number(point?.[line + 1] ?? null, this.digits)));
    this.when.textContent = this.hover === null ? "" : ` ${number(ago)} s ago`;
    const x = WIDTH * (1 - ago / this.seconds);
    this.cursor.setAttribute("d", this.hover === null ? "" : `M${x.toFixed(1)} 0V${HEIGHT}`);
    const said = this.values.map((value) => value.parentElement.textContent).join(", ");
    this.svg.setAttribute("aria-label", `${this.title}${this.unit && `, ${this.unit}`}: ${said}`);
  }
}
