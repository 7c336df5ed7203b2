// Peak and speed over the size of the batch, where several sizes were tuned or planned.

function speedText(sizes, speed) {
  return sizes.is_throughput ? `${numberText(speed)} samples/s` : `${slowerText(speed)} time`;
}

function prepareSizes(report) {
  const { sizes } = report;
  byId("sizes").hidden = !sizes;
  if (!sizes) return;
  const chosen = sizes.rows.find(([size]) => size === sizes.chosen_size);
  const within = sizes.budget_bytes === null ? "" : ` within ${bytesText(sizes.budget_bytes)}`;
  byId("sizes-lead").textContent = sizes.is_throughput
    ? `Of the sizes that were tried, ${sizes.chosen_size} trains the most samples per second${within}: ${numberText(chosen[2])}. The page below is for that size.`
    : `Each batch runs by the plan for the next size that is at least as large; all of them stay${within || " within the budget"}. The page below is for the largest size, ${sizes.chosen_size}.`;
  byId("sizes-speed-head").textContent = sizes.is_throughput ? "Samples per second" : "Time";
  const dot = (style) => shape("circle", { cx: 11, cy: 6, r: 4.5, style });
  byId("sizes-legend").append(legendEntry("predicted", dot("fill:var(--panel);stroke:var(--accent);stroke-width:2")));
  if (sizes.rows.some(([, , , isMeasured]) => isMeasured)) byId("sizes-legend").append(legendEntry("measured", dot("fill:var(--measured)")));
  byId("sizes-body").append(
    ...sizes.rows.map(([size, peak, speed, isMeasured]) =>
      element("tr", { "data-size": size },
        element("th", { scope: "row" }, size === sizes.chosen_size ? `${size} (${sizes.is_throughput ? "chosen" : "largest"})` : String(size)),
        element("td", {}, peak === null || speed === null ? "above the budget" : bytesText(peak)),
        element("td", {}, speed === null ? "" : sizes.is_throughput ? numberText(speed) : slowerText(speed)),
        element("td", {}, speed === null ? "" : isMeasured ? "measured" : "predicted"),
      ),
    ),
  );
}

function drawSizes(report) {
  const { sizes } = report;
  if (!sizes) return;
  const fitting = sizes.rows.filter(([, peak, speed]) => peak !== null && speed !== null);
  const speeds = fitting.map(([size, , speed, isMeasured]) => ({ size, isMeasured, at: speed }));
  const peaks = fitting.map(([size, peak, , isMeasured]) => ({ size, isMeasured, at: peak }));
  const most = Math.max(...speeds.map(({ at }) => at));
  const top = sizes.is_throughput ? most * 1.12 : Math.max(most * 1.12, 0.01);
  const { ticks, digits } = roundTicks(0, top, 5);
  drawSizeChart(byId("sizes-speed"), sizes, speeds, {
    top,
    ticks: sizes.is_throughput ? ticks.map((at) => ({ at, text: at.toLocaleString("en", { maximumFractionDigits: digits }) })) : shareTicks(0, top, 5),
    title: sizes.is_throughput ? "samples per second" : "time added to saving everything",
    textOf: (speed) => speedText(sizes, speed),
  });
  const largest = Math.max(...peaks.map(({ at }) => at), sizes.budget_bytes ?? 0);
  const bytes = byteTicks(0, largest * 1.12, 5);
  drawSizeChart(byId("sizes-peak"), sizes, peaks, {
    top: largest * 1.12, ticks: bytes.ticks, title: `peak memory of the step (${bytes.unit})`, textOf: bytesText, limit: sizes.budget_bytes,
  });
}

function drawSizeChart(holder, sizes, dots, { top, ticks, title, textOf, limit = null }) {
  const { svg, width, height } = newChart(holder, title, (w) => Math.max(220, Math.min(300, w * 0.6)));
  const frame = { left: 58, right: width - 18, top: 34, bottom: height - 46 };
  const numbers = sizes.rows.map(([size]) => size);
  const [least, most] = [Math.min(...numbers), Math.max(...numbers)];
  // Sizes that are doubled stand at equal distances.
  const isDoubled = most > 8 * least;
  const scaled = (size) => (isDoubled ? Math.log2(size) : size);
  const margin = 0.05 * (scaled(most) - scaled(least) || 1);
  const across = linear([scaled(least) - margin, scaled(most) + margin], [frame.left, frame.right]);
  const x = (size) => across(scaled(size));
  const y = linear([0, top], [frame.bottom, frame.top]);
  drawAxes(svg, frame, x, y, sizeTicks(numbers, x), ticks, sizes.is_throughput ? "samples per step" : "size", title);
  if (limit !== null) {
    svg.append(
      shape("line", { class: "budget-line", x1: frame.left, x2: frame.right, y1: y(limit), y2: y(limit) }),
      shape("text", { x: frame.left + 6, y: y(limit) - 5 }, `budget ${bytesText(limit)}`),
    );
  }
  svg.append(shape("path", { class: "size-line", d: pathThrough(dots.map(({ size, at }) => [x(size), y(at)])) }));
  for (const { size, at, isMeasured } of dots) {
    const isChosen = sizes.is_throughput && size === sizes.chosen_size;
    const lines = [`${textOf(at)}, ${isMeasured ? "measured" : "predicted"}`];
    const dot = shape("circle", {
      class: `size${isMeasured ? " measured" : ""}${isChosen ? " chosen" : ""}`, cx: x(size), cy: y(at), r: isChosen ? 7 : 4.5,
      tabindex: 0, role: "img", "data-size": size, "aria-label": `${size}: ${lines[0]}`,
    });
    attachTip(holder, dot, x(size), y(at), `size ${size}`, lines);
    svg.append(dot);
    if (isChosen) {
      const anchor = x(size) > frame.right - 60 ? "end" : x(size) < frame.left + 60 ? "start" : "middle";
      svg.append(shape("text", { class: "chosen-label", x: x(size), y: limit === null ? y(at) - 13 : y(at) + 26, "text-anchor": anchor }, textOf(at)));
    }
  }
}

// The sizes themselves, those that have room.
function sizeTicks(numbers, x) {
  const ticks = [];
  for (const size of numbers) {
    const text = size.toLocaleString("en");
    const last = ticks[ticks.length - 1];
    if (!last || x(size) - x(last.at) > 4 * (text.length + last.text.length) + 8) ticks.push({ at: size, text });
  }
  return ticks;
}
