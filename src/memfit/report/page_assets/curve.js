// The trade-off: plans on a line, baselines as marks.

const DIAMOND = "M0,-5.5L5.5,0L0,5.5L-5.5,0Z";

function drawCurveLegend(report) {
  const legend = byId("curve-legend");
  const line = shape("line", { x1: 0, x2: 22, y1: 6, y2: 6, style: "stroke:var(--accent);stroke-width:2.25" });
  const dot = shape("circle", { cx: 11, cy: 6, r: 4, style: "fill:var(--panel);stroke:var(--accent);stroke-width:2" });
  legend.append(legendEntry("memfit's plans, predicted", line, dot));
  const diamond = shape("path", { d: DIAMOND, transform: "translate(11,6)", style: "fill:var(--panel);stroke:var(--muted);stroke-width:1.6" });
  if (report.marks.some((mark) => !mark.is_measured)) legend.append(legendEntry("whole blocks recomputed, predicted", diamond));
  const disc = shape("circle", { cx: 11, cy: 6, r: 4.5, style: "fill:var(--measured)" });
  if (report.marks.some((mark) => mark.is_measured)) legend.append(legendEntry("measured, with its 25th to 75th percentile", disc));
}

function drawCurve(report, selected, select) {
  const holder = byId("curve");
  const focused = holder.contains(document.activeElement) ? document.activeElement.dataset.place : null;
  const { svg, width, height } = newChart(holder, "Peak memory against slowdown", (w) => Math.max(280, Math.min(400, w * 0.45)));
  const frame = { left: 52, right: width - 14, top: 46, bottom: height - 46 };
  const all = [...report.points, ...report.marks];
  // The device's capacity belongs to the picture where it is near.
  const capacity = report.profile.device_bytes;
  const largest = Math.max(...all.map((entry) => entry.peak_bytes), report.budget_bytes ?? 0);
  const showsCapacity = capacity !== null && capacity <= 1.5 * largest;
  const peaks = all.map((entry) => entry.peak_bytes).concat(report.budget_bytes ?? [], showsCapacity ? capacity : []);
  const overheads = all.flatMap((entry) => [entry.overhead, ...(entry.overhead_quartiles ?? [])]);
  const [least, most] = [Math.min(...peaks), Math.max(...peaks)];
  const margin = 0.05 * (most - least || most);
  const xDomain = [least < 0.3 * most ? 0 : least - margin, most + margin];
  const low = Math.min(0, ...overheads);
  const yDomain = [low && low * 1.1, Math.max(...overheads) * 1.08 || 0.01];
  const x = linear(xDomain, [frame.left, frame.right]);
  const y = linear(yDomain, [frame.bottom, frame.top]);
  const { unit, ticks } = byteTicks(...xDomain, width / 90);
  drawAxes(svg, frame, x, y, ticks, shareTicks(...yDomain, 6), `peak memory of the step (${unit})`, "time added to saving everything");

  const places = report.points.map((point) => [x(point.peak_bytes), y(point.overhead)]);
  const floor = `L${places[places.length - 1][0].toFixed(1)},${y(low)}L${places[0][0].toFixed(1)},${y(low)}Z`;
  svg.append(shape("path", { class: "frontier-area", d: pathThrough(places) + floor }), shape("path", { class: "frontier", d: pathThrough(places) }));
  const [atX, atY] = places[selected];
  svg.append(shape("path", { class: "guide", fill: "none", d: `M${frame.left},${atY}H${atX}V${frame.bottom}` }));
  const boxes = [];
  if (report.budget_bytes !== null) {
    const left = x(report.budget_bytes);
    svg.append(
      shape("line", { class: "budget-line", x1: left, x2: left, y1: frame.top, y2: frame.bottom }),
      shape("text", { x: left, y: frame.top - 4, "text-anchor": left > width - 80 ? "end" : "middle" }, `budget ${bytesText(report.budget_bytes)}`),
    );
    boxes.push([left - 3, frame.top, left + 3, frame.bottom]);
  }
  if (showsCapacity) {
    const left = x(capacity);
    const isNearBudget = report.budget_bytes !== null && Math.abs(left - x(report.budget_bytes)) < 150;
    const text = `${report.profile.device} has ${bytesText(capacity)}`;
    const top = frame.top - (isNearBudget ? 20 : 4);
    svg.append(
      shape("line", { class: "capacity-line", x1: left, x2: left, y1: frame.top, y2: frame.bottom }),
      shape("text", { class: "capacity-label", x: left, y: top, "text-anchor": left > width - 120 ? "end" : "middle" }, text),
    );
    boxes.push([left - 3, frame.top, left + 3, frame.bottom]);
  }
  places.forEach(([left, top]) => boxes.push([left - 7, top - 7, left + 7, top + 7]));
  // Labels keep off the line, too.
  places.slice(1).forEach(([right, bottom], index) => {
    const [left, top] = places[index];
    for (let part = 1; part < 6; part += 1) boxes.push(boxAround(left + ((right - left) * part) / 6, top + ((bottom - top) * part) / 6, 3));
  });
  report.marks.forEach((mark) => boxes.push(boxAround(x(mark.peak_bytes), y(mark.overhead), 7)));
  // On a phone there is room for what was measured alone.
  const labelled = report.marks.filter((mark) => width >= 560 || mark.is_measured);
  labelled.sort((one, other) => other.is_measured - one.is_measured).forEach((mark) => labelMark(svg, frame, boxes, mark, x(mark.peak_bytes), y(mark.overhead)));
  report.points.forEach((point, index) => drawPoint(holder, svg, report, index, places[index], index === selected, select));
  report.marks.forEach((mark) => drawMark(holder, svg, mark, x(mark.peak_bytes), y(mark.overhead), y));
  if (focused) holder.querySelector(`[data-place="${focused}"]`)?.focus();
}

function boxAround(left, top, radius) {
  return [left - radius, top - radius, left + radius, top + radius];
}

function drawPoint(holder, svg, report, index, [left, top], isSelected, select) {
  const point = report.points[index];
  const lines = [`${bytesText(point.peak_bytes)} peak (${exactBytesText(point.peak_bytes)})`, `${slowerText(point.overhead)} time`];
  if (point.host_bytes) lines.push(hostText(point));
  const dot = shape("circle", {
    class: isSelected ? "point selected" : "point", cx: left, cy: top, r: isSelected ? 7.5 : report.points.length > 20 ? 3.5 : 4.5,
    tabindex: 0, role: "button", "data-place": index, "aria-pressed": isSelected, "aria-label": `Plan: ${lines.join(", ")}`,
  });
  dot.addEventListener("click", () => select(index));
  dot.addEventListener("keydown", (event) => {
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      select(index);
    }
  });
  attachTip(holder, dot, left, top, "memfit's plan, predicted", lines);
  svg.append(dot);
}

function drawMark(holder, svg, mark, left, top, y) {
  if (mark.overhead_quartiles) {
    const [low, high] = mark.overhead_quartiles;
    svg.append(shape("line", { class: "quartiles", x1: left, x2: left, y1: y(low), y2: y(high) }));
  }
  const lines = [`${bytesText(mark.peak_bytes)} peak (${exactBytesText(mark.peak_bytes)})`, `${slowerText(mark.overhead)} time, ${mark.is_measured ? "measured" : "predicted"}`];
  if (mark.overhead_quartiles) lines.push(`25th to 75th percentile ${mark.overhead_quartiles.map(slowerText).join(" to ")}`);
  if (mark.note) lines.push(mark.note);
  const attributes = { tabindex: 0, role: "img", "aria-label": `${mark.label}: ${lines.join(", ")}` };
  const sign = mark.is_measured
    ? shape("circle", { class: "mark measured", cx: left, cy: top, r: 5.5, ...attributes })
    : shape("path", { class: "mark", d: DIAMOND, transform: `translate(${left},${top})`, ...attributes });
  attachTip(holder, sign, left, top, mark.label, lines);
  svg.append(sign);
}

// The first of a few places around the mark where its label covers nothing; none at all where there is no room.
function labelMark(svg, frame, boxes, mark, left, top) {
  const length = 6.1 * mark.label.length;
  const choices = [["start", 10, 4], ["end", -10, 4], ["middle", 0, -12], ["middle", 0, 20], ["start", 7, -9], ["end", -7, -9], ["start", 7, 16], ["end", -7, 16]];
  for (const [anchor, right, down] of choices) {
    const from = left + right - (anchor === "end" ? length : anchor === "middle" ? length / 2 : 0);
    const box = [from, top + down - 11, from + length, top + down + 3];
    const isFree = boxes.every((other) => box[2] < other[0] || other[2] < box[0] || box[3] < other[1] || other[3] < box[1]);
    if (isFree && box[0] > frame.left && box[2] < frame.right + 10 && box[1] > frame.top - 8 && box[3] < frame.bottom) {
      const className = mark.is_measured ? "mark-label measured" : "mark-label";
      svg.append(shape("text", { class: className, x: left + right, y: top + down, "text-anchor": anchor }, mark.label));
      boxes.push(box);
      return;
    }
  }
}

function attachTip(holder, target, left, top, title, lines) {
  const show = () => showTip(holder, left, top, title, lines);
  target.addEventListener("pointerenter", show);
  target.addEventListener("focus", show);
  target.addEventListener("pointerleave", () => hideTip(holder));
  target.addEventListener("blur", () => hideTip(holder));
}

function listAllPoints(report) {
  const planned = report.points.map((point) => ({ ...point, label: "memfit's plan", is_measured: false, note: point.host_bytes ? hostText(point) : "" }));
  const rows = [...planned, ...report.marks].sort((a, b) => a.peak_bytes - b.peak_bytes);
  byId("all-points").append(
    ...rows.map((row) =>
      element("tr", {},
        element("th", { scope: "row" }, row.note ? `${row.label} (${row.note})` : row.label),
        element("td", { title: exactBytesText(row.peak_bytes) }, bytesText(row.peak_bytes)),
        element("td", {}, slowerText(row.overhead)),
        element("td", {}, row.is_measured ? "measured" : "predicted"),
      ),
    ),
  );
}
