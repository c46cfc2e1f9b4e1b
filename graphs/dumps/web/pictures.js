// A layered drawing of a graph. Boxes: { width, height, inputs: [index] }; sets x and y, returns edges with their bends.
function layered(boxes) {
  const rank = [];
  boxes.forEach((box, i) => { rank[i] = Math.max(-1, ...box.inputs.map(j => rank[j])) + 1; });
  const first = boxes.map(() => Infinity);
  for (let i = boxes.length - 1; i >= 0; i--) { // what nothing feeds stands right above its first user
    if (!boxes[i].inputs.length && first[i] < Infinity) rank[i] = first[i] - 1;
    for (const j of boxes[i].inputs) first[j] = Math.min(first[j], rank[i]);
  }
  const items = boxes.map((box, i) => ({ box, rank: rank[i], width: box.width, up: [], down: [] })), edges = [];
  boxes.forEach((box, i) => [...new Set(box.inputs)].forEach(j => {
    const bends = [items[j]];
    for (let r = rank[j] + 1; r < rank[i]; r++) { const bend = { rank: r, width: 14, up: [], down: [] }; items.push(bend); bends.push(bend); }
    bends.push(items[i]);
    for (let k = 1; k < bends.length; k++) { bends[k].up.push(bends[k - 1]); bends[k - 1].down.push(bends[k]); }
    edges.push(bends);
  }));
  const rows = [];
  for (const item of items) (rows[item.rank] ||= []).push(item);
  for (const members of rows) members.forEach((item, k) => { item.at = k; });
  const middle = others => sum(others.map(other => other.at)) / others.length;
  for (let sweep = 0; sweep < 12; sweep++) {
    const side = sweep % 2 ? "down" : "up";
    for (const members of sweep % 2 ? [...rows].reverse() : rows) {
      for (const item of members) item.wanted = item[side].length ? middle(item[side]) : item.at;
      members.sort((a, b) => a.wanted - b.wanted).forEach((item, k) => { item.at = k; });
    }
  }
  for (const members of rows) spread(members, members.map((item, k) => k * 100));
  for (let sweep = 0; sweep < 14; sweep++) {
    const side = sweep % 2 ? "down" : "up";
    for (const members of sweep % 2 ? [...rows].reverse() : rows)
      spread(members, members.map(item => { const near = sweep > 11 ? [...item.up, ...item.down] : item[side];
        return near.length ? sum(near.map(one => one.x)) / near.length : item.x; }));
  }
  for (const members of rows) spread(members, members.map(item => { // chains hang straight, inputs stand above their user
    const straight = item.box ? item.up.filter(one => one.box) : item.up, near = straight.length ? straight : item.up.length ? item.up : item.down;
    return near.length && (item.box || !item.up[0].box) ? sum(near.map(one => one.x)) / near.length : item.x; }));
  const left = Math.min(0, ...items.map(item => item.x - item.width / 2));
  for (const item of items) { item.x += 16 - left; item.y = item.rank * 56 + 14; if (item.box) Object.assign(item.box, { x: item.x, y: item.y }); }
  return edges.map(bends => bends.map(item => ({ x: item.x, y: item.y, height: item.box ? item.box.height : 0 })));
}
// The places nearest to the wanted ones that keep the order and do not overlap: isotonic regression.
function spread(members, wanted) {
  const offsets = [0];
  for (let k = 1; k < members.length; k++) offsets[k] = offsets[k - 1] + (members[k - 1].width + members[k].width) / 2 + 16;
  const pools = [];
  wanted.forEach((x, k) => {
    pools.push({ total: x - offsets[k], count: 1 });
    while (pools.length > 1 && pools.at(-2).total / pools.at(-2).count > pools.at(-1).total / pools.at(-1).count) {
      const last = pools.pop(); pools.at(-1).total += last.total; pools.at(-1).count += last.count;
    }
  });
  let k = 0;
  for (const pool of pools) for (let n = 0; n < pool.count; n++, k++) members[k].x = pool.total / pool.count + offsets[k];
}
// Operators and types in plain words. T: rows of the batch; R: those whose logits are wanted.
const PLAIN = {
  mm: "matrix product", addmm: "matrix product + bias", bmm: "batched product", _scaled_mm: "FP8 product", linear: "matrix product", attention: "attention",
  mla_attention: "latent attention", attention_quant: "attention to FP8", index_put: "write into cache", index_put_: "write into cache", write_kv: "write keys, values",
  embedding: "embedding", index: "pick rows", index_select: "pick rows", pow: "power", mean: "mean", rsqrt: "1 / square root", mul: "multiply", add: "add", sub: "subtract",
  div: "divide", neg: "negate", exp: "exp", cat: "join", _to_copy: "convert dtype", permute: "permute", unsqueeze: "add a dimension", squeeze: "drop a dimension",
  as_strided: "view by strides", expand: "repeat as a view", clone: "copy", copy_: "copy back", full: "constant", clamp_min: "at least", arange: "0, 1, 2, ...",
  convert_element_type: "convert dtype",
};
const plain = op => PLAIN[op] || op.replaceAll("_", " ").trim();
const DTYPES = { float32: "f32", float64: "f64", float16: "f16", bfloat16: "bf16", int64: "i64", int32: "i32" };
const symbolsOf = type => type.match(/\b[su]\d+\b/g) || [];
const ROWS = (() => {
  const nodes = data.graphs.flatMap(graph => graph.nodes), products = nodes.filter(node => /mm$|attention/.test(node.op));
  const first = nodes.find(node => node.op === "embedding") || products[0], all = symbolsOf(first?.type || "")[0];
  const names = new Map(all ? [[all, "T"]] : []);
  for (const node of products) for (const symbol of symbolsOf(node.type).slice(0, 1)) if (!names.has(symbol)) names.set(symbol, names.size === 1 ? "R" : `R${names.size}`);
  return names;
})();
const typed = type => type.replace(/\b(b?float\d+|int\d+)\[/g, (all, dtype) => `${DTYPES[dtype] || dtype}[`).replace(/\b[su]\d+\b/g, symbol => ROWS.get(symbol) || symbol);
// A line of a graph without its strides; the whole line where nothing else tells two lines apart.
const shorter = line => line.replace(/^ {8}/, "").replace(/"(\w+\[[^\]]*\])[^"]*"/g, (all, type) => typed(type)).replaceAll("torch.ops.", "").replaceAll("l_self_modules_", "").replaceAll("_modules_", ".").replaceAll("_parameters_weight_", ".weight");
const twoLines = (left, right) => left && right && left !== right && shorter(left) === shorter(right) ? [left.trim(), right.trim()] : [shorter(left), shorter(right)];
// How many of the products and attentions compute all rows of the batch, and how many those whose logits are wanted.
function countRows(nodes) {
  const found = nodes.filter(node => /mm$|attention|gated_mlp/.test(node.op) && symbolsOf(node.type).length), all = found.filter(node => ROWS.get(symbolsOf(node.type)[0]) === "T").length;
  return [[all, "all tokens"], [found.length - all, "logits rows"]].filter(([n]) => n).map(([n, rows]) => `${n} of ${rows}`).join(", ");
}
// Which rows the products and attentions among some nodes compute.
function liveRows(nodes) {
  const found = nodes.filter(node => /mm$|attention/.test(node.op) && symbolsOf(node.type).length), name = node => node.op.includes("attention") ? "attention" : node.module.split(" ")[0].split(".").pop() || node.name;
  const list = some => [...new Set(some.map(name))].join(", "), all = found.filter(node => ROWS.get(symbolsOf(node.type)[0]) === "T"), some = found.filter(node => !all.includes(node));
  if (!found.length) return "no product or attention";
  if (!some.length) return "all rows of the batch (T)";
  return all.length ? `logits rows alone (R): ${list(some)}; all rows (T): ${list(all)}` : "logits rows alone (R); the other rows are dead";
}
// What became what: each place that a pass changed as pictures, with what it reads and who reads it.
const placeBoxes = (nodes, colour) => nodes.map((node, i) => ({ lines: [plain(node.op), `${node.name} ${typed(node.type)}`], title: `${node.name} = ${node.op}${node.args}`, colour: node.own ? colour : "--input", width: 190, height: 36,
  inputs: node.inputs.map(name => nodes.findIndex(other => other.name === name)).filter(j => j >= 0 && j < i) }));
function boxPicture(boxes) {
  const bends = layered(boxes), width = Math.max(...boxes.map(b => b.x), 0) + 110, height = Math.max(...boxes.map(b => b.y), 0) + 50;
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}` }, ...bends.map(path => make("path", { d: curve(path) })));
  for (const b of boxes) svg.append(make("g", {}, make("title", {}, b.title), make("rect", { class: "box", x: b.x - b.width / 2, y: b.y, width: b.width, height: b.height, rx: 7, style: `fill:var(${b.colour})` }),
    ...b.lines.slice(0, 2).map((text, k) => make("text", { x: b.x - b.width / 2 + 9, y: b.y + (b.lines.length > 1 ? 15 + 14 * k : 22), class: k ? "dim" : "" }, text.length > 27 ? `${text.slice(0, 26)}…` : text))));
  const frame = make("div", { class: "graph fit" }, svg), first = boxes.find(b => b.colour === "--ours");
  if (first) requestAnimationFrame(() => { frame.scrollTop = first.y * svg.clientHeight / height - 150; });
  return frame;
}
const curve = path => path.slice(1).map((b, k) => { const a = path[k], y = a.y + a.height, bow = (b.y - y) / 2; return `${k ? "" : `M${a.x} ${y}`}C${a.x} ${y + bow} ${b.x} ${b.y - bow} ${b.x} ${b.y}`; }).join("");
function placePictures(one) {
  const found = one.places.flatMap((kind, k) => kind.drawn.map(pair => ({ kind: k, ...pair }))), holder = make("div", { class: "flow" }), label = dim(""), table = make("table", {}, head("places", "before", "after"));
  const ops = some => Object.entries(some).map(([op, n]) => n > 1 ? `${n} x ${plain(op)}` : plain(op)).join(", ") || dim("nothing");
  let shown = 0;
  const show = to => {
    shown = (to + found.length) % found.length;
    const { kind, before, after } = found[shown], pictures = [[before, "--del"], [after, "--add"]];
    label.textContent = found.length > 1 ? `place ${shown + 1} of ${found.length}` : "";
    table.querySelectorAll("tr.link").forEach((each, k) => each.classList.toggle("on", k === kind));
    holder.replaceChildren(...pictures.map(([nodes, colour], k) => make("div", {}, dim(k ? "after" : "before"), nodes.length ? boxPicture(placeBoxes(nodes, colour)) : note("nothing"))));
  };
  one.places.forEach((kind, k) => { const first = found.findIndex(each => each.kind === k);
    table.append(make("tr", { class: "link", onclick: () => { if (first >= 0) show(first); } }, make("td", { class: "nowrap" }, kind.num), make("td", {}, ops(kind.before)), make("td", {}, ops(kind.after)))); });
  if (found.length) show(0);
  const buttons = found.length > 1 ? [label, make("button", { onclick: () => show(shown - 1) }, "previous place"), make("button", { onclick: () => show(shown + 1) }, "next place")] : [];
  const missing = sum(one.places.map(kind => kind.num)) - found.length;
  return [make("h3", {}, "What became what"), table, make("div", { class: "tools" }, make("h3", {}, "Before and after"), ...buttons, missing ? dim(`${plural(missing, "place")} not drawn; the files have all`) : null), holder];
}
