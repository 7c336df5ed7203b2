// Activations by block: one stacked bar per block, with its numbers.

const OUTCOMES = [
  { name: "saved", letter: "s", word: "Saved" },
  { name: "recomputed", letter: "r", word: "Recomputed" },
  { name: "offloaded", letter: "o", word: "Offloaded" },
  { name: "compressed", letter: "c", word: "Compressed" },
];

// Compressed values get a column only where some plan has them; the other three are always worth a zero.
function shownOutcomes(report) {
  return OUTCOMES.filter((outcome, place) => place < 3 || report.points.some((point) => point.blocks.some((row) => row[place] > 0)));
}

function prepareBlocks(report) {
  const outcomes = shownOutcomes(report);
  document.querySelector(".blocks").style.setProperty("--num-outcomes", outcomes.length);
  byId("blocks-legend").append(...outcomes.map((outcome) => swatch(outcome.name, outcome.word.toLowerCase())));
  byId("blocks-head").append(
    element("th", { scope: "col" }, report.is_compiled ? "Block and its partition" : "Block"),
    element("th", { class: "bar-cell" }),
    ...outcomes.map((outcome) => element("th", { scope: "col" }, outcome.word)),
  );
}

// With more, neighbours of one kind that hold the same are one row.
const MOST_UNFOLDED_BLOCKS = 12;

function foldedBlocks(report, point) {
  const groups = [];
  report.blocks.forEach((_, index) => {
    const last = groups[groups.length - 1];
    const isSame = last && report.block_kinds[last[0]] === report.block_kinds[index] && String(point.blocks[last[0]]) === String(point.blocks[index])
      && point.partitions?.[last[0]] === point.partitions?.[index];
    if (isSame) last.push(index);
    else groups.push([index]);
  });
  return groups;
}

function labelOf(report, group) {
  const [first, last] = [report.blocks[group[0]], report.blocks[group[group.length - 1]]];
  if (group.length === 1) return first;
  return `${first} – ${last.slice(last.lastIndexOf(".") + 1)} (${group.length} blocks)`;
}

function setUpFolding(report, redraw) {
  const button = byId("blocks-fold");
  const view = { isFolded: report.blocks.length > MOST_UNFOLDED_BLOCKS };
  button.hidden = !view.isFolded;
  const show = () => {
    const numBlocks = report.blocks.length - (report.is_compiled ? 0 : 1);
    button.textContent = view.isFolded ? `Show all ${numBlocks} blocks` : "Fold equal blocks";
  };
  button.addEventListener("click", () => {
    view.isFolded = !view.isFolded;
    show();
    redraw();
  });
  show();
  return view;
}

function drawBlocks(report, point, isFolded) {
  const outcomes = shownOutcomes(report);
  const counts = countsByBlock(report, point);
  const widest = Math.max(1, ...report.points.flatMap((other) => other.blocks.map((row) => row.reduce((a, b) => a + b, 0))));
  const groups = isFolded ? foldedBlocks(report, point) : report.blocks.map((_, index) => [index]);
  const sum = (rows) => OUTCOMES.map((_, place) => rows.reduce((total, row) => total + row[place], 0));
  const rows = groups.map((group) =>
    blockRow(outcomes, labelOf(report, group), point.partitions?.[group[0]], sum(group.map((index) => point.blocks[index])), counts && sum(group.map((index) => counts[index])), widest * Math.max(...groups.map((other) => other.length))),
  );
  byId("blocks-body").replaceChildren(...rows);
  const totals = OUTCOMES.map((_, place) => point.blocks.reduce((sum, row) => sum + row[place], 0));
  byId("blocks-total").replaceChildren(
    element("th", { scope: "row" }, "Together"),
    element("td", { class: "bar-cell" }),
    ...outcomes.map((outcome) => {
      const place = OUTCOMES.indexOf(outcome);
      return bytesCell(outcome, totals[place], counts && counts.reduce((sum, row) => sum + row[place], 0));
    }),
  );
  return Object.fromEntries(OUTCOMES.map((outcome, place) => [outcome.name, totals[place]]));
}

// How many values of each block have which outcome; null inside compiled blocks, where values have no names.
function countsByBlock(report, point) {
  if (report.is_compiled) return null;
  const counts = report.blocks.map(() => OUTCOMES.map(() => 0));
  report.values.block.forEach((block, index) => {
    const place = OUTCOMES.findIndex((outcome) => outcome.letter === point.outcomes[index]);
    if (place >= 0) counts[block][place] += 1;
  });
  return counts;
}

function blockRow(outcomes, label, partition, bytesOfOutcomes, countsOfOutcomes, widest) {
  const parts = OUTCOMES.map((outcome, place) => element("i", { class: outcome.name, style: `width:${(100 * bytesOfOutcomes[place]) / widest}%` }));
  return element("tr", {},
    element("th", { scope: "row", class: "path", title: label }, label, ...(partition ? [element("span", { class: "partition" }, ` ${partition}`)] : [])),
    element("td", { class: "bar-cell" }, element("div", { class: "bar", "aria-hidden": "true" }, ...parts.filter((_, place) => bytesOfOutcomes[place]))),
    ...outcomes.map((outcome) => bytesCell(outcome, bytesOfOutcomes[OUTCOMES.indexOf(outcome)], countsOfOutcomes && countsOfOutcomes[OUTCOMES.indexOf(outcome)])),
  );
}

function bytesCell(outcome, numBytes, numValues) {
  const counted = numValues === null ? "" : ` in ${numValues.toLocaleString("en")} value${numValues === 1 ? "" : "s"}`;
  const title = `${exactBytesText(numBytes)}${counted}`;
  const attributes = { "data-outcome": outcome.name, "data-bytes": numBytes, "data-values": numValues, title };
  return element("td", numBytes ? attributes : { ...attributes, class: "zero" }, numBytes ? bytesText(numBytes) : "0");
}
