// What every chart is made of: elements, scales, axes and the tip under the pointer. Text goes in as text, never as markup.

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function element(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function shape(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function byId(id) {
  return document.getElementById(id);
}

function linear([from, to], [start, end]) {
  const width = to - from || 1;
  return (number) => start + ((number - from) / width) * (end - start);
}

// Round numbers from low to high: 1, 2 or 5 times a power of ten apart.
function roundTicks(low, high, mostTicks) {
  const rough = (high - low) / Math.max(mostTicks, 1) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= rough * 0.999);
  const ticks = [];
  for (let count = Math.ceil(low / step - 1e-9); count * step <= high + step * 1e-9; count += 1) ticks.push(count * step || 0);
  return { ticks, digits: Math.max(0, -Math.floor(Math.log10(step) + 1e-9)) };
}

// Bytes on an axis share one unit, which its title names.
function byteTicks(low, high, mostTicks) {
  const unit = byteUnit(high);
  const size = 1024 ** unit;
  const { ticks, digits } = roundTicks(low / size, high / size, mostTicks);
  return { unit: BYTE_UNITS[unit], ticks: ticks.map((tick) => ({ at: tick * size, text: tick.toFixed(digits) })) };
}

function shareTicks(low, high, mostTicks) {
  const { ticks, digits } = roundTicks(100 * low, 100 * high, mostTicks);
  return ticks.map((tick) => ({ at: tick / 100, text: `${tick.toFixed(digits).replace("-", "−")} %` }));
}

// A chart that is drawn anew whenever its width changes, so that text keeps its size.
function newChart(holder, label, heightFor) {
  const width = Math.max(holder.clientWidth, 240);
  const height = heightFor(width);
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": label });
  holder.replaceChildren(svg);
  return { svg, width, height };
}

function drawAxes(svg, frame, x, y, xTicks, yTicks, xTitle, yTitle) {
  for (const { at, text } of yTicks) {
    svg.append(
      shape("line", { class: "grid", x1: frame.left, x2: frame.right, y1: y(at), y2: y(at) }),
      shape("text", { x: frame.left - 8, y: y(at) + 4, "text-anchor": "end" }, text),
    );
  }
  for (const { at, text } of xTicks) {
    svg.append(
      shape("line", { class: "axis", x1: x(at), x2: x(at), y1: frame.bottom, y2: frame.bottom + 5 }),
      shape("text", { x: x(at), y: frame.bottom + 19, "text-anchor": "middle" }, text),
    );
  }
  svg.append(
    shape("line", { class: "axis", x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom }),
    shape("text", { class: "axis-title", x: (frame.left + frame.right) / 2, y: frame.bottom + 39, "text-anchor": "middle" }, xTitle),
    shape("text", { class: "axis-title", x: 0, y: 12 }, yTitle),
  );
}

function pathThrough(places) {
  return places.map(([left, top], index) => `${index ? "L" : "M"}${left.toFixed(1)},${top.toFixed(1)}`).join("");
}

function showTip(holder, left, top, title, lines) {
  hideTip(holder);
  const tip = element("div", { class: "tip" }, element("strong", {}, title), ...lines.map((line) => element("div", {}, line)));
  holder.append(tip);
  const room = holder.clientWidth - tip.offsetWidth;
  tip.style.left = `${Math.max(0, Math.min(left - tip.offsetWidth / 2, room))}px`;
  const above = top - tip.offsetHeight - 14;
  tip.style.top = `${above >= -20 ? above : top + 16}px`;
}

function hideTip(holder) {
  holder.querySelector(".tip")?.remove();
}

function legendEntry(text, ...shapes) {
  return element("span", {}, shape("svg", { width: 22, height: 12, "aria-hidden": "true" }, ...shapes), text);
}

function swatch(className, text) {
  return element("span", { class: "chip" }, element("i", { class: className }), text);
}
