// The memory of the step from its first op to its last, with the peak and what is live there.

const FIRST_LIVE_MODULES = 9;
// From the bottom up. What is above the others is activations, and what ops take while they run.
const KINDS = [
  { name: "weights", word: "weights" },
  { name: "batch", word: "batch" },
  { name: "optimizer", word: "optimizer state" },
  { name: "gradients", word: "gradients" },
  { name: "activations", word: "activations and workspaces" },
];

// The upper edge of each kind in each bucket; no edge is above what is in use there.
function stackedBytes(report, point) {
  const { weights, batch, optimizer_state: optimizer, gradients } = report.timeline.kinds;
  const none = point.timeline_bytes.map(() => 0);
  const parts = [point.timeline_bytes.map(() => weights), point.timeline_bytes.map(() => batch), optimizer, gradients ?? none];
  const edges = [];
  let below = none;
  for (const part of parts) {
    below = below.map((bytes, bucket) => Math.min(bytes + part[bucket], point.timeline_bytes[bucket]));
    edges.push(below);
  }
  edges.push(point.timeline_bytes);
  return edges;
}

// Where gradients are not known apart, they are part of the last kind, which has no bound.
function shownKinds(report) {
  if (report.timeline.kinds.gradients) return KINDS;
  return KINDS.map((kind) => (kind.name === "activations" ? { ...kind, word: "activations, gradients and workspaces" } : kind)).filter((kind) => kind.name !== "gradients");
}

function drawTimelineLegend(report) {
  const planLine = shape("line", { x1: 0, x2: 22, y1: 6, y2: 6, style: "stroke:var(--saved);stroke-width:2" });
  const plainLine = shape("line", { x1: 0, x2: 22, y1: 6, y2: 6, style: "stroke:var(--plain);stroke-width:1.5" });
  const dot = shape("circle", { cx: 11, cy: 6, r: 4.5, style: "fill:var(--recomputed)" });
  const area = (name) => shape("rect", { width: 22, height: 12, rx: 2, class: `kind-${name}` });
  const kinds = shownKinds(report).map(({ name, word }) => legendEntry(word, area(name)));
  byId("timeline-legend").append(legendEntry("this plan", planLine), legendEntry("everything saved", plainLine), legendEntry("peak", dot), ...kinds);
}

function drawTimeline(report, point) {
  const holder = byId("timeline");
  const { svg, width, height } = newChart(holder, "Bytes in use, op by op", (w) => Math.max(240, Math.min(360, w * 0.48)));
  const frame = { left: 44, right: width - 10, top: 40, bottom: height - 46 };
  const { first_ops: firstOps, plain_bytes: plainBytes, phases } = report.timeline;
  const numOps = report.timeline.unit === "op" ? report.profile.num_ops : firstOps.length;
  const most = Math.max(...plainBytes, ...point.timeline_bytes, 1);
  const x = linear([0, Math.max(numOps - 1, 1)], [frame.left, frame.right]);
  const y = linear([0, most * 1.04], [frame.bottom, frame.top]);
  const opTicks = roundTicks(0, numOps - 1, width / 110).ticks.filter(Number.isInteger).map((at) => ({ at, text: at.toLocaleString("en") }));
  const { unit, ticks } = byteTicks(0, most * 1.04, 5);
  drawAxes(svg, frame, x, y, opTicks, ticks, `${report.timeline.unit} of the step`, `in use (${unit})`);
  drawPhases(svg, frame, x, phases, numOps);

  const line = (allBytes) => pathThrough(allBytes.map((numBytes, index) => [x(firstOps[index]), y(numBytes)]));
  let below = point.timeline_bytes.map(() => 0);
  stackedBytes(report, point).forEach((edge, place) => {
    const back = pathThrough(below.map((numBytes, index) => [x(firstOps[index]), y(numBytes)]).reverse()).replace(/^M/, "L");
    svg.append(shape("path", { class: `kind-${KINDS[place].name}`, "data-bytes": Math.max(...edge, 0), d: edge.length ? `${line(edge)}${back}Z` : "" }));
    below = edge;
  });
  svg.append(
    shape("path", { class: "plain-line", d: line(plainBytes) }),
    shape("path", { class: "plan-line", d: line(point.timeline_bytes) }),
  );
  drawPeak(svg, frame, x, y, report, point);
  followPointer(holder, svg, frame, x, y, report, point);
}

function drawPhases(svg, frame, x, phases, numOps) {
  phases.forEach(([name, firstOp], index) => {
    const end = index + 1 < phases.length ? phases[index + 1][1] : numOps;
    if (index) svg.append(shape("line", { class: "phase", x1: x(firstOp), x2: x(firstOp), y1: frame.top - 8, y2: frame.bottom }));
    if (x(end) - x(firstOp) > 70) svg.append(shape("text", { x: (x(firstOp) + x(Math.min(end, numOps - 1))) / 2, y: frame.top - 6, "text-anchor": "middle" }, name));
  });
}

// Ops are drawn in buckets; the peak stands on its bucket so that it lies on the line.
function drawPeak(svg, frame, x, y, report, point) {
  const bucket = report.timeline.first_ops.findLastIndex((firstOp) => firstOp <= point.peak_op_index);
  const left = x(report.timeline.first_ops[bucket] ?? 0);
  const top = y(point.timeline_bytes[bucket] ?? 0);
  const isRight = left > (frame.left + frame.right) / 2;
  svg.append(
    shape("circle", { class: "peak-dot", cx: left, cy: top, r: 6 }),
    shape("text", { class: "peak-label", x: left + (isRight ? 11 : -11), y: top - 6, "text-anchor": isRight ? "start" : "end" }, bytesText(point.peak_bytes)),
  );
}

function followPointer(holder, svg, frame, x, y, report, point) {
  const { first_ops: firstOps, plain_bytes: plainBytes } = report.timeline;
  const cursor = shape("line", { class: "cursor", y1: frame.top, y2: frame.bottom, visibility: "hidden" });
  svg.append(cursor);
  svg.addEventListener("pointermove", (event) => {
    const left = event.clientX - svg.getBoundingClientRect().left;
    const share = Math.max(0, Math.min(1, (left - frame.left) / (frame.right - frame.left)));
    const bucket = Math.min(firstOps.length - 1, Math.round(share * (firstOps.length - 1)));
    if (bucket < 0) return;
    const at = x(firstOps[bucket]);
    fill(cursor, { x1: at, x2: at, visibility: "visible" }, []);
    const edges = stackedBytes(report, point);
    const places = KINDS.map(({ name }, place) => [name, edges[place][bucket] - (place ? edges[place - 1][bucket] : 0)]);
    const parts = shownKinds(report).map(({ name, word }) => [word, places.find(([other]) => other === name)[1]]);
    const lines = [
      `${bytesText(point.timeline_bytes[bucket])} with this plan, ${bytesText(plainBytes[bucket])} with everything saved`,
      ...parts.filter(([, numBytes]) => numBytes > 0).map(([word, numBytes]) => `${bytesText(numBytes)} ${word}`),
      ...namedNear(point, firstOps[bucket]),
    ];
    showTip(holder, at, y(point.timeline_bytes[bucket]), `${report.timeline.unit} ${firstOps[bucket].toLocaleString("en")}`, lines);
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    hideTip(holder);
  });
}

// The largest of what is live at the nearest op for which that is known.
function namedNear(point, opIndex) {
  const near = point.live_samples.reduce((best, sample) => (!best || Math.abs(sample[0] - opIndex) < Math.abs(best[0] - opIndex) ? sample : best), null);
  if (!near) return [];
  return [`live at op ${near[0].toLocaleString("en")}:`, ...near[1].map(([module, numBytes]) => `${bytesText(numBytes)} ${module || "(the model itself)"}`)];
}

function describePeak(report, point) {
  const phase = report.timeline.phases.findLast(([, firstOp]) => firstOp <= point.peak_op_index)?.[0] ?? "step";
  const { unit, first_ops: firstOps } = report.timeline;
  const total = unit === "op" ? report.profile.num_ops : firstOps.length;
  byId("timeline-title").textContent = `The step, ${unit} by ${unit}`;
  byId("peak-sentence").textContent =
    `The peak, ${bytesText(point.peak_bytes)}, is reached in the ${phase} pass at ${unit} ${point.peak_op_index.toLocaleString("en")}` +
    ` of ${total.toLocaleString("en")} (${point.peak_op}).`;
}

function listLive(point, showAll, toggle) {
  const most = Math.max(1, ...point.live_at_peak.map(([, numBytes]) => numBytes));
  const shown = showAll ? point.live_at_peak : point.live_at_peak.slice(0, FIRST_LIVE_MODULES);
  const rows = shown.map(([module, numBytes]) => liveRow(module || "(the model itself)", numBytes, most));
  const numFolded = point.num_live_modules - point.live_at_peak.length;
  if (showAll && numFolded) rows.push(liveRow(`${numFolded} more modules`, point.other_live_bytes, most));
  byId("live").replaceChildren(...rows);
  const more = byId("live-more");
  more.hidden = point.num_live_modules <= FIRST_LIVE_MODULES;
  more.textContent = showAll ? "Show fewer" : `Show all ${point.num_live_modules} modules`;
  more.onclick = toggle;
}

function liveRow(name, numBytes, most) {
  return element("li", { "data-bytes": numBytes, title: exactBytesText(numBytes) },
    element("span", { class: "path" }, name),
    element("span", {}, bytesText(numBytes)),
    element("span", { class: "meter", "aria-hidden": "true" }, element("i", { style: `width:${(100 * numBytes) / most}%` })),
  );
}
