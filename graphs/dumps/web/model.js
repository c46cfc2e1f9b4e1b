const FOLDED = ["view", "reshape", "permute", "expand", "unsqueeze", "squeeze", "transpose", "t", "alias", "as_strided", "_unsafe_view", "clone", "getitem"];
let chosen = 0, everyNode = false;

function model() {
  const out = place("model");
  for (const s of data.sessions) {
    const modules = make("table", {}, head("module", "class", "parameters", "weights"));
    s.modules.forEach((one, i) => {
      const name = one.count > 1 ? `${one.count} x ${one.kind}, ${layerGraphs(one) ? `compiled ${layerGraphs(one)}` : "in one graph"}` : one.kind;
      modules.append(make("tr", i > 24 ? { hidden: "" } : {}, make("td", { style: `padding-left:${one.depth * 18}px`, class: "wrap" }, graphWith(firstOf(one)) ? make("a", { href: `#module=${firstOf(one)}` }, one.path) : one.path || "model"),
        make("td", {}, one.count > 1 ? make("b", {}, name) : name), make("td", { class: "dim wrap" }, one.shapes, ...layerLinks(one)), make("td", { class: "nowrap" }, one.bytes ? human(one.bytes) : "")));
    });
    const groups = make("table", {}, head("layers", "attention", "group of the KV cache", "whose cache"));
    s.attention.forEach((one, i) => groups.append(row(`${one.num} (${one.layers})`, one.words.join(", "), `${i + 1} of ${s.attention.length}`, Object.entries(one.shared || {}).map(([owner, readers]) => `${/^\d+$/.test(readers) ? `layer ${readers} reads` : `layers ${readers} read`} that of layer ${owner}`).join("; ") || dim("each its own"))));
    out.append(make("h2", {}, "Modules"), modules);
    if (s.modules.length > 25) out.append(make("p", {}, make("button", { onclick: event => { modules.querySelectorAll("[hidden]").forEach(one => { one.hidden = false; }); event.target.remove(); } }, `show ${s.modules.length - 25} more`)));
    out.append(make("h2", {}, "Attention"), groups);
  }
  const table = make("table", {}, head("compiled graph", "operators before, after passes", "made by passes", "products and attentions, by the rows they compute"));
  data.graphs.forEach((graph, i) => {
    const runs = data.passes.filter(one => one.stage === "aten" && one.graph === graph.name), count = one => sum(Object.values(one));
    const made = {};
    for (const node of graph.nodes) if (node.by) made[node.by] = (made[node.by] || 0) + 1;
    const title = graph.num_calls > 1 ? `${graphName(i)}, compiled once` : graph.name;
    table.append(make("tr", { class: "link", "data-graph": i, onclick: () => { location.hash = `graph=${i}`; } },
      make("td", {}, make("a", { href: `#graph=${i}` }, make("b", {}, title))),
      make("td", {}, runs.length ? `${count(runs[0].before)}, ${count(runs.at(-1).after)}` : "no pass ran"),
      make("td", {}, Object.entries(made).map(([name, n]) => `${name} ${n}`).join(", ") || dim("none")),
      make("td", {}, countRows(graph.nodes) || dim("none"))));
  });
  out.prepend(make("h2", {}, "Graphs"), table, rowsText(), make("div", { id: "drawn" }));
}
// A run of equal modules is called by its first; a graph by the modules that its nodes come from.
const firstOf = one => one.path.replace(/(\d+)-\d+$/, "$1");
const isIn = (node, path) => node.module.startsWith(`${path}.`) || node.module.startsWith(`${path} `);
const graphWith = path => path ? data.graphs.find(graph => graph.nodes.some(node => isIn(node, path))) : undefined;
function partOf(graph, path) { // the nodes of a module and, without their own inputs, what those read
  const at = new Map(graph.nodes.map(node => [node.name, node]));
  const own = new Set(graph.nodes.filter(node => isIn(node, path) || !node.module && node.by && node.inputs.some(name => isIn(at.get(name), path))));
  const read = new Set([...own].flatMap(node => node.inputs));
  return graph.nodes.filter(node => own.has(node) || read.has(node.name)).map(node => own.has(node) ? node : { ...node, inputs: [], outside: true });
}
function around(graph, wanted) { // the nodes next to one, as far as a picture takes
  const at = new Map(graph.nodes.map(node => [node.name, node])), readers = new Map(), own = new Set([wanted]);
  for (const node of graph.nodes) for (const name of node.inputs) readers.set(name, [...readers.get(name) || [], node.name]);
  for (let edge = [wanted]; edge.length && own.size < 40;) {
    edge = [...new Set(edge.flatMap(name => [...at.get(name).inputs, ...readers.get(name) || []]))].filter(name => at.has(name) && !own.has(name)).slice(0, 40 - own.size);
    edge.forEach(name => own.add(name));
  }
  return graph.nodes.filter(node => own.has(node.name));
}
const layerOf = node => /^(.*?\.\d+)(?=[. ])/.exec(node.module)?.[1];
const layersIn = graph => [...new Set(graph.nodes.map(layerOf).filter(Boolean))];
function layerLinks(one) { // of a run of layers, those that have nodes of their own in a graph
  const [, path, first, last] = /^(.*?)\.(\d+)-(\d+)$/.exec(one.path) || [];
  const own = path ? [...new Set(data.graphs.flatMap(layersIn))].filter(layer => { const m = /^(.*)\.(\d+)$/.exec(layer); return m[1] === path && +m[2] >= first && +m[2] <= last; }) : [];
  return own.length > 1 ? ["with nodes of its own: ", ...own.flatMap((layer, i) => [i ? ", " : "", make("a", { href: `#module=${layer}` }, layer.replace(/^.*\./, ""))])] : [];
}
const layerGraphs = one => {
  const found = data.graphs.filter(graph => graph.num_calls > 1 && layerKind(graph) === one.kind);
  return found.length === 1 && found[0].num_calls === one.count ? "once" : found.length ? `as ${found.map(g => `${g.num_calls} equal`).join(" and ")}` : "";
};
const prefillRuns = () => data.passes.filter(one => one.name === "fast_prefill");
function rowsText() {
  const runs = prefillRuns();
  if (!runs.length) return note("Rows: every layer computes all tokens; the pass fast_prefill is off (fast_prefill='auto' drops rows that no logits need).");
  const text = runs.map(one => one.summary || one.in_words).join("; ");
  return make("p", {}, "Dead rows, by ", make("a", { href: `#pass=${data.passes.indexOf(runs[0])}` }, "fast_prefill"), `: ${text}. What is “of logits rows” above leaves the other rows out.`);
}

// The kernel of each node of a graph: of those that compute it, the one with the fewest nodes.
function kernelsOf(number) {
  const found = new Map();
  data.kernels.forEach((code, i) => { if (code.graph === number) code.calls.forEach((call, j) => {
    for (const name of call.graph_nodes) if (!(found.get(name)?.call.graph_nodes.length <= call.graph_nodes.length)) found.set(name, { call, i, j }); }); });
  return found;
}
function shownBoxes(graph, wanted, own = graph.nodes) {
  const nodes = new Map(own.map(node => [node.name, node]));
  const readers = new Map(), fixed = node => node.op === "placeholder" && !symbolsOf(node.type).length && node.type.includes("[");
  for (const node of own) for (const name of node.inputs) readers.set(name, (readers.get(name) || 0) + 1);
  const folded = node => node.type === "SymInt" || node.name !== wanted && !everyNode && !node.by && (FOLDED.includes(node.op) && node.inputs.length || fixed(node) && readers.get(node.name) === 1);
  const source = name => { let node = nodes.get(name); while (node && folded(node) && node.type !== "SymInt" && nodes.has(node.inputs[0])) node = nodes.get(node.inputs[0]); return node; };
  const shown = own.filter(node => !folded(node)), at = new Map(shown.map((node, i) => [node, i]));
  const used = new Set(shown.flatMap(node => node.inputs.map(source)));
  const boxes = shown.map(node => ({ node, width: 168, height: 36, inputs: node.inputs.map(source).filter(one => at.has(one)).map(one => at.get(one)) }));
  const keep = boxes.map((box, i) => box.inputs.length > 0 || used.has(box.node) || box.node.name === wanted), index = new Map();
  boxes.forEach((box, i) => { if (keep[i]) index.set(i, index.size); });
  return boxes.filter((box, i) => keep[i]).map(box => ({ ...box, inputs: box.inputs.map(j => index.get(j)).filter(j => j !== undefined) }));
}
function drawModule(path, wanted) {
  const number = data.graphs.indexOf(graphWith(path));
  if (number < 0) return document.getElementById("drawn").replaceChildren(make("h2", {}, path), note("No operator of a compiled graph comes from this module. Equal layers share the graph of the first."));
  draw(number, wanted, path);
}
function draw(number, wanted, path = "") {
  const graph = data.graphs[number], out = document.getElementById("drawn");
  if (!graph) return;
  const near = !path && graph.nodes.length > 500 && graph.nodes.some(node => node.name === wanted && !layerOf(node));
  const own = path ? partOf(graph, path) : near ? around(graph, wanted) : graph.nodes, which = data.sessions.flatMap(s => s.modules).find(one => firstOf(one) === path);
  chosen = number;
  document.querySelectorAll("tr[data-graph]").forEach(one => one.classList.toggle("on", +one.dataset.graph === number));
  const layer = layerOf(graph.nodes.find(node => node.name === wanted) || { module: "" });
  if (own.length > 500 && layer && !path) return drawModule(layer, wanted);
  if (own.length > 500) return out.replaceChildren(make("h2", {}, path || graphName(number)), note(`${own.length} nodes are too many for one picture. Choose a layer, a module below, or search for a node.`), link(graph.file),
    make("table", {}, head("layer", "rows that its products and attention compute"), ...layersIn({ nodes: own }).map(one => row(make("a", { href: `#module=${one}` }, one), liveRows(own.filter(node => layerOf(node) === one))))));
  const boxes = shownBoxes(graph, wanted, own), edges = layered(boxes), kernels = kernelsOf(number);
  const width = Math.max(...boxes.map(b => b.x), 0) + 110, height = Math.max(...boxes.map(b => b.y), 0) + 60;
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  for (const bends of edges) {
    svg.append(make("path", { d: curve(bends) }));
  }
  const side = make("div", { class: "side" });
  const show = b => {
    svg.querySelectorAll("g").forEach(one => one.classList.remove("on", "near"));
    b.element.classList.add("on");
    const n = b.node, kernel = kernels.get(n.name);
    if (kernel) for (const other of boxes) if (other !== b && kernel.call.graph_nodes.includes(other.node.name)) other.element.classList.add("near");
    side.replaceChildren(make("h3", { class: "wrap" }, n.name), make("table", { class: "facts" }, row("operator", make("span", { class: "wrap" }, n.target)), row("type", typed(n.type) || "none"),
      row("module", make("span", { class: "wrap" }, n.module || "none")), row("made by", n.by ? make("a", { href: `#pass=${data.passes.findIndex(p => p.name === n.by && p.difference && (p.graph === graph.name || p.stage === "dynamo"))}` }, n.by) : "model code"),
      row("kernel", kernel ? make("a", { class: "wrap", href: kernelHref(kernel.i, kernel.j) }, kernel.call.name) : dim("not known"))),
      make("pre", {}, n.line || "no source line"), make("pre", {}, `${n.target}${n.args}`));
  };
  for (const b of boxes) {
    const n = b.node, x = b.x - b.width / 2, edge = ["placeholder", "output"].includes(n.op) || n.outside, kernel = kernels.get(n.name);
    const fused = kernel && kernel.call.kind === "kernel" && kernel.call.graph_nodes.length > 1;
    b.element = make("g", { class: "node", onclick: () => show(b) },
      make("title", {}, `${n.name}\n${n.line || n.module || "no source line"}${kernel ? `\n${kernel.call.name}` : ""}`),
      make("rect", { class: "box", x, y: b.y, width: b.width, height: b.height, rx: 7, style: `fill:var(${n.by ? "--ours" : edge ? "--input" : "--model"})` }),
      fused ? make("rect", { x: x + 1, y: b.y + 6, width: 4, height: b.height - 12, rx: 2, style: "fill:var(--kernel)" }) : null,
      make("text", { x: x + 11, y: b.y + 15 }, (edge ? n.name : plain(n.op)).slice(0, 23)),
      make("text", { x: x + 11, y: b.y + 29, class: "dim" }, [typed(n.type), edge ? "" : n.module.split(" ")[0].split(".").pop()].filter(Boolean).join(" ").slice(0, 23)),
      fused ? make("text", { x: b.x + 58, y: b.y + 15, class: "dim" }, `k${kernel.j + 1}`) : null);
    svg.append(b.element);
  }
  const frame = make("div", { class: "graph" }, svg);
  const legend = keys([["model code", "--model"], ["one of our passes", "--ours"], ["fused by Inductor, k3: kernel 3", "--kernel"], ["input or output", "--input"]]);
  const toggle = make("button", { class: everyNode ? "on" : "", onclick: () => { everyNode = !everyNode; draw(number, wanted, path); } }, "views and weights too");
  side.append(note("Click a node for its source line, module, pass and kernel."));
  out.replaceChildren(make("h2", {}, path ? which && which.count > 1 ? `${which.count} x ${which.kind}, ${which.path}` : `${path}${which ? `, ${which.kind}` : ""}` : graphName(number)), note(`Rows: ${liveRows(own.filter(node => !node.outside))}.`), make("div", { class: "tools" }, legend, toggle, dim(`${boxes.length} of ${own.length} nodes; text: `), link(graph.file)),
    make("div", { class: "split" }, frame, side));
  const target = boxes.find(b => b.node.name === wanted) || boxes.find(b => b.inputs.length) || boxes[0];
  if (target) { frame.scrollTo(target.x - frame.clientWidth / 2, target.node.name === wanted ? target.y - 120 : 0); if (wanted && target.node.name === wanted) show(target); }
}
