"use strict";
// Draws the charts of the page. All text is set as text and never as HTML, because names come from files.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const MARGIN = { left: 60, right: 10, top: 10, bottom: 22 };
  const COLOURS = 8;
  const DASHES = ["", "6 3", "2 3", "8 3 2 3", "1 4"];
  const LISTED = 8; // the series of a chart that are shown at first

  function make(name, attributes = {}, parent = null, text = null) {
    const isShape = /^(svg|g|path|line|rect|circle|text|title)$/.test(name);
    const made = isShape ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== null) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  }

  // Positions -----------------------------------------------------------------------------------------------------

  // Curves are drawn over updates, and epochs or seconds are interpolated between those of the log.
  let axis = "update";

  function interpolate(from, to, at) {
    const last = from.length - 1;
    if (last < 0) return at;
    if (last === 0 || at <= from[0]) return to[0] * (from[0] ? at / from[0] : 1);
    let low = 0;
    let high = last;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (from[middle] <= at) low = middle;
      else high = middle;
    }
    const width = from[high] - from[low];
    return to[low] + (width ? ((at - from[low]) / width) * (to[high] - to[low]) : 0);
  }

  function position(run, update, unit = axis) {
    const table = data.runs[run].positions[unit];
    return unit === "update" || !table || !table[0].length ? update : interpolate(table[0], table[1], update);
  }

  // Numbers -------------------------------------------------------------------------------------------------------

  function ticks(low, high, count) {
    const raw = (high - low) / Math.max(count, 1);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= raw * 0.999);
    const found = [];
    for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) found.push(index * step);
    return found;
  }

  function logTicks(low, high) {
    const first = Math.floor(low);
    const last = Math.ceil(high);
    const found = [];
    const stride = Math.max(1, Math.ceil((last - first) / 7));
    for (let power = first; power <= last; power += stride) {
      for (const factor of last - first < 3 ? [1, 2, 5] : [1]) found.push(power + Math.log10(factor));
    }
    return found.filter((each) => each >= low - 1e-9 && each <= high + 1e-9);
  }

  function short(value) {
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size >= 1e6 || size < 1e-3) return value.toExponential(3).replace(/\.?0+e/, "e").replace("e+", "e");
    return String(Number(value.toPrecision(6)));
  }

  function shown(value) {
    return typeof value === "string" ? value : short(value);
  }

  // Charts --------------------------------------------------------------------------------------------------------

  const charts = [];
  let section = null; // the positions that all charts show; null for all
  let bounds = [0, 1];

  function extent() {
    let low = Infinity;
    let high = -Infinity;
    data.runs.forEach((run, index) => {
      for (const { x } of Object.values(run.series)) {
        if (!x.length) continue;
        low = Math.min(low, position(index, x[0]));
        high = Math.max(high, position(index, x[x.length - 1]));
      }
    });
    if (!(low <= high)) return [0, 1];
    return low === high ? [low - 0.5, high + 0.5] : [low, high];
  }

  function zoom(low, high) {
    const width = bounds[1] - bounds[0];
    if (!(high - low > width * 1e-6)) return;
    const [from, to] = [Math.max(low, bounds[0]), Math.min(high, bounds[1])];
    section = from <= bounds[0] && to >= bounds[1] ? null : [from, to];
    charts.forEach((chart) => chart.draw());
  }

  function point(at, announce) {
    charts.forEach((chart) => chart.point(at, chart === announce));
  }

  class Chart {
    constructor(box) {
      this.box = box;
      this.log = false;
      this.at = null;
      this.names = JSON.parse(box.dataset.names);
      this.series = [];
      data.runs.forEach((run, index) => {
        this.names.forEach((name, order) => {
          if (!(name in run.series)) return;
          const several = data.runs.length > 1;
          const colour = several ? index + 1 : (order % COLOURS) + 1;
          const dash = DASHES[(several ? order : Math.floor(order / COLOURS)) % DASHES.length];
          const label = several ? `${name} (${run.name})` : name;
          this.series.push({ run: index, label, colour, dash, visible: order < LISTED, ...run.series[name] });
        });
      });
      this.build();
    }

    build() {
      const title = this.box.querySelector("h3");
      const head = make("div", { class: "head" });
      this.box.prepend(head);
      head.append(title);
      this.logButton = make("button", { type: "button", "aria-pressed": "false" }, head, "log");
      this.logButton.title = "Logarithmic axis";
      this.logButton.addEventListener("click", () => this.toggleLog());
      const hint = `Chart of ${title.textContent}. Arrow keys move the cursor, + and - zoom, 0 shows all.`;
      this.svg = make("svg", { tabindex: 0, role: "application", "aria-label": hint }, this.box);
      this.reading = make("div", { class: "reading" }, this.box);
      this.announced = make("div", { class: "hidden", "aria-live": "polite" }, this.box);
      const legend = make("ul", { class: "legend" }, this.box);
      for (const each of this.series) {
        const button = make("button", { type: "button", "aria-pressed": String(each.visible) }, make("li", {}, legend));
        const picture = make("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" }, button);
        this.stroke(make("path", { d: "M0 4H22", class: "line" }, picture), each);
        make("span", {}, button, each.label);
        each.output = make("span", { class: "value" }, button);
        button.addEventListener("click", () => {
          each.visible = !each.visible;
          button.setAttribute("aria-pressed", String(each.visible));
          this.draw();
        });
      }
      this.listen();
    }

    stroke(shape, series) {
      shape.style.stroke = `var(--c${series.colour})`;
      if (series.dash) shape.setAttribute("stroke-dasharray", series.dash);
      return shape;
    }

    toggleLog() {
      this.log = !this.log;
      this.logButton.setAttribute("aria-pressed", String(this.log));
      this.draw();
    }

    // The drawing ----------------------------------------------------------------------------------------------------

    draw() {
      this.width = Math.max(this.svg.clientWidth, 120);
      this.height = Math.max(this.svg.clientHeight, 120);
      [this.low, this.high] = section || bounds;
      this.svg.replaceChildren();
      this.scale();
      this.drawAxes();
      for (const each of this.series) if (each.visible) this.drawSeries(each);
      this.drawFirst();
      this.overlay = make("g", {}, this.svg);
      this.point(this.at, false);
    }

    x(at) {
      return MARGIN.left + ((at - this.low) / (this.high - this.low)) * (this.width - MARGIN.left - MARGIN.right);
    }

    y(value) {
      const share = ((this.log ? Math.log10(value) : value) - this.bottom) / (this.top - this.bottom);
      return this.height - MARGIN.bottom - share * (this.height - MARGIN.top - MARGIN.bottom);
    }

    at_(pixel) {
      return this.low + ((pixel - MARGIN.left) / (this.width - MARGIN.left - MARGIN.right)) * (this.high - this.low);
    }

    drawable(value) {
      return typeof value === "number" && (!this.log || value > 0);
    }

    scale() {
      let bottom = Infinity;
      let top = -Infinity;
      this.leftOut = 0;
      for (const each of this.series) {
        if (!each.visible) continue;
        each.x.forEach((update, index) => {
          const at = position(each.run, update);
          if (at < this.low || at > this.high) return;
          const value = each.y[index];
          if (this.drawable(value)) {
            bottom = Math.min(bottom, this.log ? Math.log10(value) : value);
            top = Math.max(top, this.log ? Math.log10(value) : value);
          } else if (typeof value === "number") this.leftOut += 1;
        });
      }
      if (!(bottom <= top)) [bottom, top] = [0, 1];
      const space = top > bottom ? (top - bottom) * 0.05 : Math.abs(top) * 0.5 || 1;
      [this.bottom, this.top] = [bottom - space, top + space];
    }

    drawAxes() {
      const { left, right, top, bottom } = MARGIN;
      const rows = this.log ? logTicks(this.bottom, this.top) : ticks(this.bottom, this.top, this.height / 48);
      for (const tick of rows) {
        const value = this.log ? 10 ** tick : tick;
        const y = this.y(value);
        make("line", { class: "grid", x1: left, x2: this.width - right, y1: y, y2: y }, this.svg);
        make("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, this.svg, short(Number(value.toPrecision(10))));
      }
      const base = this.height - bottom;
      make("line", { class: "axis", x1: left, x2: this.width - right, y1: base, y2: base }, this.svg);
      for (const tick of ticks(this.low, this.high, this.width / 90)) {
        const x = this.x(tick);
        make("line", { class: "axis", x1: x, x2: x, y1: base, y2: base + 4 }, this.svg);
        const anchor = x > this.width - 30 ? "end" : "middle";
        make("text", { x, y: base + 16, "text-anchor": anchor }, this.svg, short(Number(tick.toPrecision(10))));
      }
    }

    // Of the points in one column of pixels, the first, the smallest, the largest and the last draw the same line.
    drawSeries(series) {
      const path = [];
      const visible = [];
      let column = [];
      let pen = "M";
      const flush = () => {
        if (!column.length) return;
        const byValue = [...column].sort((one, other) => one[1] - other[1]);
        const kept = new Set([column[0], byValue[0], byValue[byValue.length - 1], column[column.length - 1]]);
        for (const each of column) {
          if (!kept.has(each)) continue;
          path.push(`${pen}${each[0].toFixed(1)} ${each[1].toFixed(1)}`);
          pen = "L";
          if (visible.length < 200) visible.push(each);
        }
        column = [];
      };
      const count = series.x.length;
      for (let index = 0; index < count; index++) {
        const here = position(series.run, series.x[index]);
        // One point on either side, so that lines reach the edge.
        const after = index + 1 < count && position(series.run, series.x[index + 1]) < this.low;
        const before = index > 0 && position(series.run, series.x[index - 1]) > this.high;
        if (after || before) continue;
        const value = series.y[index];
        if (!this.drawable(value)) {
          flush();
          pen = "M";
          if (here >= this.low && here <= this.high) this.drawBroken(series, this.x(here), value);
          continue;
        }
        const spot = [this.x(here), this.y(value)];
        if (column.length && Math.floor(column[0][0]) !== Math.floor(spot[0])) flush();
        column.push(spot);
      }
      flush();
      const clip = this.clip();
      // The first of two runs is wider, so that it shows where the other one covers it.
      const kind = data.runs.length > 1 && series.run === 0 ? "line under" : "line";
      this.stroke(make("path", { d: path.join(""), class: kind, "clip-path": clip, "data-label": series.label }, this.svg), series);
      if (visible.length < 60) for (const [x, y] of visible) if (x >= MARGIN.left - 1 && x <= this.width) this.dot(this.svg, series, x, y, 2.2);
    }

    clip() {
      if (!this.clipped || !this.clipped.isConnected) {
        const id = `clip-${charts.indexOf(this)}`;
        this.clipped = document.createElementNS(SVG, "clipPath");
        this.clipped.id = id;
        const width = Math.max(this.width - MARGIN.left - MARGIN.right, 1);
        make("rect", { x: MARGIN.left, y: 0, width, height: this.height }, this.clipped);
        this.svg.append(this.clipped);
      }
      return `url(#${this.clipped.id})`;
    }

    dot(parent, series, cx, cy, r) {
      make("circle", { class: r > 3 ? "dot large" : "dot", cx, cy, r }, parent).style.fill = `var(--c${series.colour})`;
    }

    // A value that has no place on the axis: a cross at the bottom for NaN, a triangle at an edge for an infinity.
    drawBroken(series, x, value) {
      const low = this.height - MARGIN.bottom - 5;
      const shapes = {
        nan: `M${x - 4} ${low - 4}l8 8m0 -8l-8 8`,
        inf: `M${x - 5} 9l5 -8l5 8z`,
        "-inf": `M${x - 5} ${low - 4}l5 8l5 -8z`,
      };
      if (!(value in shapes)) return;
      const shape = make("path", { class: "broken", d: shapes[value] }, this.svg);
      shape.style.stroke = `var(--c${series.colour})`;
      make("title", {}, shape, `${series.label}: ${value}`);
    }

    drawFirst() {
      if (data.first === null) return;
      const at = position(0, data.first);
      if (at < this.low || at > this.high) return;
      const x = this.x(at);
      make("line", { class: "first", x1: x, x2: x, y1: MARGIN.top, y2: this.height - MARGIN.bottom }, this.svg);
      const anchor = x > this.width / 2 ? "end" : "start";
      const text = { class: "first-label", x: x + (anchor === "end" ? -5 : 5), y: MARGIN.top + 10, "text-anchor": anchor };
      make("text", text, this.svg, `differs from update ${data.first}`);
    }

    // The cursor -----------------------------------------------------------------------------------------------------

    // Shows the values of all series at a position, null for none; the same in all charts.
    point(at, announce) {
      this.at = at;
      this.overlay.replaceChildren();
      const inside = at !== null && at >= this.low && at <= this.high;
      const note = this.leftOut ? `${this.leftOut} values that are not positive are not shown` : "";
      if (!inside) {
        this.reading.textContent = note;
        for (const each of this.series) {
          const count = each.y.filter((value) => typeof value === "string").length;
          each.output.textContent = count ? `${count} not finite` : "";
        }
        return;
      }
      const x = this.x(at);
      make("line", { class: "cursor", x1: x, x2: x, y1: MARGIN.top, y2: this.height - MARGIN.bottom }, this.overlay);
      const read = [];
      let update = null;
      for (const each of this.series) {
        const index = this.nearest(each, at);
        const value = index === null ? null : each.y[index];
        each.output.textContent = value === null ? "" : shown(value);
        if (value === null || !each.visible) continue;
        if (update === null) update = [each.run, each.x[index]];
        read.push(`${each.label} ${shown(value)}`);
        if (this.drawable(value)) {
          this.dot(this.overlay, each, this.x(position(each.run, each.x[index])), this.y(value), 4);
        }
      }
      this.reading.textContent = update === null ? note : this.describe(...update);
      if (announce) this.announced.textContent = `${this.reading.textContent}: ${read.join(", ")}`;
    }

    describe(run, update) {
      const parts = [`update ${short(update)}`];
      for (const [unit, before, after] of [["epoch", "epoch ", ""], ["time", "", " s"]]) {
        const value = position(run, update, unit);
        const table = data.runs[run].positions[unit];
        if (table && table[0].length && Number.isFinite(value)) parts.push(`${before}${short(Number(value.toPrecision(4)))}${after}`);
      }
      return parts.join(", ");
    }

    nearest(series, at) {
      let best = null;
      let distance = Infinity;
      let low = 0;
      let high = series.x.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (position(series.run, series.x[middle]) < at) low = middle + 1;
        else high = middle;
      }
      for (const index of [low - 1, low]) {
        if (index < 0 || index >= series.x.length) continue;
        const away = Math.abs(position(series.run, series.x[index]) - at);
        if (away < distance) [best, distance] = [index, away];
      }
      return best;
    }

    // Moves the cursor to the next position at which any visible series has a value.
    step(direction) {
      const from = this.at === null || this.at < this.low || this.at > this.high ? null : this.at;
      let best = null;
      for (const each of this.series) {
        if (!each.visible) continue;
        for (const update of each.x) {
          const at = position(each.run, update);
          if (at < this.low || at > this.high) continue;
          const beyond = from === null || (at - from) * direction > (this.high - this.low) * 1e-9;
          if (beyond && (best === null || (at - best) * direction < 0)) best = at;
        }
      }
      if (best !== null) point(best, this);
    }

    // Pointer and keyboard -------------------------------------------------------------------------------------------

    listen() {
      const place = (event) => event.clientX - this.svg.getBoundingClientRect().left;
      let start = null;
      let selection = null;
      this.svg.addEventListener("pointerdown", (event) => {
        if (event.button !== 0) return;
        start = place(event);
        this.svg.setPointerCapture(event.pointerId);
      });
      this.svg.addEventListener("pointermove", (event) => {
        const now = place(event);
        point(Math.min(Math.max(this.at_(now), this.low), this.high), null);
        if (start === null || Math.abs(now - start) < 4) return;
        selection = make("rect", { class: "selection" }, this.overlay);
        const size = { x: Math.min(start, now), width: Math.abs(now - start), y: MARGIN.top };
        size.height = this.height - MARGIN.top - MARGIN.bottom;
        for (const [key, value] of Object.entries(size)) selection.setAttribute(key, value);
      });
      this.svg.addEventListener("pointerup", (event) => {
        const [from, to] = [start, place(event)];
        start = null;
        if (selection !== null) zoom(this.at_(Math.min(from, to)), this.at_(Math.max(from, to)));
        selection = null;
      });
      this.svg.addEventListener("pointercancel", () => {
        start = selection = null;
      });
      this.svg.addEventListener("pointerleave", () => point(null, null));
      this.svg.addEventListener("dblclick", () => zoom(...bounds));
      this.svg.addEventListener("keydown", (event) => this.key(event));
    }

    key(event) {
      const width = this.high - this.low;
      const centre = this.at === null ? this.low + width / 2 : this.at;
      const direction = event.key === "ArrowLeft" ? -1 : 1;
      const near = (factor) => zoom(centre - (centre - this.low) * factor, centre + (this.high - centre) * factor);
      const move = () => {
        if (!event.shiftKey) return this.step(direction);
        const limit = direction < 0 ? bounds[0] - this.low : bounds[1] - this.high;
        const by = Math.abs(limit) < width / 4 ? limit : (direction * width) / 4;
        return zoom(this.low + by, this.high + by);
      };
      const actions = {
        ArrowLeft: move,
        ArrowRight: move,
        "+": () => near(0.5),
        "=": () => near(0.5),
        "-": () => near(2),
        0: () => zoom(...bounds),
        Escape: () => point(null, null),
        l: () => this.toggleLog(),
        L: () => this.toggleLog(),
      };
      if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in actions)) return;
      event.preventDefault();
      actions[event.key]();
    }
  }

  // The page --------------------------------------------------------------------------------------------------------

  function toolbar() {
    const first = document.querySelector(".charts");
    if (!first) return;
    const bar = make("div", { class: "toolbar" });
    first.before(bar);
    const label = make("label", {}, bar, "Over ");
    const select = make("select", {}, label);
    for (const [unit, text] of [["update", "updates"], ["epoch", "epochs"], ["time", "seconds"]]) {
      if (unit === "update" || data.runs.some((run) => (run.positions[unit] || [[]])[0].length > 1)) {
        make("option", { value: unit }, select, text);
      }
    }
    select.addEventListener("change", () => {
      axis = select.value;
      bounds = extent();
      section = null;
      charts.forEach((chart) => chart.draw());
    });
    make("button", { type: "button" }, bar, "Show all").addEventListener("click", () => zoom(...bounds));
    if (data.runs.length > 1) {
      data.runs.forEach((run, index) => {
        const item = make("span", {}, bar);
        make("span", { class: `swatch r${index + 1}` }, item);
        item.append(run.name);
      });
    }
  }

  try {
    bounds = extent();
    document.querySelectorAll(".chart").forEach((box) => charts.push(new Chart(box)));
    toolbar();
    charts.forEach((chart) => chart.draw());
    let width = 0;
    new ResizeObserver(() => {
      if (document.body.clientWidth === width) return;
      width = document.body.clientWidth;
      charts.forEach((chart) => chart.draw());
    }).observe(document.body);
  } catch (error) {
    const note = make("p", { class: "failure" }, null, `The charts could not be drawn: ${error}`);
    document.querySelector("main").prepend(note);
    throw error;
  }
})();
