// Builds the page, and redraws it when another budget is chosen. `#budget=12000000` in the address opens on a plan.

// What was measured, which a GPU's allocator may count as more than the timeline has; a profile made by hand has none.
function plainPeak(report) {
  return report.profile.peak_bytes || Math.max(...report.timeline.plain_bytes, 0);
}

function writeHead(report) {
  const { device, step_seconds: seconds } = report.profile;
  const plain = plainPeak(report);
  byId("subtitle").textContent = `Saving everything, one step on ${device} takes ${secondsText(seconds)} and peaks at ${bytesText(plain)}.`;
  // Inside compiled blocks there are partitions, and no values to list.
  byId("values-panel").hidden = report.is_compiled;
  byId("budget-least").textContent = bytesText(report.points[0].peak_bytes);
  byId("budget-most").textContent = bytesText(report.points[report.points.length - 1].peak_bytes);
}

function writeFacts(report) {
  const { profile } = report;
  const { link } = profile;
  const facts = [
    ["Device", profile.device_bytes === null ? profile.device : `${profile.device}, ${bytesText(profile.device_bytes)}`],
    ["Fingerprint of the model", profile.fingerprint],
    ["Measured with", profile.measured_with],
    ["Plain step", `${secondsText(profile.step_seconds)}, peak ${bytesText(profile.peak_bytes)} (${exactBytesText(profile.peak_bytes)})`],
    ["Weights, optimizer state and batch", bytesText(profile.resident_bytes)],
    ["Recorded", report.is_compiled
      ? `${report.blocks.length} compiled blocks, ${report.timeline.first_ops.length} segments of the step`
      : `${profile.num_ops.toLocaleString("en")} ops, ${report.values.num_bytes.length.toLocaleString("en")} values made inside the model`],
    ...(link ? [["Link to the host", `${rateText(link.out_bytes_per_second)} to the host, ${rateText(link.back_bytes_per_second)} to the device, ${bytesText(link.host_free_bytes)} of host memory free`]] : []),
    ["Predicted", (report.is_compiled
      ? "peaks and times from the measured bytes and seconds of each block with each of its partitions"
      : "peaks by simulating the recorded step under each plan, times from the measured times of the recomputed ops")
      + (link ? " and of copies to and from the host" : "")],
    ...report.facts,
  ];
  byId("facts").append(...facts.flatMap(([name, fact]) => [element("dt", {}, name), element("dd", {}, fact)]));
}

function writeFigures(report, point, totals) {
  const plain = plainPeak(report);
  const less = plain ? 1 - point.peak_bytes / plain : 0;
  const figures = { peak: bytesText(point.peak_bytes), "less-memory": shareText(-less), slower: slowerText(point.overhead), recomputed: bytesText(totals.recomputed), offloaded: bytesText(totals.offloaded) };
  for (const [id, text] of Object.entries(figures)) byId(id).textContent = text;
  byId("peak").dataset.bytes = point.peak_bytes;
  byId("slower").dataset.overhead = point.overhead;
  for (const outcome of ["recomputed", "offloaded"]) byId(outcome).dataset.bytes = totals[outcome];
  // Few plans go to the host; where none does, there is no figure for it.
  byId("offloaded").parentElement.hidden = !report.points.some((other) => other.host_bytes);
  const slider = byId("budget");
  slider.setAttribute("aria-valuetext", `${figures.peak} peak, ${figures.slower} time`);
  const changes = [];
  const flops = point.recompute_flops ? `, for ${flopsText(point.recompute_flops)}` : "";
  if (totals.recomputed) changes.push(`${figures.recomputed} of activations are recomputed in the backward pass${flops}`);
  if (totals.offloaded) changes.push(`${figures.offloaded} of activations are offloaded to host memory, copied while the device computes`);
  const memory = `${shareText(Math.abs(less))} ${less < 0 ? "more" : "less"} memory`;
  const time = `${shareText(Math.abs(point.overhead))} ${point.overhead < 0 ? "less" : "more"} time`;
  const step = `At ${figures.peak} the step${report.is_compiled ? " with compiled blocks" : ""} is predicted to take ${memory} than saving everything and ${time}`;
  if (changes.length) byId("summary").textContent = `${step}: ${changes.join("; ")}.`;
  else if (report.is_compiled) byId("summary").textContent = `${step}; nothing is recomputed.`;
  else byId("summary").textContent = "Every activation that the backward pass needs is saved; nothing is recomputed.";
}

function start() {
  const report = JSON.parse(byId("report-data").textContent);
  const slider = byId("budget");
  const state = { selected: report.selected, showAllLive: false };
  const drawValues = newValueTable(report);
  writeHead(report);
  writeFacts(report);
  prepareSizes(report);
  drawCurveLegend(report);
  drawTimelineLegend(report);
  listAllPoints(report);
  prepareBlocks(report);
  const folding = setUpFolding(report, () => {
    const point = report.points[state.selected];
    drawBlocks(report, point, folding.isFolded);
  });
  byId("download").addEventListener("click", () => downloadPlan(report, state.selected));

  function drawCharts() {
    const point = report.points[state.selected];
    drawSizes(report);
    drawCurve(report, state.selected, select);
    drawTimeline(report, point);
  }

  function drawLive() {
    listLive(report.points[state.selected], state.showAllLive, () => {
      state.showAllLive = !state.showAllLive;
      drawLive();
    });
  }

  function select(index) {
    state.selected = Math.max(0, Math.min(report.points.length - 1, index));
    const point = report.points[state.selected];
    slider.value = state.selected;
    writeFigures(report, point, drawBlocks(report, point, folding.isFolded));
    writeCode(report, point);
    history.replaceState(null, "", `#budget=${point.peak_bytes}`);
    describePeak(report, point);
    drawLive();
    drawCharts();
    drawValues(point);
  }

  function selectFromAddress() {
    const [, kind, number] = /^#(point|budget)=(\d+)$/.exec(location.hash) ?? [];
    if (kind === "budget") select(fastestWithin(report, Number(number)));
    else select(kind ? Number(number) : state.selected);
  }

  slider.max = report.points.length - 1;
  slider.addEventListener("input", () => select(Number(slider.value)));
  addEventListener("hashchange", selectFromAddress);
  new ResizeObserver(drawCharts).observe(document.querySelector("main"));
  setUpTheme();
  selectFromAddress();
}

// The fastest plan that keeps to a budget; the smallest one where none does.
function fastestWithin(report, budgetBytes) {
  return Math.max(0, report.points.findLastIndex((point) => point.peak_bytes <= budgetBytes));
}

function writeCode(report, point) {
  byId("code").textContent = [
    "plan = memfit.Plan.load(\"plan.json\")  # the plan of the slider's position",
    "memfit.apply(model, plan)",
    "",
    "# or plan for this budget again:",
    `memfit.fit(model, batch, budget=${point.peak_bytes}${point.host_bytes ? `, host_budget=${point.host_bytes}` : ""}${report.is_compiled ? ", compile=True" : ""})  # ${bytesText(point.peak_bytes)}`,
  ].join("\n");
}

// The lines of all plans stand side by side, aligned at the end.
async function planText(report, place) {
  const { num_lines: numLines, packed } = report.plans;
  const compressed = Uint8Array.from(atob(packed), (character) => character.charCodeAt(0));
  const stream = new Blob([compressed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const lines = (await new Response(stream).text()).split("\n");
  return lines.filter((_, index) => index % numLines.length === place).slice(-numLines[place]).join("\n");
}

async function downloadPlan(report, place) {
  const address = URL.createObjectURL(new Blob([await planText(report, place)], { type: "application/json" }));
  const link = element("a", { href: address, download: "plan.json" });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

function setUpTheme() {
  const button = byId("theme");
  const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (systemIsDark.matches ? "dark" : "light")) === "dark";
  const show = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to the ${isDark() ? "light" : "dark"} theme`);
  };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    show();
  });
  systemIsDark.addEventListener("change", show);
  show();
}

start();
