// Draws the charts of a page, each by the specification of Vega-Lite that its element has.
const data = JSON.parse(document.getElementById("page-data").textContent); // by name
// Where all values are equal, ticks have no distance that tells how many digits they need.
const label = (axis) =>
  `domain("${axis}")[0] === domain("${axis}")[1] ? format(datum.value, ",.5~g") : datum.label`;
const theme = {
  background: "transparent",
  padding: { left: 5, right: 22, top: 5, bottom: 5 }, // the last label may reach beyond its axis
  font: "system-ui, sans-serif",
  view: { stroke: null },
  axis: {
    labelColor: "currentColor", titleColor: "currentColor", labelFontSize: 11, titleFontSize: 12,
    titleFontWeight: "normal", titleOpacity: 0.75, labelOpacity: 0.85, labelSeparation: 6,
    gridColor: "currentColor", gridOpacity: 0.12, domainColor: "currentColor", domainOpacity: 0.4,
    tickColor: "currentColor", tickOpacity: 0.4, tickSize: 4, labelPadding: 4, titlePadding: 8,
  },
  axisX: { grid: false, labelFlush: false },
  // In an expression, `width` makes it follow the window.
  axisY: {
    labelLimit: { expr: "width && 0.45 * containerSize()[0]" },
    domain: false, ticks: false, tickCount: 6,
  },
  axisXQuantitative: { labelExpr: label("x"), tickCount: 8 },
  axisYQuantitative: { labelExpr: label("y") },
  legend: { labelColor: "currentColor", labelFontSize: 12, orient: "top", symbolLimit: 0 },
  title: { color: "currentColor", anchor: "start", fontSize: 13, fontWeight: 600 },
  line: { strokeWidth: 1.8, strokeJoin: "round" },
  rule: { color: "currentColor" },
  text: { color: "currentColor", fontSize: 11 },
};

// Columns as rows, new ones for each chart, because it may add fields to them.
function rows(columns) {
  const fields = Object.keys(columns);
  return columns[fields[0]].map((_, i) =>
    Object.fromEntries(fields.map((field) => [field, columns[field][i]])));
}

// Saves a chart in the colours of a light page, as numbers: programs know no variables of a page.
const canvas = document.createElement("canvas");
const paper = canvas.getContext("2d", { willReadFrequently: true });
function filled(color) {
  paper.fillStyle = color;
  paper.fillRect(0, 0, canvas.width, canvas.height);
  return `rgb(${paper.getImageData(0, 0, 1, 1).data.slice(0, 3)})`;
}
async function save(element, kind) {
  const svg = element.querySelector("svg"), copy = svg.cloneNode(true), image = new Image();
  const copies = copy.querySelectorAll("*");
  copy.setAttribute("paint-order", "stroke");
  document.documentElement.classList.add("paper");
  svg.querySelectorAll("*").forEach((one, i) => ["fill", "stroke"].forEach((name) => {
    const color = one.hasAttribute(name) ? getComputedStyle(one)[name] : "none";
    if (!/none|rgba.*, 0\)$/.test(color)) copies[i].setAttribute(name, filled(color));
  }));
  document.documentElement.classList.remove("paper");
  image.src = "data:image/svg+xml," + encodeURIComponent(new XMLSerializer().serializeToString(copy));
  await image.decode();
  [canvas.width, canvas.height] = [3 * svg.clientWidth, 3 * svg.clientHeight];
  filled("white");
  paper.drawImage(image, 0, 0, canvas.width, canvas.height);
  const name = element.previousElementSibling.firstChild.textContent.replace(/\W+/g, "_");
  const href = kind === "svg" ? image.src : canvas.toDataURL();
  Object.assign(document.createElement("a"), { href, download: `${name}.${kind}` }).click();
}

async function draw(element) {
  const spec = { height: 260, ...JSON.parse(element.dataset.spec), width: "container" };
  spec.datasets = { [spec.data.name]: rows(data[spec.data.name]) };
  const { view } = await vegaEmbed(element, spec, {
    actions: false, renderer: "svg", mode: "vega-lite", config: theme, defaultStyle: false,
    tooltip: { disableDefaultStyle: true, theme: "page" },
  });
  // How many columns a legend has follows from the room beside the labels of the axis, and how high
  // the chart must be from the legend.
  for (const kind of ["svg", "png"]) {
    const button = Object.assign(document.createElement("button"), { textContent: kind.toUpperCase() });
    button.onclick = () => save(element, kind);
    element.previousElementSibling.append(button);
  }
  const fit = () => view.resize().runAsync();
  window.addEventListener("resize", () => setTimeout(fit));
  return fit();
}

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
Promise.all([...document.querySelectorAll(".chart")].map(draw))
  .then(() => drawn("yes"), (error) => { drawn("no"); throw error; });
