// Builds the page, and redraws it when another budget is chosen. `#point=3` in the address opens on a plan.

// What was measured, which a GPU's allocator may count as more than the timeline has; a profile made by hand has none.
function plainPeak(report) {
  return report.profile.peak_bytes || Math.max(...report.timeline.plain_bytes, 0);
}

function writeHead(report) {
  const { device, step_seconds: seconds } = report.profile;
  const plain = plainPeak(report);
  byId("subtitle").textContent = `Saving everything, one step on ${device} takes ${secondsText(seconds)} and peaks at ${bytesText(plain)}.`;
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
    ["Recorded", `${profile.num_ops.toLocaleString("en")} ops, ${report.values.num_bytes.length.toLocaleString("en")} values made inside the model`],
    ...(link ? [["Link to the host", `${rateText(link.out_bytes_per_second)} to the host, ${rateText(link.back_bytes_per_second)} to the device, ${bytesText(link.host_free_bytes)} of host memory free`]] : []),
    ["Predicted", "peaks by simulating the recorded step under each plan, slowdowns from the measured times of the recomputed ops" + (link ? " and of copies to and from the host" : "")],
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
  if (totals.recomputed) changes.push(`${figures.recomputed} of activations are recomputed in the backward pass, for ${flopsText(point.recompute_flops)}`);
  if (totals.offloaded) changes.push(`${figures.offloaded} of activations are offloaded to host memory, copied while the device computes`);
  byId("summary").textContent = changes.length
    ? `At ${figures.peak} the step is predicted to take ${shareText(less)} less memory than saving everything and ${shareText(point.overhead)} more time: ${changes.join("; ")}.`
    : "Every activation that the backward pass needs is saved; nothing is recomputed.";
}

function start() {
  const report = JSON.parse(byId("report-data").textContent);
  const slider = byId("budget");
  const state = { selected: report.selected, showAllLive: false };
  const drawValues = newValueTable(report);
  writeHead(report);
  writeFacts(report);
  drawCurveLegend(report);
  drawTimelineLegend();
  listAllPoints(report);
  prepareBlocks(report);

  function drawCharts() {
    const point = report.points[state.selected];
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
    writeFigures(report, point, drawBlocks(report, point));
    describePeak(report, point);
    drawLive();
    drawCharts();
    drawValues(point);
  }

  function selectFromAddress() {
    const asked = /^#point=(\d+)$/.exec(location.hash);
    select(asked ? Number(asked[1]) : state.selected);
  }

  slider.max = report.points.length - 1;
  slider.addEventListener("input", () => select(Number(slider.value)));
  addEventListener("hashchange", selectFromAddress);
  new ResizeObserver(drawCharts).observe(document.querySelector("main"));
  setUpTheme();
  selectFromAddress();
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
