const FOLDED = ["view", "reshape", "permute", "expand", "unsqueeze", "squeeze", "transpose", "t", "alias", "as_strided", "_unsafe_view", "clone", "getitem"];
let chosen = 0, everyNode = false;

function model() {
  const out = place("model");
  for (const s of data.sessions) {
    const modules = make("table", {}, head("module", "class", "parameters", "weights"));
    s.modules.forEach((one, i) => {
      const name = one.count > 1 ? `${one.count} x ${one.kind}, compiled ${layerGraphs(one) || "?"}` : one.kind;
      modules.append(make("tr", i > 24 ? { hidden: "" } : {}, make("td", { style: `padding-left:${one.depth * 18}px`, class: "wrap" }, one.path || "model"),
        make("td", {}, one.count > 1 ? make("b", {}, name) : name), make("td", { class: "dim wrap" }, one.shapes), make("td", { class: "nowrap" }, one.bytes ? human(one.bytes) : "")));
    });
    const groups = make("table", {}, head("layers", "attention", "group of the KV cache"));
    s.attention.forEach((one, i) => groups.append(row(`${one.num} (${one.layers})`, one.words.join(", "), `${i + 1} of ${s.attention.length}`)));
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
      make("td", {}, Object.entries(graph.live_rows).map(([rows, n]) => `${n} of ${rows}`).join(", ") || dim("none"))));
  });
  out.prepend(make("h2", {}, "Graphs"), table, rowsText(), make("div", { id: "drawn" }));
}
const layerGraphs = one => {
  const found = data.graphs.filter(graph => graph.num_calls > 1 && layerKind(graph) === one.kind);
  return found.length === 1 && found[0].num_calls === one.count ? "once" : found.length ? `as ${found.map(g => `${g.num_calls} equal`).join(" and ")}` : "";
};
function rowsText() {
  const runs = data.passes.filter(one => one.name === "fast_prefill");
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
function shownBoxes(graph, wanted) {
  const nodes = new Map(graph.nodes.map(node => [node.name, node]));
  const folded = node => node.type === "SymInt" || node.name !== wanted && !everyNode && FOLDED.includes(node.op) && node.inputs.length && !node.by;
  const source = name => { let node = nodes.get(name); while (node && folded(node) && node.type !== "SymInt" && nodes.has(node.inputs[0])) node = nodes.get(node.inputs[0]); return node; };
  const shown = graph.nodes.filter(node => !folded(node)), at = new Map(shown.map((node, i) => [node, i]));
  const used = new Set(shown.flatMap(node => node.inputs.map(source)));
  const boxes = shown.map(node => ({ node, width: 168, height: 36, inputs: node.inputs.map(source).filter(one => at.has(one)).map(one => at.get(one)) }));
  const keep = boxes.map((box, i) => box.inputs.length > 0 || used.has(box.node) || box.node.name === wanted), index = new Map();
  boxes.forEach((box, i) => { if (keep[i]) index.set(i, index.size); });
  return boxes.filter((box, i) => keep[i]).map(box => ({ ...box, inputs: box.inputs.map(j => index.get(j)).filter(j => j !== undefined) }));
}
function draw(number, wanted) {
  const graph = data.graphs[number], out = document.getElementById("drawn");
  if (!graph) return;
  chosen = number;
  document.querySelectorAll("tr[data-graph]").forEach(one => one.classList.toggle("on", +one.dataset.graph === number));
  if (graph.nodes.length > 3000) return out.replaceChildren(note(`${graph.nodes.length} nodes are too many to draw; `), link(graph.file));
  const boxes = shownBoxes(graph, wanted), edges = layered(boxes), kernels = kernelsOf(number);
  const width = Math.max(...boxes.map(b => b.x), 0) + 110, height = Math.max(...boxes.map(b => b.y), 0) + 60;
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  for (const bends of edges) {
    let path = "";
    for (let k = 1; k < bends.length; k++) { const a = bends[k - 1], b = bends[k], y1 = a.y + a.height, bow = (b.y - y1) / 2;
      path += `${k === 1 ? `M${a.x} ${y1}` : ""}C${a.x} ${y1 + bow} ${b.x} ${b.y - bow} ${b.x} ${b.y}`; }
    svg.append(make("path", { d: path }));
  }
  const side = make("div", { class: "side" });
  const show = b => {
    svg.querySelectorAll("g").forEach(one => one.classList.remove("on", "near"));
    b.element.classList.add("on");
    const n = b.node, kernel = kernels.get(n.name);
    if (kernel) for (const other of boxes) if (other !== b && kernel.call.graph_nodes.includes(other.node.name)) other.element.classList.add("near");
    side.replaceChildren(make("h3", { class: "wrap" }, n.name), make("table", { class: "facts" }, row("operator", make("span", { class: "wrap" }, n.target)), row("type", n.type || "none"),
      row("module", make("span", { class: "wrap" }, n.module || "none")), row("made by", n.by ? make("a", { href: `#pass=${data.passes.findIndex(p => p.name === n.by && p.difference && (p.graph === graph.name || p.stage === "dynamo"))}` }, n.by) : "model code"),
      row("kernel", kernel ? make("a", { class: "wrap", href: kernelHref(kernel.i, kernel.j) }, kernel.call.name) : dim("not known"))),
      make("pre", {}, n.line || "no source line"), make("pre", {}, `${n.target}${n.args}`));
  };
  for (const b of boxes) {
    const n = b.node, x = b.x - b.width / 2, edge = ["placeholder", "output"].includes(n.op), kernel = kernels.get(n.name);
    const fused = kernel && kernel.call.source && kernel.call.graph_nodes.length > 1;
    b.element = make("g", { class: "node", onclick: () => show(b) },
      make("title", {}, `${n.name}\n${n.line || n.module || "no source line"}${kernel ? `\n${kernel.call.name}` : ""}`),
      make("rect", { class: "box", x, y: b.y, width: b.width, height: b.height, rx: 7, style: `fill:var(${n.by ? "--ours" : edge ? "--input" : "--model"})` }),
      fused ? make("rect", { x: x + 1, y: b.y + 6, width: 4, height: b.height - 12, rx: 2, style: "fill:var(--kernel)" }) : null,
      make("text", { x: x + 11, y: b.y + 15 }, (edge ? n.name : n.op).slice(0, 23)),
      make("text", { x: x + 11, y: b.y + 29, class: "dim" }, n.type.slice(0, 23)),
      fused ? make("text", { x: b.x + 58, y: b.y + 15, class: "dim" }, `k${kernel.j + 1}`) : null);
    svg.append(b.element);
  }
  const frame = make("div", { class: "graph" }, svg);
  const legend = keys([["model code", "--model"], ["one of our passes", "--ours"], ["fused by Inductor, k3: kernel 3", "--kernel"], ["input or output", "--input"]]);
  const toggle = make("button", { class: everyNode ? "on" : "", onclick: () => { everyNode = !everyNode; draw(number, wanted); } }, "show views too");
  side.append(note("Click a node for its source line, module, pass and kernel."));
  out.replaceChildren(make("h2", {}, graphName(number)), make("div", { class: "tools" }, legend, toggle, dim(`${boxes.length} of ${graph.nodes.length} nodes; text: `), link(graph.file)),
    make("div", { class: "split" }, frame, side));
  const target = boxes.find(b => b.node.name === wanted) || boxes.find(b => b.y < 20) || boxes[0];
  if (target) { frame.scrollTo(target.x - frame.clientWidth / 2, target.y - 120); if (wanted && target.node.name === wanted) show(target); }
}
