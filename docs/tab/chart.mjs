// A line chart as SVG.  Colours are those of page.css.

const WIDTH = 460, HEIGHT = 220, LEFT = 44, RIGHT = 12, TOP = 12, BOTTOM = 30;

/**
 * @param lines [{className, points: [[x, y], ...]}]
 * @param range {steps, low, high, label: y => text}
 */
export function drawChart(svg, lines, range) {
  const x = (step) => LEFT + (step / range.steps) * (WIDTH - LEFT - RIGHT);
  const y = (value) => TOP + ((range.high - value) / (range.high - range.low)) * (HEIGHT - TOP - BOTTOM);
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.replaceChildren();
  for (let i = 0; i <= 4; i++) {
    const value = range.low + (i / 4) * (range.high - range.low);
    add(svg, "line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) });
    label(svg, range.label(value), { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" });
  }
  for (let i = 0; i <= 5; i++) {
    const step = (i / 5) * range.steps;
    label(svg, String(Math.round(step)), { x: x(step), y: HEIGHT - 10, "text-anchor": "middle" });
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

/** The ends of an axis that holds all values, in round numbers. */
export function roundRange(values) {
  const low = Math.min(0, ...values), high = Math.max(1, ...values);
  const step = high - low > 4 ? 2 : 0.5;
  return { low: Math.floor(low / step) * step, high: Math.ceil(high / step) * step };
}
