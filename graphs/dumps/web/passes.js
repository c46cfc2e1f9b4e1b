let pass = 0;
function ran() {
  const out = place("ran");
  const matched = data.passes.filter(one => one.matches), changed = data.passes.filter(one => one.difference), step = data.timeline?.replay_us;
  const tile = (value, text, href) => make("div", { class: "tile" }, make("b", {}, href ? make("a", { href }, value) : value), make("span", {}, text));
  const passTile = () => tile(`${new Set(changed.map(one => one.name)).size} of ${new Set(data.passes.map(one => one.name)).size}`, "passes changed a graph", "#pass");
  const passRow = () => row("passes", matched.length ? make("span", {}, ...matched.flatMap((one, i) => [i ? ", " : "", make("a", { href: `#pass=${data.passes.indexOf(one)}` }, `${one.name} ${one.in_words}`)])) : data.passes.length ? "none found anything" : "none ran");
  if (!data.sessions.length) out.append(make("h1", { class: "big" }, "Compiled functions"), note(`no decode session ran inside; torch ${data.torch}`),
    make("div", { class: "tiles" }, tile(`${data.index.num_graphs} / ${data.compiled.filter(one => one.why).length}`, "graphs / recompiles"), passTile(), step ? tile(time(step), "a call", "#timeline") : null,
      tile(`${sum(data.compiled.map(one => one.seconds)).toFixed(1)} s`, "to compile")),
    make("table", { class: "facts" }, passRow()));
  for (const s of data.sessions) {
    const levels = Object.entries(s.levels).map(([group, level]) => `${group}: ${level.toLowerCase().replaceAll("_", " ")}`).join(", ");
    const memory = sum(Object.values(s.memory));
    out.append(make("h1", { class: "big" }, s.model), note(`on ${s.device}, torch ${data.torch}`),
      make("div", { class: "tiles" }, tile(s.backend, "attention backend"), tile(s.mode_used === "NONE" ? "called" : s.mode_used.toLowerCase().replaceAll("_", " "), s.graphs.length ? `${plural(s.graphs.length, "captured step")}` : "CUDA graphs: none"),
        tile(`${s.num_graphs} / ${s.num_breaks} / ${s.num_recompiles}`, "graphs / breaks / recompiles"), passTile(),
        step ? tile(time(step), data.timeline.kind === "profile" ? "a call" : `a decode step of ${plural(batch(), "request")}`, "#timeline") : tile(human(memory), "held"), tile(`${s.compile_seconds.toFixed(1)} s`, "to compile")),
      make("h2", {}, "Memory"), owners(s.memory),
      make("h2", {}, "Chosen, and why"),
      make("table", { class: "facts" }, row("backend", make("span", {}, `${s.backend}: ${s.backend_why}`, against(s.backends_against))), row("may be captured", levels || "no layer"),
        row("CUDA graphs", `asked ${s.mode_asked}, used ${s.mode_used}: ${s.mode_why}`), row("captured", s.graphs.length ? `${plural(s.graphs.length, "step")}, ${human(s.graph_bytes)}, ${s.capture_seconds.toFixed(1)} s` : "nothing"),
        row("decode steps", `${s.decode_steps.used} a launch${s.decode_steps.used === s.decode_steps.asked ? "" : `, ${s.decode_steps.asked} asked: ${s.decode_steps.why}`}`), row("steps", Object.entries(s.num_steps).map(([how, n]) => `${n} ${how === "captured" ? "replayed" : how}`).join(", ")),
        row("products", s.products), passRow(),
        row("compiled", `by ${s.compiler || "nobody"}, ${s.compile_seconds.toFixed(1)} s`)));
    for (const failure of s.failures) out.append(note(`not captured: ${typeof failure === "string" ? failure : JSON.stringify(failure)}`));
  }
  if (data.compiled.length) out.append(make("h2", {}, "Compiled"), make("table", {}, head("function", "where", "took", "why again"),
    ...data.compiled.map(one => row(one.function, make("span", { class: "wrap dim" }, one.place), `${one.seconds.toFixed(1)} s`, make("span", { class: "wrap" }, one.failed ? `failed: ${one.failed}` : one.why)))));
  if (data.index.notes.length) out.append(make("h2", {}, "Notes"), ...data.index.notes.map(note));
}
function against(reasons) { // each of the others, in the order of preference
  const all = Object.entries(reasons || {});
  return all.length ? make("details", {}, make("summary", {}, `the ${plural(all.length, "other")}`), make("table", {}, ...all.map(([name, why]) => row(name, why.join("; ") || "behind it in the order of preference")))) : null;
}
function owners(memory) {
  const colours = ["--product", "--attention", "--kernel"], all = Object.entries(memory), total = sum(Object.values(memory)) || 1;
  const bar = make("div", { class: "bar" });
  all.forEach(([name, bytes], i) => { if (bytes) bar.append(make("div", { style: `width:${100 * bytes / total}%;background:var(${colours[i]})`, title: `${name} ${human(bytes)}` })); });
  const text = keys(all.map(([name, bytes], i) => [`${name} ${human(bytes)}`, colours[i]]));
  return make("div", {}, bar, text, note(`${human(total)} in all. Graph pools hold the activations of captured steps; activations of called steps are not measured.`));
}

function passes() {
  const list = make("table", {}, head("", "pass", "graph", "changed", "left alone"));
  data.passes.forEach((one, i) => list.append(make("tr", { class: "link", "data-pass": i, onclick: () => { location.hash = `pass=${i}`; } }, make("td", { class: "dim" }, i + 1),
    make("td", {}, make("a", { href: `#pass=${i}` }, one.difference ? make("b", {}, one.name) : one.name)), make("td", {}, one.graph), make("td", {}, one.in_words),
    make("td", { class: "dim" }, one.skipped.length ? `${plural(one.skipped.length, "place")}` : ""))));
  place("pass").append(make("div", { id: "shown" }), make("h2", {}, "All passes, in the order in which they ran"), list);
}
function step(by) {
  const changed = data.passes.map((one, i) => one.difference ? i : -1).filter(i => i >= 0);
  if (!changed.length) return;
  const next = by > 0 ? changed.find(i => i > pass) ?? changed[0] : changed.filter(i => i < pass).pop() ?? changed.at(-1);
  location.hash = `pass=${next}`;
}
function changes(one) {
  const names = [...new Set([...Object.keys(one.before), ...Object.keys(one.after)])];
  const found = names.map(name => [name, (one.after[name] || 0) - (one.before[name] || 0)]).filter(([, n]) => n).sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
  return found.slice(0, 12).map(([name, n]) => `${n > 0 ? "+" : "−"}${Math.abs(n)} ${name}`).join("   ");
}
function showPass(number) {
  const one = data.passes[number], out = document.getElementById("shown");
  if (!one) return;
  pass = number;
  document.querySelectorAll("tr[data-pass]").forEach(each => each.classList.toggle("on", +each.dataset.pass === number));
  const parts = [make("div", { class: "tools" }, make("button", { onclick: () => step(-1), title: "k" }, "← previous"), make("button", { onclick: () => step(1), title: "j" }, "next →"),
    dim("passes that changed their graph; keys k and j")), make("h1", { class: "big" }, one.name), one.purpose ? make("p", {}, one.purpose) : null, note(`on ${one.graph}${one.num_calls > 1 ? `, which runs ${one.num_calls} times` : ""}: ${one.in_words}`)];
  if (one.summary) parts.push(make("p", {}, one.summary));
  if (one.error) parts.push(make("p", {}, `failed: ${one.error}`));
  if (one.difference && !one.places.length && changes(one)) parts.push(make("p", {}, make("code", {}, changes(one))));
  const reasons = {};
  for (const why of one.skipped) { const text = why.replace(/^\w+: /, ""); (reasons[text] ||= []).push(/^(\w+): /.exec(why)?.[1] || ""); }
  if (one.skipped.length) parts.push(make("h3", {}, `Left alone: ${plural(one.skipped.length, "place")}`),
    make("ul", {}, ...Object.entries(reasons).map(([why, places]) => make("li", {}, why, places[0] ? dim(`   ${places.slice(0, 12).join(", ")}${places.length > 12 ? ` and ${places.length - 12} more` : ""}`) : ""))));
  if (one.difference) {
    const table = make("table", {}, make("colgroup", {}, ...["48px", "", "48px", ""].map(width => make("col", { style: `width:${width}` }))));
    for (const [mark, i, left, j, right] of one.difference.rows) {
      if (mark === "...") { table.append(make("tr", { class: "cut" }, make("td", { colspan: 4 }, "···"))); continue; }
      const [before, after] = twoLines(left, right);
      table.append(make("tr", {}, make("td", { class: "n" }, i || ""), make("td", { class: "~-".includes(mark) ? "del" : "" }, before),
        make("td", { class: "n" }, j || ""), make("td", { class: "~+".includes(mark) ? "add" : "" }, after)));
    }
    if (one.places.length) parts.push(...placePictures(one));
    const more = one.difference.num_left_out ? ` ${plural(one.difference.num_left_out, "more row")} in the files` : "";
    parts.push(make("h3", {}, "Line by line"), make("p", {}, dim("before "), link(one.files[0]), dim("   after "), link(one.files[1]), dim(more)), make("div", { class: "diff" }, table));
  } else parts.push(note("The graph stayed as it was."));
  out.replaceChildren(...parts.filter(Boolean));
}
