const entries = [
  ...data.sessions.flatMap(s => s.modules.map(one => ({ text: `module ${one.path} ${one.kind}`, href: `#module=${firstOf(one)}` }))),
  ...data.passes.map((one, i) => ({ text: `pass ${one.name} on ${one.graph}`, href: `#pass=${i}` })),
  ...prefillRuns().length ? [] : [{ text: "pass fast_prefill, which leaves out dead rows: off", href: "#model" }],
  ...data.kernels.flatMap((code, i) => [...new Set(code.calls.map(call => call.name))].map(name => ({ text: `kernel ${name} of ${code.graph === null ? `code ${i + 1}` : graphName(code.graph)}`, href: `#kernel=${i}=${name}` }))),
  ...data.graphs.flatMap((graph, i) => graph.nodes.map(n => ({ text: `${n.name}  ${n.op}  ${n.module}  (${graph.name})`, href: `#graph=${i}=${n.name}` }))),
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
function move(by) {
  const all = [...document.querySelectorAll("#found a")], at = all.findIndex(one => one.classList.contains("on"));
  if (!all.length) return;
  all[at]?.classList.remove("on");
  const next = all[(at + by + all.length) % all.length];
  next.classList.add("on"); next.scrollIntoView({ block: "nearest" });
}
function files() {
  const out = place("files"), { entries } = data.index;
  for (const [key, title] of Object.entries(data.sections)) {
    const rows = entries.map((one, i) => [i + 1, one]).filter(([, one]) => one.section === key);
    if (rows.length) out.append(make("h2", {}, title), make("table", {}, ...rows.map(([number, one]) => row(dim(number), make("span", {}, one.text,
      ...one.files.map(file => make("div", {}, link(file))), ...one.skipped.map(why => make("div", { class: "dim" }, `left alone: ${why}`)))))));
  }
}
const VIEWS = { ran: "ran", model: "model", graph: "model", module: "model", pass: "pass", kernel: "kernel", timeline: "timeline", files: "files" };
const MAKERS = { ran, model, pass: passes, kernel: kernels, timeline, files }, made = new Set();
function go() {
  let text = location.hash.slice(1);
  try { text = decodeURIComponent(text); } catch { text = ""; }
  const [what, number, ...rest] = text.split("="), view = Object.hasOwn(VIEWS, what) ? VIEWS[what] : "ran", main = document.querySelector("main");
  document.querySelectorAll("section").forEach(one => one.classList.toggle("on", one.id === view));
  document.querySelectorAll("nav a").forEach(one => one.classList.toggle("on", one.hash === `#${view}`));
  const fresh = !made.has(view); // a view is made when it is first looked at
  made.add(view);
  if (fresh) MAKERS[view]();
  if (what === "module") drawModule(number || "", rest.join("="));
  else if (view === "model" && (fresh || what === "graph")) draw(what === "graph" ? +number : Math.max(0, data.graphs.findIndex(graph => graph.num_calls > 1)), rest.join("="));
  if (view === "pass" && (fresh || number)) showPass(number ? +number : Math.max(0, data.passes.findIndex(one => one.difference)));
  main.scrollTop = 0;
  if (what === "graph" || what === "module") document.getElementById("drawn").scrollIntoView();
  const kernel = what === "kernel" && number && document.getElementById(`kernel=${number}=${rest.join("=")}`);
  if (kernel) { kernel.querySelector("details").open = true; kernel.scrollIntoView({ block: "start" }); }
}
document.addEventListener("keydown", event => {
  const input = document.getElementById("search");
  if (event.target === input) {
    if (event.key === "Enter") document.querySelector("#found a.on")?.click();
    if (event.key === "Escape") { input.value = ""; search(""); input.blur(); }
    if (event.key === "ArrowDown" || event.key === "ArrowUp") { event.preventDefault(); move(event.key === "ArrowDown" ? 1 : -1); }
  } else if (event.ctrlKey || event.metaKey || event.altKey) return;
  else if (event.key === "/") { event.preventDefault(); input.focus(); }
  else if ("jn".includes(event.key)) step(1);
  else if ("kp".includes(event.key)) step(-1);
  else if (/^[1-6]$/.test(event.key)) location.hash = Object.keys(MAKERS)[event.key - 1];
});
document.getElementById("search").addEventListener("input", event => search(event.target.value));
addEventListener("hashchange", go);
go();
document.documentElement.dataset.rendered = Math.round(performance.now());
