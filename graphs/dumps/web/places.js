// Before and after of a pass as pictures: each place that changed, with what it reads and who reads it.
const NODE_LINE = /^\s*(\w+)(?:: "([^"]*)")? = ([\w.]+)\((.*)\)$/;
const readBy = args => [...new Set(args.match(/\b[a-z_]\w*\b(?!\s*[=(.'"])/gi) || [])].filter(name => !/^(torch|None|True|False|device|cpu|cuda)$/.test(name));
function nodeOf(text, mark) {
  const m = NODE_LINE.exec(text);
  return m && { name: m[1], type: (m[2] || "").replace(/\]\[.*$/, "]"), op: m[3].replace(/^torch\.(ops\.)?/, "").replace(/\.(default|Tensor\w*|Scalar\w*|dim|int)$/, "").split(".").pop(), args: m[4], inputs: readBy(m[4]), mark };
}
// Pairs of pictures. What was taken away and what was put there belong together by what both read.
function placesOf(difference) {
  const sides = [[], []];
  for (const [mark, , left, , right] of difference.rows) {
    if ("~-=".includes(mark)) sides[0].push(nodeOf(left, mark));
    if ("~+=".includes(mark)) sides[1].push(nodeOf(right, mark));
  }
  const maps = sides.map(side => new Map(side.filter(Boolean).map(node => [node.name, node]))), changed = node => "-+".includes(node.mark);
  const parent = new Map(maps.flatMap(map => [...map.keys()].map(name => [name, name]))), find = name => { while (parent.get(name) !== name) name = parent.get(name); return name; };
  for (const map of maps) for (const node of map.values()) if (changed(node))
    for (const name of node.inputs) if (map.has(name) && map.get(name).mark !== "~") parent.set(find(node.name), find(name));
  const roots = new Set(maps.flatMap(map => [...map.values()].filter(changed).map(node => find(node.name))));
  return [...roots].slice(0, 60).map(root => maps.map((map, k) => placeBoxes(map, node => changed(node) && find(node.name) === root, k ? "--add" : "--del"))).filter(pair => pair.every(boxes => boxes.length < 80));
}
function placeBoxes(map, belongs, colour) {
  const own = [...map.values()].filter(belongs), names = new Set(own.map(node => node.name)), kept = new Map();
  const users = [...map.values()].filter(node => node.mark === "~" && node.inputs.some(name => names.has(name)));
  for (const node of own) for (const name of node.inputs) if (map.has(name)) kept.set(name, map.get(name));
  for (const node of [...own, ...users]) kept.set(node.name, node);
  const all = [...kept.values()].sort((a, b) => [...map.keys()].indexOf(a.name) - [...map.keys()].indexOf(b.name)), number = new Map(all.map((node, i) => [node.name, i]));
  return all.map((node, i) => ({ lines: [plain(node.op), `${node.name} ${typed(node.type)}`], title: `${node.name} = ${node.op}(${node.args})`, colour: names.has(node.name) ? colour : "--input", width: 190, height: 36,
    inputs: names.has(node.name) || users.includes(node) ? node.inputs.map(name => number.get(name)).filter(j => j < i) : [] }));
}
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
  const found = placesOf(one.difference), holder = make("div", { class: "flow" }), label = dim("");
  if (!found.length) return [];
  let shown = 0;
  const show = to => {
    shown = (to + found.length) % found.length;
    label.textContent = found.length > 1 ? `place ${shown + 1} of ${found.length}` : "";
    holder.replaceChildren(...found[shown].map((boxes, k) => make("div", {}, dim(k ? "after" : "before"), boxes.length ? boxPicture(boxes) : note("nothing"))));
  };
  show(0);
  const buttons = found.length > 1 ? [label, make("button", { onclick: () => show(shown - 1) }, "previous place"), make("button", { onclick: () => show(shown + 1) }, "next place")] : [];
  return [make("div", { class: "tools" }, make("h3", {}, "Before and after"), ...buttons), holder];
}
