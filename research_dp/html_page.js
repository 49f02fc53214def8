// Draws the charts of a page, and makes its controls work. The page's data are in #page-data.
(() => {
  "use strict";
  const page = JSON.parse(document.getElementById("page-data").textContent);
  const faint = { color: "currentColor", opacity: 0.2 };
  const theme = {
    background: "transparent",
    font: "system-ui, sans-serif",
    view: { stroke: null },
    axis: {
      labelColor: "currentColor", titleColor: "currentColor", labelFontSize: 11, titleFontSize: 12,
      titleFontWeight: "normal", titleOpacity: 0.75, labelOpacity: 0.85, labelOverlap: "greedy",
      gridColor: faint.color, gridOpacity: 0.12, domainColor: faint.color, domainOpacity: 0.4,
      tickColor: faint.color, tickOpacity: 0.4, tickSize: 4, labelPadding: 4, titlePadding: 8,
    },
    axisX: { grid: false, labelFlush: false },
    axisY: { domain: false, ticks: false, tickCount: 6 },

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

  // Values that have no logarithm are left out of the lines; an axis without others is linear.
  function setScales(spec, scale, hasPositive) {
    for (const part of partsOf(spec)) {
      const y = part.encoding?.y;
      if (!y?.field || y.type !== "quantitative") continue;
      if (scale) y.scale = { ...y.scale, type: scale };
      if (y.scale?.type !== "log") continue;
      y.scale.nice = false;
      if (!hasPositive(y.field)) { y.scale.type = "linear"; continue; }
      const name = `datum[${JSON.stringify(y.field)}]`;
      const positive = { calculate: `${name} > 0 ? ${name} : null`, as: y.field };
      part.transform = [...(part.transform ?? []), positive];
    }
  }

  const namesIn = (spec) =>
    new Set([...partsOf(spec)].map((part) => part.data?.name).filter((name) => name));

  async function draw(chart, state) {
    const spec = structuredClone(chart.spec);
    const known = Object.fromEntries([...namesIn(spec)].map((name) => [name, rowsOf(name, state)]));
    const fields = Object.values(page.data).flatMap((data) => Object.keys(data.columns));
    const hasPositive = (field) => !fields.includes(field)
      || Object.values(known).some((rows) => rows.some((row) => row[field] > 0));
    setScales(spec, state.scale, hasPositive);
    for (const param of spec.params ?? [])
      if (param.name === state.param) param.value = state.value;
    spec.datasets = known;
    chart.element.style.minHeight = `${chart.element.offsetHeight}px`;
    chart.result?.finalize();
    chart.result = await vegaEmbed(chart.element, spec, {
      actions: false, renderer: "svg", mode: "vega-lite", config: theme, defaultStyle: false,
      tooltip: { disableDefaultStyle: true, theme: "page" },
    });
    chart.element.style.minHeight = "";
  }

  // Runs `work` after the latest change, one run at a time.
  function queue(work) {
    let again = false, busy = false;
    return async () => {
      again = true;
      if (busy) return;
      busy = true;
      while (again) {
        again = false;
        await new Promise(requestAnimationFrame);
        await work();
      }
      busy = false;
    };
  }

  function setUp(section) {
    const group = page.groups[section.dataset.group];
    const form = section.querySelector("form");
    const { log, smoothing, slider } = form.elements;
    const state = { hidden: new Set(), weight: 0, scale: group.yScale, param: group.slider?.param };
    const elements = [...section.querySelectorAll(".chart")];
    const charts = group.charts.map((spec, i) => ({ spec, element: elements[i] }));
    const each = (work) => queue(() => Promise.all(charts.map(work)));
    const redraw = each((chart) => draw(chart, state));
    const refill = each((chart) => {
      for (const name of namesIn(chart.spec)) chart.result.view.data(name, rowsOf(name, state));
      return chart.result.view.runAsync();
    });
    const slide = each((chart) => {
      const isThere = (chart.spec.params ?? []).some((param) => param.name === state.param);
      return isThere ? chart.result.view.signal(state.param, state.value).runAsync() : null;
    });
    const show = (input, text) => {
      input.parentElement.querySelector("output").textContent = text;
      input.setAttribute("aria-valuetext", text);
    };
    const readSlider = () => {
      state.value = group.slider.values[slider.value];
      show(slider, group.slider.texts[slider.value]);
    };
    const readSmoothing = () => {
      state.weight = Number(smoothing.value);
      show(smoothing, state.weight ? state.weight.toFixed(2) : "none");
    };
    if (slider) { readSlider(); slider.addEventListener("input", () => { readSlider(); slide(); }); }
    if (smoothing) {
      readSmoothing();
      smoothing.addEventListener("input", () => { readSmoothing(); refill(); });
    }
    log?.addEventListener("change", () => {
      state.scale = log.checked ? "log" : "linear";
      redraw();
    });
    for (const button of form.querySelectorAll("button"))
      button.addEventListener("click", () => {
        const isHidden = state.hidden.delete(button.value);
        if (!isHidden) state.hidden.add(button.value);
        button.setAttribute("aria-pressed", String(isHidden));
        refill();
      });
    form.addEventListener("submit", (event) => event.preventDefault());
    form.hidden = !form.querySelector("input, button");
    return redraw();
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

  Promise.all([...document.querySelectorAll(".group")].map(setUp))
    .then(() => { document.documentElement.dataset.drawn = "yes"; });
})();
