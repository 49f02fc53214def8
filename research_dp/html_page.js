// Draws the charts of a page, and makes its controls work. The page's data are in #page-data.
(() => {
  "use strict";
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const faint = { color: "currentColor", opacity: 0.2 };
  // Where all values are equal, ticks have no distance that tells how many digits they need.
  const label = (axis) =>
    `domain("${axis}")[0] === domain("${axis}")[1] ? format(datum.value, ".5~g") : datum.label`;
  const labelOfLog = `domain("y")[1] < 10 * domain("y")[0] ||
    test(/^[125]/, format(datum.value, "e")) ? ${label("y")} : ""`;
  const theme = {
    background: "transparent",
    padding: { left: 5, right: 22, top: 5, bottom: 5 }, // the last label may reach beyond its axis
    font: "system-ui, sans-serif",
    view: { stroke: null },
    axis: {
      labelColor: "currentColor", titleColor: "currentColor", labelFontSize: 11, titleFontSize: 12,
      titleFontWeight: "normal", titleOpacity: 0.75, labelOpacity: 0.85, labelSeparation: 6,
      gridColor: faint.color, gridOpacity: 0.12, domainColor: faint.color, domainOpacity: 0.4,
      tickColor: faint.color, tickOpacity: 0.4, tickSize: 4, labelPadding: 4, titlePadding: 8,
    },
    axisX: { grid: false, labelFlush: false },
    axisY: { domain: false, ticks: false, tickCount: 6 },
    axisXQuantitative: { labelExpr: label("x") },
    axisYQuantitative: { labelExpr: label("y") },
    header: { labelColor: "currentColor", titleColor: "currentColor" },
    legend: { labelColor: "currentColor", titleColor: "currentColor" },
    line: { strokeWidth: 1.8, strokeJoin: "round" },
    rule: { color: "currentColor" },
    text: { color: "currentColor", fontSize: 11 },
    point: { strokeWidth: 1.8 },
  };

  const cells = (column) =>
    column.numbers ?? column.at.map((place) => (place < 0 ? null : column.texts[place]));
  const columns = new Map();
  for (const [name, data] of Object.entries(page.data))
    columns.set(name, Object.entries(data.columns).map(([field, column]) => [field, cells(column)]));

  // The rows of data, new ones each time because a chart may change its own.
  function rowsOf(name, state) {
    const { series, smoothed } = page.data[name];
    const fields = columns.get(name);
    const count = fields.length ? fields[0][1].length : 0;
    const rows = [];
    for (let i = 0; i < count; i++) {
      const row = {};
      for (const [field, values] of fields) row[field] = values[i];
      if (!state.hidden.has(row[series])) rows.push(row);
    }
    for (const field of smoothed) smooth(rows, field, series, state.weight);
    return rows;
  }

  // The exponential moving average of each series, without a bias to its first value.
  function smooth(rows, field, series, weight) {
    const sums = new Map();
    for (const row of rows) {
      const value = row[field];
      row["raw_" + field] = value;
      if (value === null) continue;
      const [sum, total] = sums.get(row[series]) ?? [0, 0];
      const next = [weight * sum + value, weight * total + 1];
      sums.set(row[series], next);
      row[field] = next[0] / next[1];
    }
  }

  function* partsOf(spec) {
    yield spec;
    for (const layer of spec.layer ?? []) yield* partsOf(layer);
  }

  // Values that have no logarithm are left out; an axis without others is linear.
  function setScales(spec, scale, isPositive) {
    const axes = [...partsOf(spec)]
      .map((part) => [part, part.encoding?.y])
      .filter(([, y]) => y?.field && y.type === "quantitative" && y.scale?.type !== "symlog");
    const isLog = axes.some(([, y]) => (scale ?? y.scale?.type) === "log" && isPositive(y.field));
    for (const [part, y] of axes) {
      if (scale || y.scale?.type === "log") y.scale = { ...y.scale, type: isLog ? "log" : "linear" };
      if (!isLog) continue;
      y.scale = { padding: 8, ...y.scale, nice: false, zero: undefined };
      // With fewer ticks, less than a decade may have only a power of ten.
      y.axis = { tickCount: 20, labelExpr: labelOfLog, ...y.axis };
      const value = `datum[${JSON.stringify(y.field)}]`;
      const positive = { calculate: `${value} > 0 ? ${value} : null`, as: y.field };
      part.transform = [...(part.transform ?? []), positive];
    }
  }

  const namesIn = (spec) =>
    [...new Set([...partsOf(spec)].map((part) => part.data?.name))].filter((name) => name);

  // A layer without rows, e.g. where all lines are hidden, is no reason for a warning. Vega itself
  // is not in reach: an empty chart has its class of views.
  async function quietView() {
    const options = { mode: "vega", actions: false, defaultStyle: false };
    const empty = await vegaEmbed(document.createElement("div"), { marks: [] }, options);
    return class extends empty.view.constructor {
      warn(...said) {
        return /^Infinite extent/.test(said[0]) ? this : super.warn(...said);
      }
    };
  }
  const viewClass = quietView();

  async function draw(chart, state) {
    const spec = structuredClone(chart.spec);
    spec.datasets = Object.fromEntries(namesIn(spec).map((name) => [name, rowsOf(name, state)]));
    const rows = Object.values(spec.datasets).flat();
    // What the chart calculates is not in the rows, and taken as positive.
    setScales(spec, state.scale, (field) =>
      rows.some((row) => row[field] > 0) || !rows.some((row) => field in row));
    for (const param of spec.params ?? [])
      if (param.name === state.param) param.value = state.value;
    chart.element.style.minHeight = `${chart.element.offsetHeight}px`; // the page does not jump
    chart.result?.finalize();
    const room = chart.element.clientWidth;
    theme.legend.columns = Math.max(1, Math.floor(room / 170));
    theme.axis.labelLimit = 0.45 * room || 160; // a folded chart has no room yet
    chart.result = await vegaEmbed(chart.element, spec, {
      actions: false, renderer: "svg", mode: "vega-lite", config: theme, defaultStyle: false,
      tooltip: { disableDefaultStyle: true, theme: "page" }, viewClass: await viewClass,
    });
    chart.element.style.minHeight = "";
  }

  function refill(chart, state) {
    const { view } = chart.result;
    for (const name of namesIn(chart.spec)) view.data(name, rowsOf(name, state));
    return view.runAsync();
  }

  function slide(chart, state) {
    if ((chart.spec.params ?? []).some((param) => param.name === state.param))
      return chart.result.view.signal(state.param, state.value).runAsync();
  }

  function setUp(section) {
    const group = page.groups[section.dataset.group];
    const form = section.querySelector("form");
    const { log, smoothing, slider } = form.elements;
    const state = { hidden: new Set(), weight: 0, scale: group.yScale, param: group.slider?.param };
    const elements = [...section.querySelectorAll(".chart")];
    const charts = group.charts.map((spec, i) => ({ spec, element: elements[i] }));

    // Changes of all charts, one at a time; of those that are asked for meanwhile the last counts.
    const asked = new Set();
    let isBusy = false;
    async function ask(change) {
      asked.add(change);
      if (isBusy) return;
      isBusy = true;
      for (const next of asked) {
        asked.delete(next);
        await Promise.all(charts.map((chart) => next(chart, state)));
      }
      isBusy = false;
    }

    // Reads an input now and when it changes; `read` returns the text to show for it.
    function listen(input, change, read) {
      const update = () => {
        const text = read(input);
        const shown = input.parentElement.querySelector("output");
        if (!shown) return;
        shown.textContent = text;
        input.setAttribute("aria-valuetext", text);
      };
      if (!input) return;
      update();
      input.addEventListener("input", () => { update(); ask(change); });
    }
    listen(slider, slide, ({ value }) => {
      state.value = group.slider.values[value];
      return group.slider.texts[value];
    });
    listen(smoothing, refill, ({ value }) => {
      state.weight = Number(value);
      return state.weight ? state.weight.toFixed(2) : "none";
    });
    listen(log, draw, ({ checked }) => { state.scale = checked ? "log" : "linear"; });
    const buttons = [...form.querySelectorAll("button")];
    function press({ currentTarget: { value }, shiftKey }) {
      const others = buttons.map((button) => button.value).filter((name) => name !== value);
      const isAlone = !state.hidden.has(value) && state.hidden.size === others.length;
      if (shiftKey) state.hidden = new Set(isAlone ? [] : others);
      else if (!state.hidden.delete(value)) state.hidden.add(value);
      for (const button of buttons)
        button.setAttribute("aria-pressed", String(!state.hidden.has(button.value)));
      ask(refill);
    }
    for (const button of buttons) button.addEventListener("click", press);
    form.addEventListener("submit", (event) => event.preventDefault());
    form.hidden = !form.querySelector("input, button");
    return ask(draw);
  }

  // Charts measure their room when the window changes: what was folded had none.
  const fit = () => window.dispatchEvent(new Event("resize"));
  const folded = [...document.querySelectorAll("details")];
  for (const part of folded) part.addEventListener("toggle", fit);
  window.addEventListener("beforeprint", () => {
    for (const part of folded) { part.dataset.open = part.open; part.open = true; }
    fit();
  });
  window.addEventListener("afterprint", () => {
    for (const part of folded) part.open = part.dataset.open === "true";
  });

  // A table that is wider than its room shows the cells of a row one below another.
  function stack() {
    for (const table of document.querySelectorAll(".wide")) {
      table.classList.remove("cards");
      table.classList.toggle("cards", table.scrollWidth > table.clientWidth);
    }
  }
  window.addEventListener("resize", stack);
  stack();

  const drawn = (text) => { document.documentElement.dataset.drawn = text; };
  Promise.all([...document.querySelectorAll(".group")].map(setUp))
    .then(() => drawn("yes"), (error) => { drawn("no"); throw error; });
})();
