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
