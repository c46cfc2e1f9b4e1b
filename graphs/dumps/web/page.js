"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const make = (name, attributes = {}, ...children) => {
  const svg = ["svg", "g", "rect", "path", "text", "title"].includes(name);
  const one = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes))
    key.startsWith("on") ? one.addEventListener(key.slice(2), value) : one.setAttribute(key, value);
  one.append(...children.filter(child => child != null).map(child => child instanceof Node ? child : String(child)));
  return one;
};
const place = id => document.querySelector(`#${id} > div`);
const human = n => { for (const unit of ["B", "KiB", "MiB", "GiB"]) { if (n < 1024) return `${+n.toFixed(1)} ${unit}`; n /= 1024; } return `${+n.toFixed(1)} TiB`; };
const row = (...cells) => make("tr", {}, ...cells.map(cell => make("td", {}, cell)));
const head = (...cells) => make("tr", {}, ...cells.map(cell => make("th", {}, cell)));
const link = file => make("a", { href: file.split("/").map(encodeURIComponent).join("/") }, file);

function ran() {
  const out = place("ran");
  if (!data.sessions.length) out.append(make("p", { class: "dim" }, "No decode session ran inside this dump."));
  for (const s of data.sessions) {
    const levels = Object.entries(s.levels).map(([group, level]) => `${group} ${level}`).join(", ");
    out.append(make("table", {},
      row("model", `${s.model} on ${s.device}`), row("backend", `${s.backend}: ${s.backend_why}`),
      row("layer groups", levels || "none"), row("products", s.products),
      row("graphs", `${s.num_graphs} graphs, ${s.num_breaks} breaks, ${s.num_recompiles} recompiles after warm-up`),
      row("CUDA graphs", `asked ${s.mode_asked}, used ${s.mode_used}: ${s.mode_why}`),
      row("captured", `${s.graphs.length} steps, ${human(s.graph_bytes)}`),
      row("compiled", `by ${s.compiler || "nobody"}, ${s.compile_seconds.toFixed(1)} s`),
      row("memory", memory(s.memory))));
  }
  const notes = data.index.notes;
  if (notes.length) out.append(make("h3", {}, "Notes"), ...notes.map(note => make("p", { class: "dim" }, note)));
}

function memory(owners) {
  const colours = ["--bar1", "--bar2", "--bar3"], all = Object.entries(owners);
  const total = all.reduce((sum, one) => sum + one[1], 0) || 1;
  const bar = make("div", { class: "bar" }), keys = make("div");
  all.forEach(([name, bytes], i) => {
    bar.append(make("div", { style: `width:${100 * bytes / total}%;background:var(${colours[i]})`, title: name }));
    keys.append(make("span", { class: "key", style: `background:var(${colours[i]})` }), `${name} ${human(bytes)}`);
  });
  keys.append(make("span", { class: "dim" }, "   activations: not measured"));
  return make("div", {}, bar, keys);
}

let chosen = 0, pass = 0;
const counts = table => Object.values(table).reduce((sum, n) => sum + n, 0);
function model() {
  const table = make("table", {}, head("graph", "calls", "operators before", "after", "made by passes", ""));
  data.graphs.forEach((graph, i) => {
    const runs = data.passes.filter(one => one.stage === "aten" && one.graph === graph.name);
    const made = {};
    for (const node of graph.nodes) if (node.by) made[node.by] = (made[node.by] || 0) + 1;
    const title = graph.num_calls > 1 ? `${graph.num_calls} x ${kind(graph)}, compiled once` : kind(graph);
    table.append(row(make("b", {}, title), graph.num_calls,
      runs.length ? counts(runs[0].before) : "-", runs.length ? counts(runs[runs.length - 1].after) : "-",
      Object.entries(made).map(([name, n]) => `${name} ${n}`).join(", ") || "none",
      make("button", { onclick: () => { location.hash = `graph=${i}`; } }, "show graph")));
  });
  place("model").append(table, make("div", { id: "drawn" }));
}
const kind = graph => {
  const found = graph.nodes.map(n => /(\S*DecoderLayer|\S*Block)$/.exec(n.module)).find(Boolean);
  return found && graph.num_calls > 1 ? `${found[1]} (${graph.name})` : graph.name;
};

function layered(nodes) {
  // Sizes reach most nodes: their edges are left out.
  const at = new Map(nodes.map((node, i) => [node.name, i]).filter(([, i]) => nodes[i].type !== "SymInt")), rank = [], rows = [];
  nodes.forEach((node, i) => {
    rank[i] = Math.max(-1, ...node.inputs.map(name => rank[at.get(name)] ?? -1)) + 1;
  });
  for (let i = nodes.length - 1; i >= 0; i--) { // a node stands right above its first user
    const users = nodes.map((one, j) => one.inputs.includes(nodes[i].name) ? rank[j] : Infinity);
    const first = Math.min(...users);
    if (first < Infinity) rank[i] = Math.max(rank[i], first - 1);
  }
  nodes.forEach((node, i) => (rows[rank[i]] ||= []).push(i));
  const users = nodes.map(() => []);
  nodes.forEach((node, i) => node.inputs.forEach(name => { if (at.has(name)) users[at.get(name)].push(i); }));
  const x = [];
  const spread = members => {
    const total = members.length;
    members.forEach((i, k) => { x[i] = (k - (total - 1) / 2) * 200; });
  };
  rows.forEach(spread);
  for (let sweep = 0; sweep < 6; sweep++)
    for (const members of sweep % 2 ? [...rows].reverse() : rows) {
      const near = i => { const by = sweep % 2 ? users[i] : nodes[i].inputs.map(name => at.get(name)).filter(j => j !== undefined);
        return by.length ? by.reduce((sum, j) => sum + x[j], 0) / by.length : x[i]; };
      const wanted = new Map(members.map(i => [i, near(i)]));
      members.sort((a, b) => wanted.get(a) - wanted.get(b));
      spread(members);
      const middle = members.reduce((sum, i) => sum + wanted.get(i) - x[i], 0) / members.length;
      members.forEach(i => { x[i] += middle; });
    }
  const left = Math.min(0, ...x);
  return nodes.map((node, i) => ({ node, x: x[i] - left + 10, y: rank[i] * 58 + 10, inputs: node.inputs.map(name => at.get(name)).filter(j => j !== undefined) }));
}

function draw(number, wanted) {
  const graph = data.graphs[number], out = document.getElementById("drawn");
  if (!graph) return;
  chosen = number;
  const boxes = layered(graph.nodes);
  const width = Math.max(...boxes.map(b => b.x), 0) + 200, height = Math.max(...boxes.map(b => b.y), 0) + 60;
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  for (const b of boxes) for (const j of b.inputs) {
    const a = boxes[j], x1 = a.x + 90, y1 = a.y + 38, x2 = b.x + 90, y2 = b.y;
    svg.append(make("path", { d: `M${x1} ${y1} C${x1} ${y1 + 20} ${x2} ${y2 - 20} ${x2} ${y2}` }));
  }
  const details = make("pre", {}, "Click a node. Hover for its source line.");
  const show = b => {
    svg.querySelectorAll("g.on").forEach(one => one.classList.remove("on"));
    b.element.classList.add("on");
    const n = b.node;
    details.textContent = [`${n.name} = ${n.target}${n.args}`, n.type, n.module, n.line || "no source line", `made by ${n.by || "model code"}`].filter(Boolean).join("\n");
  };
  for (const b of boxes) {
    const n = b.node, colour = n.by ? "--ours" : ["placeholder", "output"].includes(n.op) ? "--input" : "--model";
    b.element = make("g", { class: "node", onclick: () => show(b) },
      make("title", {}, `${n.name}\n${n.line || n.module || "no source line"}`),
      make("rect", { x: b.x, y: b.y, width: 180, height: 38, rx: 6, style: `fill:var(${colour})` }),
      make("text", { x: b.x + 8, y: b.y + 15 }, (n.op === "placeholder" ? n.name : n.op).slice(0, 25)),
      make("text", { x: b.x + 8, y: b.y + 30, class: "dim" }, n.type.slice(0, 25)));
    svg.append(b.element);
  }
  const frame = make("div", { class: "graph" }, svg);
  const keys = make("p", {}, make("b", {}, kind(graph)), `: ${graph.nodes.length} nodes, `, link(graph.file));
  for (const [name, colour] of [["model code", "--model"], ["our pass", "--ours"], ["input or output", "--input"]])
    keys.append(make("span", { class: "key", style: `background:var(${colour})` }), name);
  out.replaceChildren(keys, frame, details);
  const target = boxes.find(b => b.node.name === wanted) || boxes.find(b => b.y < 20) || boxes[0];
  if (target) { frame.scrollTo(target.x - frame.clientWidth / 2 + 90, target.y - 150); if (wanted) show(target); }
}

function passes() {
  const out = place("pass"), list = make("table", {}, head("#", "pass", "graph", "matches", "left alone"));
  data.passes.forEach((one, i) => list.append(row(i + 1,
    make("a", { href: `#pass=${i}` }, one.name), one.graph, one.in_words, one.skipped.length || "")));
  out.append(make("div", { class: "tools" }, make("button", { onclick: () => step(-1) }, "previous (k)"),
    make("button", { onclick: () => step(1) }, "next (j)"), make("span", { class: "dim" }, "passes that changed their graph")),
  make("div", { id: "shown" }), make("h3", {}, "All runs, in order"), list);
}
function step(by) {
  const changed = data.passes.map((one, i) => one.difference ? i : -1).filter(i => i >= 0);
  if (!changed.length) return;
  const next = by > 0 ? changed.find(i => i > pass) ?? changed[0] : changed.filter(i => i < pass).pop() ?? changed[changed.length - 1];
  location.hash = `pass=${next}`;
}
function showPass(number) {
  const one = data.passes[number], out = document.getElementById("shown");
  if (!one) return;
  pass = number;
  const parts = [make("h3", {}, `${number + 1}. ${one.name} on ${one.graph}: ${one.in_words}`)];
  if (one.summary) parts.push(make("p", {}, one.summary));
  if (one.error) parts.push(make("p", {}, `failed: ${one.error}`));
  const reasons = {};
  for (const why of one.skipped) reasons[why] = (reasons[why] || 0) + 1;
  if (one.skipped.length) parts.push(make("details", { open: "" }, make("summary", {}, `${one.skipped.length} left alone`),
    make("ul", {}, ...Object.entries(reasons).map(([why, n]) => make("li", {}, n > 1 ? `${why} (${n} times)` : why)))));
  if (one.difference) {
    const table = make("table", {}, make("colgroup", {}, ...["48px", "", "48px", ""].map(width => make("col", { style: `width:${width}` }))));
    for (const [mark, i, left, j, right] of one.difference.rows) {
      if (mark === "...") { table.append(make("tr", { class: "cut" }, make("td", { colspan: 4 }, "..."))); continue; }
      table.append(make("tr", {}, make("td", { class: "n" }, i || ""), make("td", { class: "~-".includes(mark) ? "del" : "" }, left),
        make("td", { class: "n" }, j || ""), make("td", { class: "~+".includes(mark) ? "add" : "" }, right)));
    }
    parts.push(make("p", { class: "dim" }, "before: ", link(one.files[0]), "   after: ", link(one.files[1]),
      one.difference.num_left_out ? `   ${one.difference.num_left_out} more rows in the files` : ""), make("div", { class: "diff" }, table));
  } else parts.push(make("p", { class: "dim" }, "The graph stayed as it was."));
  out.replaceChildren(...parts);
}

function kernels() {
  const out = place("kernel");
  if (!data.kernels.length) out.append(make("p", { class: "dim" }, "Inductor wrote no code inside this dump."));
  data.kernels.forEach((code, i) => {
    const table = make("table", {}, head("kernel", "ATen operators, by Inductor's comments", "calls"));
    const seen = new Map();
    for (const call of code.calls) seen.has(call.name) ? seen.get(call.name).push(call) : seen.set(call.name, [call]);
    for (const [name, calls] of seen) {
      const aten = [...new Set(calls.flatMap(call => call.aten))].join(", ");
      const where = `kernel=${i}=${name}`;
      table.append(make("tr", { id: where }, make("td", {}, make("a", { href: `#${where}` }, name)),
        make("td", {}, aten || make("span", { class: "dim" }, "no comment; see its name"),
          make("details", {}, make("summary", {}, "source"), make("pre", {}, calls[0].source || calls.map(call => call.call).join("\n")))), make("td", {}, calls.length)));
    }
    out.append(make("h3", {}, `${code.calls.length} calls in `, link(code.file)), table);
  });
}

const entries = [
  ...data.graphs.flatMap((graph, i) => graph.nodes.map(n => ({ text: `${n.name}  ${n.op}  ${n.module}  (${graph.name})`, href: `#graph=${i}=${n.name}` }))),
  ...data.kernels.flatMap((code, i) => [...new Set(code.calls.map(call => call.name))].map(name => ({ text: `kernel ${name}`, href: `#kernel=${i}=${name}` }))),
  ...data.passes.map((one, i) => ({ text: `pass ${one.name} on ${one.graph}`, href: `#pass=${i}` })),
  ...data.files.map(file => ({ text: `file ${file}`, href: link(file).getAttribute("href") })),
];
function search(text) {
  const box = document.getElementById("found"), words = text.toLowerCase().split(/\s+/).filter(Boolean);
  box.hidden = !words.length;
  const hits = entries.filter(one => words.every(word => one.text.toLowerCase().includes(word)));
  box.replaceChildren(...hits.slice(0, 40).map(one => make("a", { href: one.href, onclick: () => { box.hidden = true; } }, one.text)),
    make("span", { class: "dim" }, hits.length > 40 ? `${hits.length - 40} more` : hits.length ? "" : "nothing found"));
  box.querySelector("a")?.classList.add("on");
}
function go() {
  const [what, number, ...rest] = decodeURIComponent(location.hash.slice(1)).split("=");
  if (what === "graph") draw(+number, rest.join("="));
  if (what === "pass" && number) showPass(+number);
  const kernel = what === "kernel" && number && document.getElementById(`kernel=${number}=${rest.join("=")}`);
  if (kernel) { kernel.querySelector("details").open = true; kernel.scrollIntoView({ block: "center" }); }
  else if (number) document.getElementById(what === "graph" ? "drawn" : "pass")?.scrollIntoView();
}
document.addEventListener("keydown", event => {
  const input = document.getElementById("search");
  if (event.target === input) {
    if (event.key === "Enter") document.querySelector("#found a.on")?.click();
    if (event.key === "Escape") { input.value = ""; search(""); input.blur(); }
  } else if (event.ctrlKey || event.metaKey || event.altKey) return;
  else if (event.key === "/") { event.preventDefault(); input.focus(); }
  else if ("jn".includes(event.key)) step(1);
  else if ("kp".includes(event.key)) step(-1);
});
document.getElementById("search").addEventListener("input", event => search(event.target.value));
ran(); model(); passes(); kernels();
draw(Math.max(0, data.graphs.findIndex(graph => graph.num_calls > 1)));
showPass(Math.max(0, data.passes.findIndex(one => one.difference)));
addEventListener("hashchange", go);
if (location.hash) go();
