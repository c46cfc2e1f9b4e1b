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
// Which rows the products and attentions among some nodes compute.
function liveRows(nodes) {
  const found = nodes.filter(node => /mm$|attention/.test(node.op) && symbolsOf(node.type).length), name = node => node.op.includes("attention") ? "attention" : node.module.split(" ")[0].split(".").pop() || node.name;
  const list = some => [...new Set(some.map(name))].join(", "), all = found.filter(node => ROWS.get(symbolsOf(node.type)[0]) === "T"), some = found.filter(node => !all.includes(node));
  if (!found.length) return "no product or attention";
  if (!some.length) return "all rows of the batch (T)";
  return all.length ? `logits rows alone (R): ${list(some)}; all rows (T): ${list(all)}` : "logits rows alone (R); the other rows are dead";
}
