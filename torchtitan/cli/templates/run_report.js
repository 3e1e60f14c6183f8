"use strict";
// Curves of the report. Drag over a chart to zoom into its steps, double-click to zoom out; all charts follow.
const {runs, charts} = JSON.parse(document.getElementById("curves").textContent);
const W = 480, H = 250, LEFT = 58, RIGHT = 10, TOP = 10, BOTTOM = 24;
const first = Math.min(...charts.flatMap(c => c.series.flatMap(s => s.length ? [s[0][0]] : [])));
const last = Math.max(...charts.flatMap(c => c.series.flatMap(s => s.length ? [s[s.length - 1][0]] : [])));
const view = {from: first, to: last, log: false, smooth: 0, hidden: new Set()};
const color = i => `var(--run${i % 8})`;
const text = x => x !== 0 && (Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3) ? x.toExponential(2) : String(+x.toPrecision(4));

function node(parent, tag, attributes = {}, content = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = content;
  return parent.appendChild(made);
}

function ticks(low, high, n) {
  const raw = (high - low) / n, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find(m => m * power >= raw * 0.999);
  const found = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step * 1e-6; x += step) found.push(Math.abs(x) < step * 1e-6 ? 0 : x);
  return found;
}

function smoothed(points) {
  let mean = null;
  return points.map(([x, y]) => [x, mean = mean === null ? y : view.smooth * mean + (1 - view.smooth) * y]);
}

function draw(chart) {
  const {svg, series} = chart;
  svg.replaceChildren();
  const canLog = view.log && series.flat().every(p => p[1] > 0);
  const scaled = y => canLog ? Math.log10(y) : y, back = y => canLog ? 10 ** y : y;
  const shown = series.map((points, i) => view.hidden.has(i) ? [] : smoothed(points));
  const inside = shown.map(points => points.filter(p => p[0] >= view.from && p[0] <= view.to));
  const values = inside.flat().map(p => scaled(p[1]));
  chart.inside = inside;
  if (!values.length) return node(svg, "text", {x: W / 2, y: H / 2, "text-anchor": "middle"}, "nothing to show here");
  let low = Math.min(...values), high = Math.max(...values);
  const margin = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
  low -= margin;
  high += margin;
  const span = view.to - view.from || 1;
  chart.x = step => LEFT + (step - view.from) / span * (W - LEFT - RIGHT);
  chart.y = value => TOP + (high - scaled(value)) / (high - low) * (H - TOP - BOTTOM);
  for (const t of ticks(low, high, 4)) {
    const y = chart.y(back(t));
    node(svg, "line", {x1: LEFT, x2: W - RIGHT, y1: y, y2: y, class: "grid"});
    node(svg, "text", {x: LEFT - 6, y: y + 4, "text-anchor": "end"}, text(back(t)));
  }
  for (const t of ticks(view.from, view.to || 1, 5).filter(Number.isInteger)) {
    node(svg, "text", {x: chart.x(t), y: H - 6, "text-anchor": "middle"}, t.toLocaleString("en"));
  }
  shown.forEach((points, i) => {
    // One more point on either side, cut off at the frame.
    const from = points.findIndex(p => p[0] >= view.from), to = points.findLastIndex(p => p[0] <= view.to);
    const part = from < 0 ? [] : points.slice(Math.max(0, from - 1), to + 2);
    const path = part.map(p => `${chart.x(p[0]).toFixed(1)},${chart.y(p[1]).toFixed(1)}`).join(" ");
    if (part.length === 1) node(svg, "circle", {cx: chart.x(part[0][0]), cy: chart.y(part[0][1]), r: 3, fill: color(i)});
    else if (part.length) node(svg, "polyline", {points: path, stroke: color(i), "clip-path": "url(#frame)"});
  });
  chart.band = node(svg, "rect", {y: TOP, height: H - TOP - BOTTOM, width: 0, class: "band"});
  chart.cursor = node(svg, "line", {y1: TOP, y2: H - BOTTOM, class: "cursor", visibility: "hidden"});
}

const drawAll = () => charts.forEach(draw);

function stepAt(chart, event) {
  const box = chart.svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * W;
  const share = Math.min(1, Math.max(0, (x - LEFT) / (W - LEFT - RIGHT)));
  return view.from + share * (view.to - view.from);
}

function point(chart, event) {
  if (!chart.inside.flat().length) return;
  const step = stepAt(chart, event);
  const nearest = chart.inside.map(points =>
    points.reduce((best, p) => !best || Math.abs(p[0] - step) < Math.abs(best[0] - step) ? p : best, null));
  chart.note.replaceChildren(...nearest.flatMap((p, i) => {
    if (!p) return [];
    const part = document.createElement("span");
    part.style.color = color(i);
    part.textContent = `step ${p[0].toLocaleString("en")}: ${text(p[1])} `;
    return [part];
  }));
  for (const end of ["x1", "x2"]) chart.cursor.setAttribute(end, chart.x(step));
  chart.cursor.setAttribute("visibility", "visible");
  if (chart.pressed === undefined) return;
  const [a, b] = [chart.pressed, step].map(chart.x).sort((p, q) => p - q);
  chart.band.setAttribute("x", a);
  chart.band.setAttribute("width", b - a);
}

function zoom(chart, event) {
  const [from, to] = [chart.pressed, stepAt(chart, event)].sort((p, q) => p - q);
  chart.pressed = undefined;
  if (to - from > (view.to - view.from) * 0.02) [view.from, view.to] = [from, to];
  drawAll();
}

function reset() {
  [view.from, view.to] = [first, last];
  drawAll();
}

const element = (parent, tag, content = "") => {
  const made = parent.appendChild(document.createElement(tag));
  made.textContent = content;
  return made;
};
const grid = document.getElementById("charts"), legend = document.getElementById("legend");
for (const chart of charts) {
  const figure = element(grid, "figure"), caption = element(figure, "figcaption", chart.name);
  chart.note = element(caption, "small");
  chart.svg = node(figure, "svg", {viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${chart.name} by step`});
  chart.svg.addEventListener("pointermove", event => point(chart, event));
  chart.svg.addEventListener("pointerdown", event => {
    chart.pressed = stepAt(chart, event);
    chart.svg.setPointerCapture(event.pointerId);
  });
  chart.svg.addEventListener("pointerup", event => zoom(chart, event));
  chart.svg.addEventListener("pointercancel", () => chart.pressed = undefined);
  chart.svg.addEventListener("dblclick", reset);
}
runs.forEach((name, i) => {
  const label = element(legend, "label"), box = element(label, "input");
  box.type = "checkbox";
  box.checked = true;
  box.style.accentColor = label.style.color = color(i);
  label.append(name);
  box.onchange = () => { view.hidden[box.checked ? "delete" : "add"](i); drawAll(); };
});
document.getElementById("log").onchange = event => { view.log = event.target.checked; drawAll(); };
document.getElementById("smooth").oninput = event => { view.smooth = +event.target.value; drawAll(); };
document.getElementById("reset").onclick = reset;
drawAll();
