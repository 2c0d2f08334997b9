"use strict";
// The policy explorer: one <select> a choice, and the gains of every policy in the chosen setting.
(() => {
  const source = document.getElementById("explorer-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const cells = new Map(data.cells.map(([key, entries]) => [key.join(), { key, entries }]));
  const papers = new Map(data.paper.map(([key, gain]) => [key.join(), gain]));
  const root = document.querySelector(".explorer");
  const form = root.querySelector("form");
  const body = root.querySelector("tbody");
  let current = data.start;
  let adaln = data.adalns[data.adaln] ?? "any";
  let mComp = data.mComp;

  const element = (name, text = "", className = "") => {
    const made = document.createElement(name);
    made.textContent = text;
    if (className) made.className = className;
    return made;
  };

  const choice = (name, label, onChange) => {
    const select = element("select");
    select.name = name;
    const shown = element("label", `${label} `);
    shown.append(select);
    form.append(shown);
    select.addEventListener("change", () => onChange(select.value));
    return select;
  };

  const fill = (select, options, chosen) => {
    select.replaceChildren(...options.map(([value, text]) => new Option(text, value, false, value === String(chosen))));
    select.parentElement.hidden = options.length < 2;
  };

  // The simulated setting nearest to the present one that has option `i` of dimension `d`.
  const nearest = (d, i) => {
    let best = null;
    for (const { key, entries } of cells.values()) {
      if (key[d] !== i) continue;
      const moved = key.filter((v, k) => k !== d && v !== current[k]).length;
      const far = key.reduce((sum, v, k) => sum + Math.abs(v - current[k]), 0);
      const rank = [moved, far, -entries.length];
      const better = best === null || rank.some((v, k) => v < best.rank[k] && rank.slice(0, k).every((u, j) => u === best.rank[j]));
      if (better) best = { key, rank };
    }
    return best.key;
  };

  const go = (d, i) => {
    const next = nearest(d, i);
    const moved = data.dimensions.filter((_, k) => k !== d && next[k] !== current[k]);
    current = next;
    const told = moved.map((m) => `${m.label} is now ${m.options[next[data.dimensions.indexOf(m)]]}`);
    root.querySelector(".moved").textContent = told.length ? `Not simulated with the other choices: ${told.join("; ")}.` : "";
    show();
  };

  const selects = data.dimensions.map((dimension, d) => choice(dimension.name, dimension.label, (text) => go(d, dimension.options.indexOf(text))));
  const adalnSelect = choice("adaln", "AdaLN: policies", (value) => { adaln = value; show(); });
  const mCompSelect = choice("m_comp", "M_comp", (value) => { mComp = Number(value); show(); });

  const number = (value, digits) =>
    value === null ? "" : value.toLocaleString("en", { maximumFractionDigits: digits, minimumFractionDigits: digits });
  const percent = (value) => `${value < 0 ? "−" : "+"}${number(Math.abs(value), 1)}`;

  const svg = (name, attributes) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  };

  // A hollow bar from no gain to the gain, its interval, and the paper's gain as a dashed line.
  const bar = (entry, low, high, paper) => {
    const x = (value) => (100 * (value - low)) / (high - low || 1);
    const drawing = svg("svg", { class: "gain", viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true" });
    const color = data.policies[entry.policy].color;
    drawing.style.setProperty("--hue", color === "#000000" ? "var(--text)" : color);
    if (entry.gain !== null) {
      const [left, right] = [Math.min(x(0), x(entry.gain)), Math.max(x(0), x(entry.gain))];
      drawing.append(svg("rect", { class: "bar", x: left, width: right - left, y: 1.5, height: 7 }));
      drawing.append(svg("line", { class: "interval", x1: x(entry.low), x2: x(entry.high), y1: 5, y2: 5 }));
    }
    drawing.append(svg("line", { class: "none", x1: x(0), x2: x(0), y1: 0, y2: 10 }));
    if (paper !== undefined) drawing.append(svg("line", { class: "paper", x1: x(paper), x2: x(paper), y1: 0, y2: 10 }));
    return drawing;
  };

  const line = (entry, low, high, paper) => {
    const row = element("tr");
    const policy = data.policies[entry.policy].label + (entry.mComp > 0 && entry.mComp !== data.mComp ? `, M_comp x ${entry.mComp}` : "");
    const drawn = element("td", "", "c-bar");
    drawn.append(bar(entry, low, high, paper));
    const gain = entry.gain === null ? "baseline" : `${percent(entry.gain)} [${percent(entry.low)}, ${percent(entry.high)}]`;
    const head = element("th", policy, "c-policy");
    head.scope = "row";
    row.append(
      head,
      element("td", data.adalns[entry.adaln], "c-adaln"),
      drawn,
      element("td", gain, "number c-gain"),
      ...[[entry.tokens, 0, "tokens/s"], [entry.share, 3, "share of perfect"], [entry.mix, 3, "mix distance"], [entry.samples, 1, "samples a step"]].map(
        ([value, digits, label]) => {
          const cell = element("td", number(value, digits), "number c-more");
          cell.dataset.label = label;
          return cell;
        },
      ),
    );
    row.setAttribute("role", "row");
    for (const cell of row.cells) cell.setAttribute("role", cell === head ? "rowheader" : "cell");
    return row;
  };

  const show = () => {
    data.dimensions.forEach(({ options }, d) => {
      const held = new Set();
      for (const { key } of cells.values()) if (key.every((v, k) => k === d || v === current[k])) held.add(key[d]);
      fill(selects[d], options.map((text, i) => [text, held.has(i) ? text : `${text} *`]), options[current[d]]);
    });
    const { entries } = cells.get(current.join());
    const named = entries.map(([policy, a, m, gain, low, high, tokens, share, mix, samples, n, run]) => ({ policy, adaln: a, mComp: m, gain, low, high, tokens, share, mix, samples, n, run }));
    const adalns = [...new Set(named.map((e) => e.adaln))].sort((a, b) => a - b);
    if (!adalns.some((a) => data.adalns[a] === adaln)) adaln = "any";
    const policies = (a) => `${data.adalns[a]}: ${new Set(named.filter((e) => e.adaln === a).map((e) => e.policy)).size}`;
    fill(adalnSelect, [["any", "any"], ...adalns.map((a) => [data.adalns[a], policies(a)])], adaln);
    const bounds = [...new Set(named.map((e) => e.mComp).filter((m) => m > 0))].sort((a, b) => a - b);
    if (!bounds.includes(mComp)) mComp = bounds.includes(data.mComp) ? data.mComp : (bounds[0] ?? data.mComp);
    fill(mCompSelect, bounds.map((m) => [String(m), `x ${m}`]), mComp);

    const isBaseline = (e) => e.policy === data.baseline[0] && e.adaln === data.baseline[1];
    const shown = named.filter((e) => isBaseline(e) || ((adaln === "any" || data.adalns[e.adaln] === adaln) && (!(e.mComp > 0) || e.mComp === mComp)));
    const paper = papers.get(current.join());
    const ends = shown.flatMap((e) => (e.gain === null ? [] : [e.low, e.high]));
    const low = Math.min(0, ...ends);
    const high = Math.max(0, ...ends, paper ?? 0);
    body.replaceChildren(...shown.map((e) => line(e, low, high, paper)));

    const notes = data.dimensions.map(({ notes: told }, d) => (data.dimensions[d].name === "device" ? "" : told[current[d]])).filter(Boolean);
    root.querySelector(".setting").textContent = `${notes.join(". ")}.${paper === undefined ? "" : ` The paper reports ${percent(paper)}% on as many GPUs (dashed).`}`;
    const device = data.dimensions.findIndex(({ name }) => name === "device");
    const seeds = [...new Set(shown.map((e) => e.n))].sort((a, b) => a - b).join(" or ");
    const runs = [...new Set(shown.map((e) => data.runs[e.run]))].join("; ");
    root.querySelector(".origin").textContent = `Simulated from ${data.dimensions[device].notes[current[device]]} of ${data.dimensions[device].options[current[device]]}: suite ${runs}; ${seeds} seeds. Choices marked * were not simulated with the others, which then change too.`;
  };
  show();
})();
