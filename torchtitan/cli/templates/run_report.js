"use strict";
// Curves of the report. Drag over a chart to zoom into its steps, double-click to zoom out; all charts follow.
const MARKED = 40;  // a series of at most so many points, such as validation, shows each of them
const W = 480, H = 250, LEFT = 72, RIGHT = 10, TOP = 10, BOTTOM = 24;
const [figures, boxes] = ["#charts figure", "#legend input"].map(chosen => [...document.querySelectorAll(chosen)]);
const charts = JSON.parse(document.getElementById("curves").textContent).map((series, i) =>
  ({series, svg: figures[i].querySelector("svg"), note: figures[i].querySelector("small")}));
const steps = charts.flatMap(chart => chart.series.flat().map(p => p[0]));
const whole = steps.reduce(([a, b], step) => [Math.min(a, step), Math.max(b, step)], [Infinity, -Infinity]);
const logarithmic = document.getElementById("log");
let span = whole;
const run = i => i % boxes.length, isValidation = i => i >= boxes.length;  // which follows the runs' training
const color = i => `var(--run${run(i) % 8})`;
const text = x => x !== 0 && (Math.abs(x) >= 1e5 || Math.abs(x) < 1e-3) ? x.toExponential(2) : String(+x.toPrecision(4));

function ticks(low, high, n) {
  const raw = (high - low) / n, power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find(m => m * power >= raw * 0.999), first = Math.ceil(low / step);
  return Array.from({length: Math.floor(high / step) - first + 1}, (_, i) => +((first + i) * step).toPrecision(12));
}

function draw(chart) {
  const log = logarithmic.checked && chart.series.flat().every(p => p[1] > 0), [from, to] = span;
  const scaled = y => log ? Math.log10(y) : y, isInside = p => p[0] >= from && p[0] <= to;
  chart.inside = chart.series.map((points, i) => boxes[run(i)].checked ? points.filter(isInside) : []);
  const values = chart.inside.flat().map(p => scaled(p[1]));
  const least = Math.min(...values), most = Math.max(...values), margin = (most - least || Math.abs(most) || 1) * 0.05;
  const low = least - margin, high = most + margin;
  chart.x = step => LEFT + (step - from) / (to - from || 1) * (W - LEFT - RIGHT);
  const y = value => TOP + (high - scaled(value)) / (high - low) * (H - TOP - BOTTOM);
  const label = (x, y, anchor, words) => `<text x="${x}" y="${y}" text-anchor="${anchor}">${words}</text>`;
  const shapes = values.length ? [] : [label(W / 2, H / 2, "middle", "nothing to show here")];
  for (const value of values.length ? ticks(low, high, 4).map(t => log ? 10 ** t : t) : []) {
    shapes.push(`<line x1="${LEFT}" x2="${W - RIGHT}" y1="${y(value)}" y2="${y(value)}" class="grid"/>`);
    shapes.push(label(LEFT - 6, y(value) + 4, "end", text(value)));
  }
  shapes.push(label(LEFT - 16, H - 6, "end", "step"));
  for (const step of ticks(from, to > from ? to : from + 1, 5).filter(Number.isInteger))
    shapes.push(label(chart.x(step), H - 6, "middle", step.toLocaleString("en")));
  chart.inside.forEach((points, i) => {
    const places = points.map(p => [chart.x(p[0]).toFixed(1), y(p[1]).toFixed(1)]);
    const [marker, dashes] = isValidation(i) ? ['r="3.5" fill="var(--card)"', " stroke-dasharray='5 4'"] : [`r="2.5" fill="${color(i)}"`, ""];
    if (points.length > 1) shapes.push(`<polyline points="${places.join(" ")}" stroke="${color(i)}"${dashes}/>`);
    for (const [x, y] of points.length <= MARKED || isValidation(i) ? places : [])
      shapes.push(`<circle cx="${x}" cy="${y}" ${marker} stroke="${color(i)}"/>`);
  });
  chart.svg.innerHTML = shapes.join("") + `<rect y="${TOP}" height="${H - TOP - BOTTOM}" width="0" class="band"/>`;
}

function show(chosen = span) {
  span = chosen;
  charts.forEach(draw);
}

function stepAt(chart, event) {
  const box = chart.svg.getBoundingClientRect(), x = (event.clientX - box.left) / box.width * W;
  const share = (x - LEFT) / (W - LEFT - RIGHT);
  return span[0] + Math.min(1, Math.max(0, share)) * (span[1] - span[0]);
}

function point(chart, event) {
  const step = stepAt(chart, event), distance = p => Math.abs(p[0] - step);
  chart.note.innerHTML = chart.inside.map((points, i) => {
    const p = points.reduce((best, next) => !best || distance(next) < distance(best) ? next : best, null);
    return p ? `<span style="color:${color(i)}">${isValidation(i) ? "validation, " : ""}step ${p[0].toLocaleString("en")}: ${text(p[1])} </span>` : "";
  }).join("");
  const [a, b] = [chart.pressed ?? step, step].map(chart.x), band = chart.svg.querySelector("rect");
  band.setAttribute("x", Math.min(a, b));
  band.setAttribute("width", Math.max(1, Math.abs(b - a)));
}

for (const chart of charts) {
  chart.svg.onpointermove = event => point(chart, event);
  chart.svg.onpointerdown = event => {
    chart.pressed = stepAt(chart, event);
    chart.svg.setPointerCapture(event.pointerId);
  };
  chart.svg.onpointerup = event => {
    const [from, to] = [chart.pressed, stepAt(chart, event)].sort((p, q) => p - q);
    chart.pressed = undefined;
    show(to - from > (span[1] - span[0]) * 0.02 ? [from, to] : span);
  };
  chart.svg.onpointercancel = () => chart.pressed = undefined;
  chart.svg.ondblclick = () => show(whole);
}
for (const box of [...boxes, logarithmic]) box.onchange = () => show();
document.getElementById("reset").onclick = () => show(whole);
show();
