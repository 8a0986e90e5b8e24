// A line chart as SVG.  Colours are those of page.css.

const WIDTH = 460, HEIGHT = 220, LEFT = 50, RIGHT = 12, TOP = 12, BOTTOM = 30;

/**
 * @param lines [{className, points: [[x, y], ...]}]
 * @param range {steps, ticks: [y, ...] from low to high, label: y => text}
 */
export function drawChart(svg, lines, range) {
  const x = (step) => LEFT + (step / range.steps) * (WIDTH - LEFT - RIGHT);
  const low = range.ticks[0], high = range.ticks.at(-1);
  const y = (value) => TOP + ((high - value) / (high - low)) * (HEIGHT - TOP - BOTTOM);
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.replaceChildren();
  for (const value of range.ticks) {
    add(svg, "line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) });
    label(svg, range.label(value), { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" });
  }
  for (let step = 0; step <= range.steps; step += Math.max(1, roundStep(range.steps))) {
    label(svg, String(step), { x: x(step), y: HEIGHT - 10, "text-anchor": "middle" });
  }
  for (const { className, points } of lines) {
    if (!points.length) continue;
    const places = points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`);
    add(svg, "polyline", { class: `line ${className}`, points: places.join(" ") });
    const [last, value] = points.at(-1);
    add(svg, "circle", { class: `dot ${className}`, cx: x(last), cy: y(value), r: 4 });
  }
}

function add(svg, name, attributes) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  svg.append(element);
  return element;
}

function label(svg, text, attributes) {
  add(svg, "text", attributes).textContent = text;
}

/** The smallest of 1, 2 and 5, times a power of ten, that cuts a length into at most six parts. */
function roundStep(length) {
  const power = 10 ** Math.floor(Math.log10(length / 6));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= (length / 6) * (1 - 1e-9));
}

/** The ticks of an axis that holds all values, 0 and 1, in round numbers. */
export function roundTicks(values) {
  const low = Math.min(0, ...values), high = Math.max(1, ...values);
  const step = roundStep(high - low);
  const first = Math.floor(low / step + 1e-9), last = Math.ceil(high / step - 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(6)));
}
