// The table of values: searched, sorted and shown a page at a time, so that thousands stay quick.

const ROWS_PER_PAGE = 25;
const NOT_NEEDED = "-";
const VALUE_COLUMNS = [
  { key: "name", word: "Value" },
  { key: "block", word: "Block" },
  { key: "num_bytes", word: "Size" },
  { key: "outcome", word: "Decision" },
];

function newValueTable(report) {
  const columns = report.values;
  const view = { sortKey: "num_bytes", isAscending: false, page: 0, outcomes: "", point: null };
  const modules = columns.module.map((place) => columns.module_names[place]);
  const ops = columns.op.map((place) => columns.op_names[place]);
  const calls = columns.call.map((call, index) => `#${call}${columns.output[index] ? `.${columns.output[index]}` : ""}`);
  const searched = modules.map((module, index) => `${module}::${ops[index]}${calls[index]}`.toLowerCase());
  const wordOf = Object.fromEntries([...OUTCOMES.map((outcome) => [outcome.letter, outcome.name]), [NOT_NEEDED, "not needed"]]);

  const sortValues = {
    name: (index) => searched[index],
    block: (index) => columns.block[index],
    num_bytes: (index) => columns.num_bytes[index],
    outcome: (index) => "sroc-".indexOf(view.outcomes[index]),
  };

  function chosenValues() {
    const text = byId("search").value.trim().toLowerCase();
    const wanted = byId("decision").value;
    const chosen = [];
    for (let index = 0; index < searched.length; index += 1) {
      const outcome = view.outcomes[index];
      const fits = wanted === "all" || (wanted === "needed" ? outcome !== NOT_NEEDED : outcome === wanted);
      if (fits && searched[index].includes(text)) chosen.push(index);
    }
    const valueOf = sortValues[view.sortKey];
    const sign = view.isAscending ? 1 : -1;
    return chosen.sort((a, b) => {
      const [first, second] = [valueOf(a), valueOf(b)];
      return first < second ? -sign : first > second ? sign : a - b;
    });
  }

  function rowOf(index) {
    const outcome = view.outcomes[index];
    const name = wordOf[outcome];
    return element("tr", { "data-outcome": outcome, "data-bytes": columns.num_bytes[index] },
      element("td", { class: "path" }, modules[index], element("span", { class: "op" }, `::${ops[index]}${calls[index]}`)),
      element("td", { class: "path block" }, report.blocks[columns.block[index]]),
      element("td", { title: exactBytesText(columns.num_bytes[index]) }, bytesText(columns.num_bytes[index])),
      element("td", { class: "decision" }, swatch(outcome === NOT_NEEDED ? "" : name, name)),
    );
  }

  function draw() {
    const chosen = chosenValues();
    const numPages = Math.max(1, Math.ceil(chosen.length / ROWS_PER_PAGE));
    view.page = Math.min(view.page, numPages - 1);
    const first = view.page * ROWS_PER_PAGE;
    byId("values-body").replaceChildren(...chosen.slice(first, first + ROWS_PER_PAGE).map(rowOf));
    const total = chosen.reduce((sum, index) => sum + columns.num_bytes[index], 0);
    byId("values-count").textContent = `${chosen.length.toLocaleString("en")} of ${searched.length.toLocaleString("en")} values, ${bytesText(total)}`;
    byId("page-number").textContent = `Page ${view.page + 1} of ${numPages}`;
    byId("previous-page").disabled = view.page === 0;
    byId("next-page").disabled = view.page === numPages - 1;
    for (const head of byId("values-head").children) {
      const isSorted = head.dataset.key === view.sortKey;
      head.setAttribute("aria-sort", isSorted ? (view.isAscending ? "ascending" : "descending") : "none");
      head.querySelector("span").textContent = isSorted ? (view.isAscending ? " ↑" : " ↓") : "";
    }
  }

  function sortBy(key) {
    view.isAscending = view.sortKey === key ? !view.isAscending : key !== "num_bytes";
    view.sortKey = key;
    view.page = 0;
    draw();
  }

  function turn(pages) {
    view.page += pages;
    draw();
  }

  for (const { key, word } of VALUE_COLUMNS) {
    const button = element("button", { type: "button" }, word, element("span", { "aria-hidden": "true" }));
    button.addEventListener("click", () => sortBy(key));
    byId("values-head").append(element("th", { scope: "col", "data-key": key, class: key === "outcome" ? "decision" : key }, button));
  }
  const choices = [["needed", "needed by backward"], ...OUTCOMES.map((outcome) => [outcome.letter, outcome.name]), [NOT_NEEDED, "not needed"], ["all", "all"]];
  byId("decision").append(...choices.map(([value, word]) => element("option", { value }, word)));
  for (const id of ["search", "decision"]) byId(id).addEventListener("input", () => turn(-view.page));
  byId("previous-page").addEventListener("click", () => turn(-1));
  byId("next-page").addEventListener("click", () => turn(1));

  return (point) => {
    view.outcomes = point.outcomes;
    draw();
  };
}
