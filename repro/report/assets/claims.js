"use strict";
// The claims table: sorting by its headings, filters; and what needs scripts becomes visible.
(() => {
  for (const element of document.querySelectorAll(".needs-script")) element.hidden = false;

  // A link to something inside a closed <details> opens it.
  const open = () => {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const box = target && target.closest("details");
    if (box && !box.open) {
      box.open = true;
      target.scrollIntoView();
    }
  };
  addEventListener("hashchange", open);
  open();

  const table = document.querySelector("table.claims");
  const body = table.tBodies[0];
  const headings = [...table.querySelectorAll("th[data-sorts]")];
  const numeric = new Set(["order", "paper", "value", "share", "verdict"]);

  const key = (row, name) => {
    const text = row.dataset[name === "verdict" ? "verdictOrder" : name];
    return numeric.has(name) && text !== "" ? Number(text) : text;
  };

  const sort = (heading) => {
    const name = heading.dataset.sorts;
    const descending = heading.getAttribute("aria-sort") === "ascending";
    for (const other of headings) other.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const rows = [...body.rows].map((row) => [key(row, name), Number(row.dataset.order), row]);
    rows.sort(([a, i], [b, j]) => {
      if ((a === "") !== (b === "")) return a === "" ? 1 : -1; // what is unknown comes last either way
      const order = typeof a === "number" ? a - b : a.localeCompare(b, "en");
      return (descending ? -order : order) || i - j;
    });
    body.append(...rows.map(([, , row]) => row));
  };
  for (const heading of headings) {
    heading.querySelector("button").addEventListener("click", () => sort(heading));
  }

  const form = document.querySelector("#claims form");
  const filter = () => {
    const { verdict, kind, device } = Object.fromEntries(new FormData(form));
    let shown = 0;
    for (const row of body.rows) {
      const d = row.dataset;
      const here = device === "" ? d.decides === "yes" : device === "*" || device === d.device;
      row.hidden = !(here && (!verdict || verdict === d.verdict) && (!kind || kind === d.kind));
      shown += !row.hidden;
    }
    form.querySelector("output").textContent = `${shown} of ${body.rows.length} rows`;
    document.querySelector("#claims .empty").hidden = shown > 0;
  };
  form.addEventListener("change", filter);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.querySelector("button").addEventListener("click", () => {
    form.reset();
    filter();
  });
  filter();
})();
