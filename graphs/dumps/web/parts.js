"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const SVG = ["svg", "g", "rect", "path", "text", "title"];
const make = (name, attributes = {}, ...children) => {
  const one = SVG.includes(name) ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) one.addEventListener(key.slice(2), value);
    else if (key === "style") one.style.cssText = value; // as an attribute the page's policy would refuse it
    else one.setAttribute(key, value);
  }
  one.append(...children.filter(child => child != null).map(child => child instanceof Node ? child : String(child)));
  return one;
};
const place = id => document.querySelector(`#${id} > div`);
const sum = numbers => numbers.reduce((total, n) => total + n, 0);
const human = n => { for (const unit of ["B", "KiB", "MiB", "GiB"]) { if (n < 1024) return `${+n.toFixed(1)} ${unit}`; n /= 1024; } return `${+n.toFixed(1)} TiB`; };
const time = us => us >= 1000 ? `${(us / 1000).toFixed(2)} ms` : `${us.toFixed(1)} us`;
const plural = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
const row = (...cells) => make("tr", {}, ...cells.map(cell => make("td", {}, cell)));
const head = (...cells) => make("tr", {}, ...cells.map(cell => make("th", {}, cell)));
const link = file => make("a", { href: file.split("/").map(encodeURIComponent).join("/") }, file);
const dim = text => make("span", { class: "dim" }, text);
const note = text => make("p", { class: "dim" }, text);
const keys = pairs => make("div", { class: "keys" }, ...pairs.flatMap(([text, colour]) =>
  [make("span", { class: "key", style: `background:var(${colour})` }), make("span", {}, text)]));
const graphName = i => { const graph = data.graphs[i]; return graph ? graph.num_calls > 1 ? `${graph.num_calls} x ${layerKind(graph)}` : graph.name : "around the graphs"; };
const layerKind = graph => {
  const found = graph.nodes.map(n => /(\S*DecoderLayer|\S*Block|\S*Layer)$/.exec(n.module)).find(Boolean);
  return found && graph.num_calls > 1 ? found[1] : graph.name;
};
const batch = () => data.timeline?.num_reqs ?? 1;
const cached = () => (data.timeline?.seq_len ?? 0) * batch();
// A name stands for its first call; later ones have their number behind it.
const kernelHref = (i, j) => { const { calls } = data.kernels[i], { name } = calls[j]; return `#kernel=${i}=${name}${calls.findIndex(one => one.name === name) === j ? "" : `=${j}`}`; };
// The module of a call's last node, without the number of its layer: `self_attn.q_proj`.
const moduleOf = call => call.module.replace(/^.*\.\d+\./, "");
