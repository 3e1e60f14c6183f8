"use strict";
// Curves of the report. Drag over a chart to zoom into its steps, double-click to zoom out; all charts follow.
const {runs, charts} = JSON.parse(document.getElementById("curves").textContent);
const W = 480, H = 250, LEFT = 58, RIGHT = 10, TOP = 10, BOTTOM = 24;
const steps = charts.flatMap(chart => chart.series.flatMap(points => points.map(p => p[0])));
const whole = steps.reduce(([a, b], step) => [Math.min(a, step), Math.max(b, step)], [Infinity, -Infinity]);
const view = {span: whole, log: false, hidden: new Set()};
const color = i => `var(--run${i % 8})`;
const text = x => x !== 0 && (Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3) ? x.toExponential(2) : String(+x.toPrecision(4));

function add(parent, tag, attributes = {}, content = "") {
  const svg = parent.namespaceURI.endsWith("svg") || tag === "svg";
  const made = document.createElementNS(`http://www.w3.org/${svg ? "2000/svg" : "1999/xhtml"}`, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = content;
  return parent.appendChild(made);
}

function ticks(low, high, n) {
  const raw = (high - low) / n, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find(m => m * power >= raw * 0.999), first = Math.ceil(low / step);
  return Array.from({length: Math.floor(high / step) - first + 1}, (_, i) => +((first + i) * step).toPrecision(12));
}

function draw(chart) {
  const {svg, series} = chart, [from, to] = view.span;
  svg.replaceChildren();
  const log = view.log && series.flat().every(p => p[1] > 0), scaled = y => log ? Math.log10(y) : y;
  chart.inside = series.map((points, i) => view.hidden.has(i) ? [] : points.filter(p => p[0] >= from && p[0] <= to));
  const values = chart.inside.flat().map(p => scaled(p[1]));
  if (!values.length) return add(svg, "text", {x: W / 2, y: H / 2}, "nothing to show here");
  const least = Math.min(...values), most = Math.max(...values), margin = (most - least || Math.abs(most) || 1) * 0.05;
  const low = least - margin, high = most + margin;
  chart.x = step => LEFT + (step - from) / (to - from || 1) * (W - LEFT - RIGHT);
  const y = value => TOP + (high - scaled(value)) / (high - low) * (H - TOP - BOTTOM);
  for (const value of ticks(low, high, 4).map(t => log ? 10 ** t : t)) {
    add(svg, "line", {x1: LEFT, x2: W - RIGHT, y1: y(value), y2: y(value), class: "grid"});
    add(svg, "text", {x: LEFT - 6, y: y(value) + 4, "text-anchor": "end"}, text(value));
  }
  for (const step of ticks(from, to > from ? to : from + 1, 5).filter(Number.isInteger))
    add(svg, "text", {x: chart.x(step), y: H - 6, "text-anchor": "middle"}, step.toLocaleString("en"));
  chart.inside.forEach((points, i) => {
    if (points.length === 1) add(svg, "circle", {cx: chart.x(points[0][0]), cy: y(points[0][1]), r: 3, fill: color(i)});
    const path = points.map(p => `${chart.x(p[0]).toFixed(1)},${y(p[1]).toFixed(1)}`).join(" ");
    if (points.length > 1) add(svg, "polyline", {points: path, stroke: color(i)});
  });
  chart.band = add(svg, "rect", {y: TOP, height: H - TOP - BOTTOM, width: 0, class: "band"});
}

function show(span) {
  view.span = span;
  charts.forEach(draw);
}

function stepAt(chart, event) {
  const box = chart.svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * W;
  const [from, to] = view.span, share = (x - LEFT) / (W - LEFT - RIGHT);
  return from + Math.min(1, Math.max(0, share)) * (to - from);
}

function point(chart, event) {
  if (!chart.inside.flat().length) return;
  const step = stepAt(chart, event), distance = p => Math.abs(p[0] - step);
  chart.note.replaceChildren();
  chart.inside.forEach((points, i) => {
    const p = points.reduce((best, next) => !best || distance(next) < distance(best) ? next : best, null);
    if (p) add(chart.note, "span", {style: `color:${color(i)}`}, `step ${p[0].toLocaleString("en")}: ${text(p[1])} `);
  });
  const [a, b] = [chart.pressed ?? step, step].map(chart.x);
  chart.band.setAttribute("x", Math.min(a, b));
  chart.band.setAttribute("width", Math.max(1, Math.abs(b - a)));
}

for (const chart of charts) {
  const figure = add(document.getElementById("charts"), "figure"), caption = add(figure, "figcaption", {}, chart.name);
  chart.note = add(caption, "small");
  chart.svg = add(figure, "svg", {viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${chart.name} by step`});
  chart.svg.onpointermove = event => point(chart, event);
  chart.svg.onpointerdown = event => {
    chart.pressed = stepAt(chart, event);
    chart.svg.setPointerCapture(event.pointerId);
  };
  chart.svg.onpointerup = event => {
    const [from, to] = [chart.pressed, stepAt(chart, event)].sort((p, q) => p - q);
    chart.pressed = undefined;
    show(to - from > (view.span[1] - view.span[0]) * 0.02 ? [from, to] : view.span);
  };
  chart.svg.onpointercancel = () => chart.pressed = undefined;
  chart.svg.ondblclick = () => show(whole);
}
runs.forEach((name, i) => {
  const label = add(document.getElementById("legend"), "label", {style: `color:${color(i)}`});
  add(label, "input", {type: "checkbox", checked: "", style: `accent-color:${color(i)}`}).onchange = event => {
    view.hidden[event.target.checked ? "delete" : "add"](i);
    show(view.span);
  };
  label.append(name);
});
document.getElementById("log").onchange = event => { view.log = event.target.checked; show(view.span); };
document.getElementById("reset").onclick = () => show(whole);
show(whole);
