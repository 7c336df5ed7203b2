// What each block keeps: one stacked bar a block, with its numbers.

const FATES = [
  { name: "saved", letter: "s", word: "Saved" },
  { name: "recomputed", letter: "r", word: "Recomputed" },
  { name: "offloaded", letter: "o", word: "Offloaded" },
  { name: "compressed", letter: "c", word: "Compressed" },
];

// Compressed values get a column only where some plan has them; the other three are always worth a zero.
function shownFates(report) {
  return FATES.filter((fate, place) => place < 3 || report.points.some((point) => point.blocks.some((row) => row[place] > 0)));
}

function prepareBlocks(report) {
  const fates = shownFates(report);
  document.querySelector(".blocks").style.setProperty("--num-fates", fates.length);
  byId("blocks-legend").append(...fates.map((fate) => swatch(fate.name, fate.word.toLowerCase())));
  byId("blocks-head").append(
    element("th", { scope: "col" }, "Block"),
    element("th", { class: "bar-cell" }),
    ...fates.map((fate) => element("th", { scope: "col" }, fate.word)),
  );
}

function drawBlocks(report, point) {
  const fates = shownFates(report);
  const counts = countsByBlock(report, point);
  const widest = Math.max(1, ...report.points.flatMap((other) => other.blocks.map((row) => row.reduce((a, b) => a + b, 0))));
  const rows = report.blocks.map((label, index) => blockRow(fates, label, point.blocks[index], counts[index], widest));
  byId("blocks-body").replaceChildren(...rows);
  const totals = FATES.map((_, place) => point.blocks.reduce((sum, row) => sum + row[place], 0));
  byId("blocks-total").replaceChildren(
    element("th", { scope: "row" }, "Together"),
    element("td", { class: "bar-cell" }),
    ...fates.map((fate) => {
      const place = FATES.indexOf(fate);
      return bytesCell(fate, totals[place], counts.reduce((sum, row) => sum + row[place], 0));
    }),
  );
  return Object.fromEntries(FATES.map((fate, place) => [fate.name, totals[place]]));
}

// How many values of each block have which fate.
function countsByBlock(report, point) {
  const counts = report.blocks.map(() => FATES.map(() => 0));
  report.values.block.forEach((block, index) => {
    const place = FATES.findIndex((fate) => fate.letter === point.fates[index]);
    if (place >= 0) counts[block][place] += 1;
  });
  return counts;
}

function blockRow(fates, label, bytesOfFates, countsOfFates, widest) {
  const parts = FATES.map((fate, place) => element("i", { class: fate.name, style: `width:${(100 * bytesOfFates[place]) / widest}%` }));
  return element("tr", {},
    element("th", { scope: "row", class: "path", title: label }, label),
    element("td", { class: "bar-cell" }, element("div", { class: "bar", "aria-hidden": "true" }, ...parts.filter((_, place) => bytesOfFates[place]))),
    ...fates.map((fate) => bytesCell(fate, bytesOfFates[FATES.indexOf(fate)], countsOfFates[FATES.indexOf(fate)])),
  );
}

function bytesCell(fate, numBytes, numValues) {
  const title = `${exactBytesText(numBytes)} in ${numValues.toLocaleString("en")} value${numValues === 1 ? "" : "s"}`;
  const attributes = { "data-fate": fate.name, "data-bytes": numBytes, "data-values": numValues, title };
  return element("td", numBytes ? attributes : { ...attributes, class: "zero" }, numBytes ? bytesText(numBytes) : "0");
}
