function kernels() {
  const out = place("kernel");
  if (!data.kernels.length) out.append(note("Inductor compiled nothing inside this dump."));
  else out.append(note(data.timeline?.num_reqs ? `Bytes are of the recorded decode step: ${plural(batch(), "request")}, ${cached()} tokens in the cache.` : "Bytes are of a decode step of one request with an empty cache."));
  data.kernels.forEach((code, i) => {
    const table = make("table", { class: "calls" }, head("", "kernel", "ATen operators it came from", data.timeline ? "in the timeline" : "", "bytes moved"));
    code.calls.forEach((call, j) => {
      const where = kernelHref(i, j), known = call.bytes;
      const nodes = call.graph_nodes.map(name => code.graph === null ? name : make("a", { href: `#graph=${code.graph}=${name}`, title: data.graphs[code.graph].nodes.find(node => node.name === name)?.line || "no source line" }, name)).flatMap((one, k) => k ? [", ", one] : [one]);
      table.append(make("tr", { id: where.slice(1) }, make("td", { class: "dim nowrap" }, `k${j + 1}`), make("td", { class: "wrap" }, make("a", { href: where }, call.name), make("div", { class: "dim" }, moduleOf(call))),
        make("td", {}, call.aten.join(", ") || dim("not named"), make("details", {}, make("summary", {}, `${plural(call.graph_nodes.length, "node")}, source`), make("p", { class: "wrap" }, ...nodes), make("pre", {}, `${call.call}\n\n${call.source}`.trim()))),
        make("td", {}, ...inStep(i, j)), make("td", { class: "nowrap" }, known == null ? dim("not known") : human(known))));
    });
    const total = sum(code.calls.map(call => call.bytes || 0)), unknown = code.calls.filter(call => call.bytes == null).length;
    out.append(make("h2", {}, code.graph === null ? `Code ${i + 1}` : graphName(code.graph)), make("p", {}, `${plural(code.calls.length, "call")}, ${unknown ? "at least " : ""}${human(total)}${code.num_calls > 1 ? ` each, ${human(total * code.num_calls)} in all` : ""}${unknown ? `, not known of ${unknown}` : ""}   `, link(code.file)), table);
  });
}

// A call in the recorded step, as the timeline has it.
const stepOf = (i, j) => data.timeline?.calls.find(one => one.graph === i && one.call === j);
function inStep(i, j) {
  const ran = stepOf(i, j);
  return ran ? [`${ran.num} x ${time(ran.each_us)}`, make("div", { class: "dim" }, `${(100 * ran.of_step).toFixed(1)} %`)] : [data.timeline ? dim("not seen") : ""];
}
const COLOURS = { product: "--product", attention: "--attention", kernel: "--kernel", operator: "--other", other: "--other" };
const rowCall = one => one[3] >= 0 ? data.kernels[one[3]].calls[one[4]] : null;
function timeline() {
  const out = place("timeline"), t = data.timeline;
  if (!t) return out.append(make("h1", { class: "big" }, "No timeline"), note(`${data.timeline_why || "nothing was recorded"}.`), note("At its end, a dump runs one decode step of the session that was compiled inside, on rows of padding, or the function that it is given: graphs.dump(directory, profile=lambda: step())."));
  const gpu = t.device !== "cpu", what = gpu ? "kernels" : "operators", called = t.kind === "profile" ? "call" : "step";
  out.append(make("h1", { class: "big" }, `One ${called === "step" ? "decode step" : "call"}, ${time(t.replay_us ?? t.span_us)}`),
    note(`${t.what}${called === "step" ? `: ${plural(t.num_reqs, "request")} of ${t.seq_len} cached tokens` : ""}${t.bandwidth ? `; bandwidth ${(t.bandwidth / 1e12).toFixed(2)} TB/s, ${t.bandwidth_from}` : ""}.`), make("p", {}, dim("trace, for ui.perfetto.dev: "), link(t.trace)));
  if (!gpu) out.append(note("On a CPU these are operators that torch calls; its profiler does not see Inductor's C++ kernels, so they are gaps."));
  out.append(make("table", { class: "facts" }, row(`sum of ${what}`, `${time(t.sum_us)}${t.replay_us ? `, ${(100 * t.sum_us / t.replay_us).toFixed(0)} % of the measured ${called}` : ""}`),
    row("first to last", `${time(t.span_us)}, of which ${time(t.gap_us)} is gaps${gpu ? "; a kernel's time begins when those before have ended" : ""}`),
    row("measured", t.replay_us ? `${time(t.replay_us)} a ${called === "step" ? "replay" : called} without the profiler` : "only under the profiler")));
  const kind = one => { const call = one.graph >= 0 ? data.kernels[one.graph].calls[one.call] : null; return call ? call.kind : "other"; };
  const most = Math.max(t.calls[0]?.total_us || 1, 1), table = make("table", {}, head("", `in the ${called}`, "each", "where", what.slice(0, -1), "bytes each", "of bandwidth"));
  t.calls.slice(0, 10).forEach((one, i) => { const call = one.graph >= 0 ? data.kernels[one.graph].calls[one.call] : null;
    table.append(make("tr", {}, make("td", { class: "dim" }, i + 1), make("td", { class: "nowrap" }, make("span", { class: "share", style: `width:${Math.round(90 * one.total_us / most)}px;background:var(${COLOURS[kind(one)]})` }), ` ${time(one.total_us)}, ${(100 * one.of_step).toFixed(0)} %`),
      make("td", { class: "nowrap" }, `${one.num} x ${time(one.each_us)}`), make("td", {}, one.graph >= 0 ? graphName(data.kernels[one.graph].graph ?? -1) : "around the graphs"),
      make("td", { class: "wrap" }, call ? make("a", { href: kernelHref(one.graph, one.call) }, moduleOf(call) || call.name) : "", call ? make("div", { class: "dim" }, one.names.join(", ").slice(0, 120)) : one.names.join(", ").slice(0, 120)),
      make("td", { class: "nowrap" }, one.bytes == null ? dim("not known") : human(one.bytes)), make("td", { class: "nowrap" }, one.of_bandwidth == null ? "" : `${(100 * one.of_bandwidth).toFixed(0)} %`))); });
  out.append(make("h2", {}, "The ten largest"), table, make("h2", {}, "Layer by layer"), keys([["product", "--product"], ["attention", "--attention"], ["Inductor's kernel", "--kernel"], ["other", "--other"]]));
  lanes(out, t);
}
function lanes(out, t) {
  const groups = [];
  for (const one of t.rows) { const id = `${one[3]} ${one[5]}`; if (groups.at(-1)?.id !== id) groups.push({ id, rows: [] }); groups.at(-1).rows.push(one); }
  const ends = groups.map((group, i) => groups[i + 1]?.rows[0][0] ?? t.span_us), widest = Math.max(...groups.map((group, i) => ends[i] - group.rows[0][0]), 1);
  groups.slice(0, 300).forEach((group, i) => {
    const begin = group.rows[0][0], svg = make("svg", { viewBox: `0 0 1000 13`, preserveAspectRatio: "none" });
    for (const one of group.rows) { const call = rowCall(one), known = call?.bytes;
      svg.append(make("g", {}, make("title", {}, `${t.names[one[2]]}\n${time(one[1])} at ${time(one[0])}${known ? `, ${human(known)}` : ""}`),
        make("rect", { x: 1000 * (one[0] - begin) / widest, y: 0, width: Math.max(1000 * one[1] / widest - .6, .8), height: 13, style: `fill:var(${COLOURS[call ? call.kind : "other"]})` }))); }
    const first = group.rows[0], graph = first[3] >= 0 ? data.graphs[data.kernels[first[3]].graph] : null;
    out.append(make("div", { class: "lane" }, dim(graph ? first[5] ? `layer ${first[5] - 1}` : graph.name : "other"), svg, dim(time(ends[i] - begin))));
  });
}
