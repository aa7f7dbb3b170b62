"use strict";
(() => {
  const plan = JSON.parse(document.getElementById("facts").textContent);
  const main = document.getElementById("main"), nav = document.getElementById("nav");
  const PALETTE = ["#5b9bd5", "#e6a23c", "#70ad6f", "#d9727c", "#9b86c9", "#4fb3a9", "#c78f6b", "#d184b4", "#8f9aa6", "#b8b04e",
    "#6f8fe0", "#e08a5b"];
  const WORK = { products: "#5b9bd5", attention: "#9b86c9", kernels: "#e6a23c", memory: "#70ad6f" };
  const TASK = { F: "#70ad6f", B: "#5b9bd5", I: "#4fb3a9", W: "#9b86c9", g: "#d184b4", u: "#e6a23c", r: "#d9727c", n: "#8f9aa6" };

  // --- elements ------------------------------------------------------------------------------------------------
  function el(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
      else if (name === "style") Object.assign(made.style, value);
      else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
    }
    for (const child of children.flat()) made.append(child instanceof Node ? child : document.createTextNode(String(child)));
    return made;
  }
  function section(id, title, ...content) {
    const made = el("section", { id }, el("h2", {}, title), ...content);
    main.append(made);
    nav.append(el("a", { href: "#" + id }, title));
    return made;
  }
  function table(heads, rows, more) {
    const body = el("tbody", {}, rows.map((row, i) => {
      const cells = row.map((cell, c) => el("td", { class: heads[c].n ? "n" : null }, heads[c].code ? el("code", {}, cell) : cell));
      return el("tr", more ? more(i) : {}, cells);
    }));
    const head = el("tr", {}, heads.map((h) => el("th", { class: h.n ? "n" : null }, h.t)));
    return el("div", { class: "scroll", tabindex: 0 }, el("table", {}, el("thead", {}, head), body));
  }
  const three = (x) => (Math.abs(x) >= 999.5 ? x.toFixed(0) : String(Number(x.toPrecision(3))));
  function seconds(s) {
    if (s === 0) return "0 s";
    if (Math.abs(s) >= 1) return three(s) + " s";
    return Math.abs(s) >= 1e-3 ? three(s * 1e3) + " ms" : three(s * 1e6) + " us";
  }
  function bytes(b) {
    for (const [size, prefix] of [[1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (b >= size) return three(b / size) + " " + prefix + "B";
    return b.toFixed(0) + " B";
  }
  const percent = (part, whole) => (whole ? ((100 * part) / whole).toFixed(1) + " %" : "");
  const tip = el("div", { id: "tip", hidden: "" });
  tip.hidden = true;
  document.body.append(tip);
  function tell(event, text) {
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    tip.style.left = Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8) + "px";
    tip.style.top = Math.min(event.clientY + 14, innerHeight - tip.offsetHeight - 8) + "px";
  }
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const redraws = [];
  let wanted = false;
  function redraw() {
    if (wanted) return;
    wanted = true;
    requestAnimationFrame(() => { wanted = false; redraws.forEach((draw) => draw()); });
  }

  // --- head ----------------------------------------------------------------------------------------------------
  document.getElementById("name").textContent = "plan of " + plan.name;
  document.getElementById("words").textContent = plan.words;
  function bars(rows, whole, attribute, most) {
    return rows.map(([what, size, text, hidden]) => el("div", { class: "bar", ["data-" + attribute]: what, "data-value": size },
      el("span", {}, what), el("span", {}, text), el("span", {}, percent(size, whole)),
      el("span", {}, el("i", { style: { width: Math.min(100, (100 * size) / (most || whole)) + "%" } },
        hidden ? el("b", { title: "runs beside compute" }) : ""))));
  }
  section("glance", "At a glance",
    el("dl", { class: "tiles" }, plan.head.map(([name, text]) =>
      el("div", { "data-fact": name }, el("dt", {}, name), el("dd", {}, text)))),
    el("div", { class: "columns" },
      el("div", {}, el("h3", {}, "where the time goes"), bars(plan.time.map(([what, s, beside, text]) =>
        [what, s, text, beside]), plan.step_s, "time"),
        plan.time.some(([, , beside]) => beside) ? el("p", { class: "dim" }, "hatched: runs beside compute") : ""),
      el("div", {}, el("h3", {}, "what a device holds at its peak"), bars(fullest().kinds.map(([kind, b, text]) =>
        [kind, b, text]), fullest().peak_bytes, "kind"))));
  function fullest() {
    return plan.memory.reduce((a, b) => (b.peak_bytes / b.limit_bytes > a.peak_bytes / a.limit_bytes ? b : a));
  }

  // --- model ---------------------------------------------------------------------------------------------------
  const ROW = 24, ARCS = 40;
  const nodes = [];
  function built(data, parent, group) {
    const node = { data, parent, group, depth: parent ? parent.depth + 1 : 0, children: [], closed: false, s: 0, ops: 0, hit: false };
    node.group = data.reads ? node : group || null;
    node.stage = data.stage !== undefined ? data.stage : parent ? parent.stage : undefined;
    nodes.push(node);
    for (const child of data.children || []) node.children.push(built(child, node, node.group));
    if (data.children) {
      node.s = data.count * d3.sum(node.children, (c) => c.s);
      node.ops = data.count * d3.sum(node.children, (c) => c.ops);
    } else { node.s = data.s; node.ops = data.count; }
    return node;
  }
  const root = built(plan.model, null, null);
  let focus = root, chosen = null, byTime = true, colour = "work";
  function laid() {
    (function place(node, x0, x1) {
      node.x0 = x0; node.x1 = x1;
      const size = (n) => (byTime ? n.s : n.ops), total = d3.sum(node.children, size);
      let x = x0;
      for (const child of node.children) {
        const next = total ? x + ((x1 - x0) * size(child)) / total : x;
        place(child, x, next);
        x = next;
      }
    })(root, 0, 1);
  }
  laid();
  const depth = d3.max(nodes, (n) => n.depth) + 1;
  const canvas = el("canvas", { tabindex: 0, "aria-label": "the model: stages, layers, passes, lines, operators", height: depth * ROW + ARCS });
  const details = el("div", { id: "details", "aria-live": "polite" });
  const legend = el("div", { class: "legend", id: "legend" });
  const select = (id, options, change) => el("select", { id, onchange: (e) => change(e.target.value) },
    options.map(([value, text]) => el("option", { value }, text)));
  section("model", "Model",
    el("div", { class: "controls" }, "coloured by",
      select("colour", [["work", "work"], ["sharding", "sharding"], ["cost", "cost"], ["stage", "stage"]], (v) => { colour = v; legends(); redraw(); }),
      "as wide as", select("width", [["time", "its time"], ["operators", "its operators"]], (v) => { byTime = v === "time"; laid(); redraw(); }),
      el("span", { class: "dim" }, "wheel zooms, drag moves, a click opens, a click on ▾ closes, Esc shows all; of a line under the pointer: ",
        el("b", { style: { color: "var(--accent)" } }, "what it reads"), ", ", el("b", { style: { color: "var(--hit)" } }, "what reads it"))),
    el("div", { class: "view" }, canvas), details, legend);

  const splits = new Map();
  for (const n of nodes) if (n.data.split) splits.set(n.data.split, (splits.get(n.data.split) || 0) + n.s);
  const order = [...splits].sort((a, b) => b[1] - a[1]).map(([split]) => split);
  const ofSplit = new Map(order.map((split, i) => [split, i < PALETTE.length ? PALETTE[i] : "#8f9aa6"]));
  const heat = d3.scaleSequentialSqrt(d3.interpolateYlOrRd).domain([0, d3.max(nodes, (n) => (n.children.length ? 0 : n.s)) || 1]);
  function paint(node) {
    if (colour === "stage") return node.stage === undefined ? "#8f9aa6" : PALETTE[node.stage % PALETTE.length];
    if (colour === "cost") return heat(node.children.length ? 0 : node.s);
    if (node.children.length) {
      let best = null;
      for (const c of node.children) if (!best || c.s > best.s) best = c;
      return node.data.children ? paint(best) : "#8f9aa6";
    }
    return colour === "work" ? WORK[node.data.work] || "#8f9aa6" : ofSplit.get(node.data.split) || "#8f9aa6";
  }
  function legends() {
    const rows = colour === "work" ? Object.entries(WORK).map(([what, c]) => [what === "memory" ? "memory-bound" : what, c])
      : colour === "sharding" ? order.slice(0, PALETTE.length).map((split) => [split, ofSplit.get(split)])
      : colour === "stage" ? plan.meshes.map((m, i) => ["stage " + i + (m.words.length ? ": " + m.words.join(", ") : ""), PALETTE[i % PALETTE.length]])
      : [["cheap", heat(0)], ["dear", heat(heat.domain()[1])]];
    legend.replaceChildren(...rows.map(([text, c]) => el("span", {}, el("i", { style: { background: c } }), text)));
    for (const n of nodes) n.colour = undefined;
  }
  legends();
  let view = d3.zoomIdentity;
  const zoom = d3.zoom().scaleExtent([1, 1e5]).on("zoom", () => { view = d3.event.transform; redraw(); });
  function sized(canvas, height) {
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
      canvas.style.height = height + "px";
    }
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    return [context, width];
  }
  function label(node) {
    const many = node.data.count > 1 ? " ×" + node.data.count : "";
    return (node.children.length ? (node.closed ? "▸ " : "▾ ") : "") + node.data.name + many;
  }
  let shown = [];
  function draw() {
    const height = depth * ROW + ARCS, [c, width] = sized(canvas, height);
    c.clearRect(0, 0, width, height);
    c.font = "12px system-ui, sans-serif"; c.textBaseline = "middle";
    const background = css("--panel"), hit = css("--hit"), fg = css("--fg");
    shown = [];
    (function each(node) {
      const x0 = view.applyX(node.x0 * width), x1 = view.applyX(node.x1 * width);
      if (x1 < 0 || x0 > width || x1 - x0 < 0.4) return;
      const left = Math.max(0, x0), size = Math.min(width, x1) - left, y = node.depth * ROW;
      if (node.colour === undefined) node.colour = paint(node);
      c.globalAlpha = node.children.length ? 0.55 : 1;
      c.fillStyle = node.colour;
      c.fillRect(left, y, size, ROW - 1);
      c.globalAlpha = 1;
      if (size > 3) { c.fillStyle = background; c.fillRect(x1 - 0.5, y, 0.5, ROW - 1); }
      if (node.hit || node === chosen) { c.strokeStyle = node === chosen ? fg : hit; c.lineWidth = 2; c.strokeRect(left + 1, y + 1, Math.max(1, size - 2), ROW - 3); }
      if (size > 26) {
        c.save(); c.beginPath(); c.rect(left, y, size - 3, ROW); c.clip();
        c.fillStyle = node.children.length ? fg : "#10151b";
        c.fillText(label(node), left + 5, y + ROW / 2);
        c.restore();
      }
      shown.push(node);
      if (!node.closed) node.children.forEach(each);
    })(root);
    arcs(c, width, height);
  }
  let over = null;
  function arcs(c, width, height) {
    const node = over || chosen, found = node && node.group ? linked(node) : null;
    canvas.dataset.arcs = found ? found[0][1].length + found[1][1].length : 0;
    if (!found) return;
    const middle = (n) => Math.max(-9, Math.min(width + 9, view.applyX(((n.x0 + n.x1) / 2) * width))), line = lineOf(node);
    found.forEach(([, others], side) => others.forEach((other) => {
      const from = middle(other), to = middle(line), y = height - ARCS, low = y + 1.25 * ARCS;
      c.beginPath(); c.moveTo(from, y); c.bezierCurveTo(from, low, to, low, to, y);
      c.strokeStyle = css(side ? "--hit" : "--accent"); c.lineWidth = 1.8; c.stroke();
      c.beginPath(); c.arc(from, y, 3, 0, 7); c.fillStyle = c.strokeStyle; c.fill();
    }));
  }
  redraws.push(draw);
  function at(event) {
    const box = canvas.getBoundingClientRect(), x = view.invertX(event.clientX - box.left) / box.width;
    const row = Math.floor((event.clientY - box.top) / ROW);
    for (let i = shown.length - 1; i >= 0; i--) if (shown[i].depth === row && shown[i].x0 <= x && x < shown[i].x1) return shown[i];
    return null;
  }
  function path(node) { const names = []; for (let n = node; n; n = n.parent) names.unshift(n.data.name); return names; }
  function goTo(node) {
    chosen = node;
    for (let n = node.parent; n; n = n.parent) n.closed = false;
    const target = node.children.length || !node.parent ? node : node.parent;
    const span = Math.max(1e-9, target.x1 - target.x0), k = Math.min(1e5, 1 / span), width = canvas.clientWidth;
    d3.select(canvas).call(zoom.transform, d3.zoomIdentity.translate(-target.x0 * width * k, 0).scale(k));
    focus = target;
    detail(node);
    redraw();
  }
  function detail(node) {
    const share = percent(node.s, root.s);
    const rows = [el("div", {}, el("b", {}, node.data.name), node.data.count > 1 ? " ×" + node.data.count : "", " ",
      el("span", { class: "dim" }, path(node).slice(0, -1).join(" › ")))];
    rows.push(el("div", { "data-seconds": node.s }, seconds(node.s) + " of a device, " + share + " of all; " + node.ops + " operators"));
    if (node.data.words) rows.push(el("div", {}, node.data.words));
    if (node.data.split) rows.push(el("div", {}, el("code", {}, node.data.split + "   " + node.data.specs)));
    const reads = node.group ? linked(node) : null;
    if (reads) for (const [word, found] of reads) if (found.length)
      rows.push(el("div", {}, el("span", { class: "dim" }, word + " "), found.slice(0, 12).flatMap((other, i) =>
        [i ? ", " : "", el("a", { onclick: () => goTo(other), tabindex: 0 }, other.parent.data.name + " " + other.data.name)])));
    details.replaceChildren(...rows);
  }
  function lineOf(node) {
    let line = node;
    while (line && !(line.parent && line.parent.parent === node.group)) line = line.parent;
    return line;
  }
  function linked(node) {
    const line = lineOf(node);
    if (!line || line.parent === null) return null;
    if (line.linked) return line.linked;
    const key = (n) => n.parent.data.name + "\u0000" + n.data.name, mine = key(line);
    if (!node.group.lines) {
      node.group.lines = new Map();
      for (const phase of node.group.children) for (const l of phase.children) node.group.lines.set(key(l), l);
    }
    const from = [], to = [];
    for (const [p, a, q, b] of node.group.data.reads) {
      if (q + "\u0000" + b === mine) from.push(node.group.lines.get(p + "\u0000" + a));
      if (p + "\u0000" + a === mine) to.push(node.group.lines.get(q + "\u0000" + b));
    }
    return (line.linked = [["reads from", from.filter(Boolean)], ["read by", to.filter(Boolean)]]);
  }
  d3.select(canvas).call(zoom).on("dblclick.zoom", null);
  canvas.addEventListener("mousemove", (e) => {
    const node = at(e);
    if (node !== over) { over = node; redraw(); }
    tell(e, node ? label(node) + "\n" + seconds(node.s) + ", " + percent(node.s, root.s) + (node.data.split ? "\n" + node.data.split + "  " + node.data.specs : "") : "");
  });
  canvas.addEventListener("mouseleave", (e) => { over = null; tell(e, ""); redraw(); });
  canvas.addEventListener("click", (e) => {
    const node = at(e);
    if (!node) return;
    const box = canvas.getBoundingClientRect(), left = Math.max(0, view.applyX(node.x0 * box.width));
    if (node.children.length && e.clientX - box.left - left < 18) { node.closed = !node.closed; redraw(); return; }
    goTo(node);
  });
  detail(root);

  // --- timeline ------------------------------------------------------------------------------------------------
  if (plan.timeline) {
    const LEFT = 92, every = [["as simulated", plan.timeline], ...(plan.measured || [])];
    let T, rows, tops, tall;
    function take(i) {
      T = every[i][1];
      rows = T.workers.map((events, w) => ["worker " + w, events, T.bubbles[w] + " idle"])
        .concat(T.links.filter(([, events]) => events.length).map(([name, events]) => [name, events, ""]));
      tops = [0];
      rows.forEach((row, r) => tops.push(tops[r] + (r < T.workers.length ? 20 : 11)));
      tall = tops[rows.length] + 24;
      what.textContent = "a step takes " + T.text + (T.cut ? "; only its first events are shown" : "");
      what.dataset.makespan = T.makespan_s;
      redraw();
    }
    const rowAt = (y) => d3.bisectRight(tops, y) - 1, what = el("span", {});
    const lines = el("canvas", { tabindex: 0, "aria-label": "what each worker runs when" });
    section("timeline", "Timeline",
      el("div", { class: "controls" }, every.length > 1 ? select("which", every.map(([name], i) => [i, name]), (v) => take(Number(v))) : "as simulated", what,
        el("span", {}, "wheel zooms, drag moves, double click shows all")),
      el("div", { class: "view" }, lines),
      el("div", { class: "legend" }, [["F", "forward"], ["B", "backward"], ["I", "input gradient"], ["W", "weight gradient"], ["g", "gradients reduced"],
        ["u", "update"], ["r", "resharded"]].map(([k, text]) => el("span", {}, el("i", { style: { background: TASK[k] } }), text))));
    take(0);
    let window_ = d3.zoomIdentity;
    const zoomT = d3.zoom().scaleExtent([1, 1e4]).on("zoom", () => { window_ = d3.event.transform; redraw(); });
    d3.select(lines).call(zoomT).on("dblclick.zoom", () => d3.select(lines).call(zoomT.transform, d3.zoomIdentity));
    const longest = d3.max(every, ([, t]) => t.makespan_s);
    const scale = () => window_.rescaleX(d3.scaleLinear().domain([0, longest]).range([LEFT, lines.clientWidth - 8]));
    redraws.push(() => {
      const [c, width] = sized(lines, tall), x = scale(), fg = css("--fg"), dim = css("--dim"), line = css("--line");
      c.clearRect(0, 0, width, tall);
      c.font = "11px system-ui, sans-serif"; c.textBaseline = "middle";
      rows.forEach(([name, events], r) => {
        const y = tops[r], H = tops[r + 1] - y, thin = r >= T.workers.length;
        c.save(); c.beginPath(); c.rect(LEFT, y, width - LEFT, H); c.clip();
        let last = -1;
        for (const [start, stop, kind] of events) {
          const x0 = x(start), x1 = x(stop);
          if (x1 < LEFT || x0 > width || x1 - last < 0.3) continue;
          last = x1;
          const text = T.names[kind];
          c.fillStyle = thin ? "#8f9aa6" : TASK[text[0]] || "#8f9aa6";
          c.fillRect(x0, y + 2, Math.max(0.5, x1 - x0 - 0.5), H - 4);
          if (!thin && x1 - x0 > 28) { c.fillStyle = "#10151b"; c.fillText(text, Math.max(x0, LEFT) + 3, y + H / 2, x1 - x0 - 5); }
        }
        c.restore();
        c.fillStyle = thin ? dim : fg; c.font = (thin ? 9 : 11) + "px system-ui, sans-serif"; c.fillText(name, 6, y + H / 2); c.font = "11px system-ui, sans-serif";
        c.fillStyle = line; c.fillRect(0, y + H - 0.5, width, 0.5);
      });
      c.fillStyle = dim;
      for (const t of x.ticks(8)) { const at = x(t); if (at >= LEFT) { c.fillRect(at, 0, 0.5, tall - 18); c.fillText(seconds(t), at + 3, tall - 9); } }
    });
    lines.addEventListener("mousemove", (e) => {
      const box = lines.getBoundingClientRect(), t = scale().invert(e.clientX - box.left), r = rowAt(e.clientY - box.top);
      const row = rows[r], found = row && row[1].find(([start, stop]) => start <= t && t < stop);
      tell(e, found ? T.names[found[2]] + " on " + row[0] + "\n" + seconds(found[0]) + " to " + seconds(found[1]) + ", " + seconds(found[1] - found[0]) : row ? row[0] + (row[2] ? ", " + row[2] : "") : "");
    });
    lines.addEventListener("mouseleave", (e) => tell(e, ""));
  }

  // --- memory --------------------------------------------------------------------------------------------------
  (() => {
    const which = select("worker", plan.memory.map((w, i) => [i, (plan.memory.length > 1 ? "worker " + i : "every device") + ": " + w.text]), (v) => show(Number(v)));
    const body = el("div", {}), curves = el("div", {});
    section("memory", "Memory", el("div", { class: "controls" }, which), body, curves);
    function show(i) {
      const w = plan.memory[i];
      body.replaceChildren(
        el("div", { class: "columns" }, el("div", {}, bars(w.kinds, w.peak_bytes, "held")),
          table([{ t: "bytes", n: 1 }, { t: "kind" }, { t: "what", code: 1 }, { t: "count", n: 1 }], w.live.map(([, text, kind, what, count]) => [text, kind, what, count]))));
    }
    show(plan.memory.indexOf(fullest()));
    which.value = String(plan.memory.indexOf(fullest()));
    const over = plan.timeline ? plan.timeline.memory.map((points, w) => ["worker " + w, points]) : plan.live ? [["", plan.live]] : [];
    if (!over.length) return;
    const W = 1100, H = 220, stop = plan.timeline ? plan.timeline.makespan_s : d3.max(plan.live, (p) => p[0]);
    const top = d3.max(plan.memory, (w) => w.peak_bytes);
    const x = d3.scaleLinear().domain([0, stop]).range([70, W - 10]), y = d3.scaleLinear().domain([0, top * 1.05]).range([H - 24, 8]);
    const svg = d3.create("svg").attr("viewBox", "0 0 " + W + " " + H).attr("role", "img").attr("aria-label", "bytes of a device over the step");
    svg.append("g").attr("transform", "translate(0," + (H - 24) + ")").call(d3.axisBottom(x).ticks(8).tickFormat(plan.timeline ? seconds : (t) => "operator " + t));
    svg.append("g").attr("transform", "translate(70,0)").call(d3.axisLeft(y).ticks(5).tickFormat(bytes));
    const line = d3.line().x((p) => x(p[0])).y((p) => y(p[1])).curve(d3.curveStepAfter);
    over.forEach(([name, points], i) => svg.append("path").attr("d", line(points)).attr("fill", "none")
      .attr("stroke", PALETTE[i % PALETTE.length]).attr("stroke-width", 1.2).append("title").text(name));
    curves.append(el("h3", {}, "bytes of a device over the step"), svg.node());
  })();

  // --- arguments, and who holds what ---------------------------------------------------------------------------
  (() => {
    const several = plan.meshes.length > 1, held = el("div", { id: "held" });
    const heads = [{ t: "path", code: 1 }, { t: "role" }, { t: "count", n: 1 }, { t: "type", code: 1 }, ...(several ? [{ t: "stages" }] : []), { t: "sharding", code: 1 }, { t: "a device", n: 1 }];
    const rows = plan.arguments.map((a) => [a.path, a.role, a.count, a.type, ...(several ? [a.stages_text] : []), a.spec, a.device_text]);
    const made = table(heads, rows, (i) => ({ class: "pick", tabindex: 0, "data-argument": plan.arguments[i].path, onclick: () => pick(i), onkeydown: (e) => e.key === "Enter" && pick(i) }));
    section("arguments", "Arguments", made, held);
    const lines = made.querySelectorAll("tbody tr");
    function pick(i) {
      lines.forEach((line, j) => line.classList.toggle("picked", i === j));
      const a = plan.arguments[i], mesh = plan.meshes[a.stages[0] || 0], sizes = mesh.axes.map(([, size]) => size);
      const names = mesh.axes.map(([name]) => name), columns = sizes[sizes.length - 1] || 1;
      const cells = [], parts = new Map(), shown = Math.min(mesh.ids.length, 512);
      for (let d = 0; d < shown; d++) {
        const at = {};
        for (let k = sizes.length - 1, rest = d; k >= 0; k--) { at[names[k]] = rest % sizes[k]; rest = Math.floor(rest / sizes[k]); }
        const slices = a.shape.map((n, dim) => {
          let index = 0, count = 1;
          for (const axis of a.dims[dim] || []) { const size = sizes[names.indexOf(axis)]; index = index * size + at[axis]; count *= size; }
          return count === 1 ? ":" : (index * n) / count + ":" + ((index + 1) * n) / count;
        });
        const key = slices.join(", ");
        if (!parts.has(key)) parts.set(key, parts.size);
        cells.push([mesh.ids[d], key, names.map((n) => n + "=" + at[n]).join(" ")]);
      }
      const shade = d3.scaleSequential(d3.interpolateRainbow).domain([0, Math.max(2, parts.size)]);
      const copies = shown / parts.size;
      held.replaceChildren(
        el("h3", {}, "who holds which part of " + a.path),
        el("p", { class: "dim" }, parts.size + " part" + (parts.size > 1 ? "s" : "") + ", " + copies + (copies === 1 ? " copy" : " copies") + " of each" +
          (a.stages.length > 1 ? ", on every one of its stages" : "") + (shown < mesh.ids.length ? "; the first " + shown + " of " + mesh.ids.length + " devices" : "")),
        el("div", { class: "mesh", style: { gridTemplateColumns: "repeat(" + Math.min(columns, 16) + ", minmax(64px, 1fr))" } },
          cells.map(([id, key, where]) => el("div", { title: where, "data-part": key, style: { background: d3.color(shade(parts.get(key))).brighter(0.6) } }, id + " [" + key + "]"))));
    }
    if (plan.arguments.length) pick(0);
  })();

  // --- collectives, considered, verified, notes ----------------------------------------------------------------
  (() => {
    const sums = new Map();
    for (const [, kind, axes, runs, size, s] of plan.collectives) {
      const key = kind + " over " + axes, found = sums.get(key) || [key, 0, 0];
      found[1] += s; found[2] += runs * size;
      sums.set(key, found);
    }
    const rows = [...sums.values()].sort((a, b) => b[1] - a[1]);
    section("collectives", "Collectives",
      rows.length ? el("div", {}, bars(rows.map(([key, s, b]) => [key + ", " + bytes(b), s, seconds(s)]), plan.step_s, "collective", rows[0][1])) : el("p", {}, "none"),
      el("h3", {}, "each, the dearest first"),
      table([{ t: "time", n: 1 }, { t: "kind" }, { t: "over" }, { t: "runs × bytes", n: 1 }, { t: "beside compute" }, { t: "for", code: 1 }, { t: "in" }],
        plan.collectives.slice(0, 400).map(([where, kind, axes, runs, size, , text, beside, what]) => [text, kind, axes, runs + " × " + bytes(size), beside ? "may" : "", what, where])));
  })();
  section("chosen", "What lost",
    plan.considered.length ? table([{ t: "plan" }, { t: "a step", n: 1 }, { t: "against this", n: 1 }, { t: "" }],
      [["this plan", seconds(plan.step_s), "", ""], ...plan.considered.map(([name, , text, fits, against]) => [name, text, against, fits ? "" : "does not fit"])]) : el("p", {}, "nothing else was looked at"));
  if (plan.verified) section("verified", "Planned against compiled",
    table([{ t: "" }, { t: "planned", n: 1 }, { t: "compiled", n: 1 }, { t: "apart", n: 1 }, { t: "" }],
      plan.verified.map(([name, planned, compiled, apart, fine]) => [name, planned, compiled, apart, fine ? "" : el("span", { class: "bad" }, "past its tolerance")])));
  if (plan.bands.length || plan.notes.length) section("notes", "Notes",
    el("ul", {}, plan.bands.map(([name, low, high, runs]) => el("li", {}, "published steps on " + name + " took " + low.toFixed(2) + " to " + high.toFixed(2) + " times what is predicted of them (10th to 90th percentile of " + runs + " runs)")),
      plan.notes.map((note) => el("li", {}, note))));

  // --- search, keys, theme -------------------------------------------------------------------------------------
  const search = document.getElementById("search"), hits = document.getElementById("hits");
  let found = [], current = -1;
  function look() {
    const text = search.value.trim().toLowerCase();
    found = []; current = -1;
    for (const n of nodes) {
      n.hit = text !== "" && (n.data.name.toLowerCase().includes(text) || (!n.children.length && n.parent && (n.data.name + " (" + n.parent.data.name + ")").toLowerCase().includes(text)));
      if (n.hit) found.push(n);
    }
    let rows = 0;
    document.querySelectorAll("#arguments tbody tr").forEach((line) => {
      const keep = !text || line.dataset.argument.toLowerCase().includes(text);
      line.hidden = !keep && found.length === 0;
      if (text && keep) rows++;
    });
    if (text && rows) document.querySelectorAll("#arguments tbody tr").forEach((line) => { line.hidden = !line.dataset.argument.toLowerCase().includes(text); });
    hits.textContent = text ? found.length + " in the model, " + rows + " arguments" : "";
    redraw();
  }
  search.addEventListener("input", look);
  search.addEventListener("keydown", (e) => {
    if (e.key === "Enter" && !found.length) document.querySelector("#arguments tbody tr:not([hidden])")?.scrollIntoView({ block: "center" });
    if (e.key === "Enter" && found.length) { current = (current + (e.shiftKey ? found.length - 1 : 1)) % found.length; goTo(found[current]); document.getElementById("model").scrollIntoView(); }
    if (e.key === "Escape") { search.value = ""; look(); search.blur(); }
  });
  function theme() {
    const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    redraw();
  }
  document.getElementById("theme").addEventListener("click", theme);
  document.addEventListener("keydown", (e) => {
    if (e.target.matches("input, select") || e.ctrlKey || e.metaKey || e.altKey) return;
    const links = nav.querySelectorAll("a");
    if (e.key === "/") { e.preventDefault(); search.focus(); }
    else if (e.key === "t") theme();
    else if (e.key === "Escape") goTo(root);
    else if (e.key === "Backspace" && focus.parent) goTo(focus.parent);
    else if (/^[1-9]$/.test(e.key) && links[e.key - 1]) links[e.key - 1].click();
    else if (e.target === canvas && /^Arrow(Left|Right|Up|Down)$/.test(e.key)) {
      e.preventDefault();
      const node = chosen || root, peers = node.parent ? node.parent.children : [root], i = peers.indexOf(node);
      const next = { ArrowUp: node.parent, ArrowDown: node.children[0], ArrowLeft: peers[i - 1], ArrowRight: peers[i + 1] }[e.key];
      if (next) goTo(next);
    }
  });
  addEventListener("resize", redraw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  const watch = new IntersectionObserver((entries) => entries.forEach((entry) => {
    if (entry.isIntersecting) nav.querySelectorAll("a").forEach((a) => a.classList.toggle("here", a.hash === "#" + entry.target.id));
  }), { rootMargin: "-20% 0px -70% 0px" });
  main.querySelectorAll("section").forEach((s) => watch.observe(s));
  redraw();
  document.documentElement.dataset.ready = "yes";
})();
