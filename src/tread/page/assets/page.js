// The page reads without this; it adds sliders over pictures, values under the pointer and switches for runs.
"use strict";

const svgElement = (name, attributes) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
};

// One slider for all pictures of a gallery: each run shows its newest picture up to that step.
for (const gallery of document.querySelectorAll("[data-gallery]")) {
  const strips = [...gallery.querySelectorAll(".frames")].map((strip) => [...strip.querySelectorAll(".frame")]);
  const steps = [...new Set(strips.flat().map((frame) => Number(frame.dataset.step)))].sort((a, b) => a - b);
  if (steps.length === 0) continue;
  const slider = document.createElement("input");
  const told = document.createElement("output");
  Object.assign(slider, { type: "range", min: 0, max: steps.length - 1, step: 1 });
  slider.value = "first" in gallery.dataset ? steps.indexOf(Number(gallery.dataset.first)) : steps.length - 1;
  slider.setAttribute("aria-label", "step of the pictures");
  const show = () => {
    const step = steps[slider.value];
    told.textContent = `step ${step.toLocaleString("en")}`;
    slider.setAttribute("aria-valuetext", told.textContent);
    for (const frames of strips) {
      const past = frames.filter((frame) => Number(frame.dataset.step) <= step);
      const now = past.length ? past[past.length - 1] : frames[0];
      for (const frame of frames) frame.classList.toggle("now", frame === now);
    }
  };
  slider.addEventListener("input", show);
  gallery.classList.add("scripted");
  if (steps.length > 1) {
    const bar = document.createElement("div");
    bar.className = "slider";
    bar.append(slider, told);
    gallery.prepend(bar);
  }
  show();
}

// The values of every line of a chart at the step under the pointer.
const hidden = new Set();
for (const chart of document.querySelectorAll(".chart")) {
  const block = chart.querySelector("script[type='application/json']");
  if (!block) continue;
  const figure = JSON.parse(block.textContent);
  const drawing = chart.querySelector("svg");
  const [left, top, width, height] = figure.box;
  const [low, high] = figure.range;
  const readout = document.createElement("div");
  readout.className = "readout";
  readout.hidden = true;
  const cursor = svgElement("line", { class: "cursor", y1: top, y2: top + height, visibility: "hidden" });
  drawing.append(cursor);
  chart.append(readout);

  const nearest = (points, x) => {
    let a = 0, b = points.length - 1;
    while (b - a > 1) {
      const middle = (a + b) >> 1;
      if (points[middle][0] < x) a = middle; else b = middle;
    }
    return Math.abs(points[a][0] - x) <= Math.abs(points[b][0] - x) ? points[a] : points[b];
  };
  const value = (y) => (figure.percent ? `${(100 * y).toFixed(1)}%` : String(Number(y.toPrecision(4))));
  const leave = () => {
    readout.hidden = true;
    cursor.setAttribute("visibility", "hidden");
  };
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * drawing.viewBox.baseVal.width;
    const x = low + ((at - left) / width) * (high - low);
    const lines = figure.lines.filter((line) => !hidden.has(line.run));
    if (at < left - 4 || at > left + width + 4 || lines.length === 0) return leave();
    const rows = lines.map((line) => [line, nearest(line.points, x)]);
    const shown = rows.map(([, point]) => point[0]).sort((a, b) => Math.abs(a - x) - Math.abs(b - x))[0];
    const place = left + ((shown - low) / (high - low)) * width;
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    cursor.setAttribute("visibility", "visible");
    const title = document.createElement("b");
    title.textContent = `${Number(shown.toPrecision(5)).toLocaleString("en")} ${figure.x}`;
    readout.replaceChildren(title, ...rows.map(([line, point]) => {
      const row = document.createElement("span");
      const swatch = document.createElement("i");
      swatch.className = `swatch s${line.run % 6}`;
      row.append(swatch, `${figure.lines.length > 1 ? `${line.name}: ` : ""}${value(point[1])}`);
      return row;
    }));
    readout.hidden = false;
    readout.style.left = place < left + width / 2 ? "auto" : "0";
    readout.style.right = place < left + width / 2 ? "0" : "auto";
  });
  drawing.addEventListener("pointerleave", leave);
}

// Each run of the legend becomes a switch that hides its lines, bars and pictures.
for (const label of document.querySelectorAll("[data-switch]")) {
  const run = Number(label.dataset.switch);
  const box = document.createElement("input");
  box.type = "checkbox";
  box.checked = true;
  box.addEventListener("change", () => {
    if (box.checked) hidden.delete(run); else hidden.add(run);
    for (const part of document.querySelectorAll(`[data-run="${run}"]`)) part.classList.toggle("off", !box.checked);
  });
  label.prepend(box);
}
