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
