// The panel's view. It draws model.get("state") and sends what its buttons mean; text is set as text, never as HTML.

const SPAN = 60; // seconds of history
const HUES = 8;

export default {
  render({ model, el }) {
    const panel = build(el);
    const shown = { state: model.get("state"), skew: 0 };

    const draw = () => {
      shown.state = model.get("state");
      if (shown.state.now) shown.skew = shown.state.now - Date.now() / 1000;
      drawPanel(panel, shown.state, model);
      drawHistory(panel.chart, shown.state, Date.now() / 1000 + shown.skew);
    };
    const scroll = () => {
      // The line moves on by itself: an idle cluster sends nothing.
      if (panel.chart.moving && el.isConnected) drawHistory(panel.chart, shown.state, Date.now() / 1000 + shown.skew);
    };

    model.on("change:state", draw);
    const timer = setInterval(scroll, 500);
    const resized = new ResizeObserver(() => drawHistory(panel.chart, shown.state, Date.now() / 1000 + shown.skew));
    resized.observe(panel.chart.box);
    const controls = embed(model, panel.controls);
    const hiding = hideTable(model.get("mark"));
    draw();
    model.send({ do: "shown" });

    return async () => {
      clearInterval(timer);
      resized.disconnect();
      hiding.remove();
      model.off("change:state", draw);
      model.send({ do: "hidden" });
      (await controls)?.remove();
    };
  },
};

// The table below the view is for pages without live views (nbconvert's, GitHub's); while this view lives it is hidden.
function hideTable(mark) {
  const style = make("style");
  const hide = "{ display: none !important; }";
  style.textContent = `.mlcr-static-${mark} ${hide}\n.jp-OutputArea-child:has(.mlcr-static-${mark}) ${hide}`;
  document.head.append(style);
  return style;
}

// Building blocks

function make(tag, className, ...children) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function svg(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function button(text, onclick) {
  const node = make("button", "mlcr-button", text);
  node.type = "button";
  node.onclick = onclick;
  return node;
}

const number = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US"));
const seconds = (value) => (value >= 1 ? `${value.toFixed(2)} s` : `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`);
const hue = (names, name) => `mlcr-hue-${Math.max(0, names.indexOf(name)) % HUES}`;

// The widgets for the policy live in the kernel's manager; they are attached as Lab attaches its own.
async function embed(model, slot) {
  const reference = model.get("controls");
  const id = typeof reference === "string" ? reference.replace("IPY_MODEL_", "") : reference?.model_id;
  if (!id) return null;
  const view = await model.widget_manager.create_view(await model.widget_manager.get_model(id));
  const widget = view.luminoWidget ?? view.pWidget;
  if (widget?.constructor.attach && slot.isConnected) widget.constructor.attach(widget, slot);
  else slot.append(view.el);
  return view;
}

// The skeleton, built once per view

function build(el) {
  const root = make("section", "mlcr");
  root.setAttribute("aria-label", "mlcrouter_nb: cluster panel");
  root.dataset.lmSuppressShortcuts = "true"; // keys that are typed here are no shortcuts of Lab
  const panel = { root };

  panel.phase = make("span", "mlcr-pill mlcr-phase");
  panel.phase.setAttribute("role", "status");
  panel.model = make("span", "mlcr-pill");
  panel.url = make("span", "mlcr-pill mlcr-url");
  panel.actions = make("span", "mlcr-actions");
  const head = make("header", "mlcr-head", make("span", "mlcr-title", "mlcrouter_nb"), panel.phase, panel.model, panel.url, panel.actions);

  panel.error = make("p", "mlcr-error");
  panel.error.setAttribute("role", "alert");
  panel.boot = make("form", "mlcr-card mlcr-boot");
  panel.engines = make("div", "mlcr-engines");

  panel.controls = make("div", "mlcr-slot");
  panel.doc = make("p", "mlcr-muted mlcr-note");
  panel.chart = buildChart();
  panel.middle = make("div", "mlcr-middle", titled("Policy", make("div", "mlcr-card", panel.controls, panel.doc)), titled("Requests in flight", panel.chart.box));

  panel.streams = make("ol", "mlcr-card mlcr-streams");
  panel.streams.setAttribute("aria-label", "Requests");
  panel.live = titled("Live streams", panel.streams);

  root.append(head, panel.error, panel.boot, panel.engines, panel.middle, panel.live);
  el.append(root);
  return panel;
}

function titled(title, body) {
  return make("div", "mlcr-block", make("h4", "", title), body);
}

function drawPanel(panel, state, model) {
  const { phase } = state;
  const off = phase === "off";
  write(panel.phase, phaseText(state));
  panel.phase.dataset.phase = state.engines.some((engine) => engine.state === "failed") ? "failed" : phase;
  panel.model.hidden = off || !state.model;
  write(panel.model, [state.model, state.kind].filter(Boolean).join(" · "));
  drawUrl(panel.url, off ? "" : state.url);
  drawActions(panel.actions, phase, model);
  panel.error.hidden = !state.error;
  write(panel.error, state.error ?? "");
  panel.boot.hidden = !off;
  if (off) drawBoot(panel.boot, state.boot, model);
  panel.engines.hidden = off;
  if (!off) drawEngines(panel.engines, state.engines);
  write(panel.doc, [state.hint, state.doc].filter(Boolean).join("\n"));
  panel.chart.box.parentElement.hidden = off || phase === "booting";
  panel.live.hidden = off || phase === "booting";
  if (!off) drawStreams(panel.streams, state);
}

function phaseText({ phase, engines }) {
  const failed = engines.filter((engine) => engine.state === "failed").length;
  if (phase === "off") return "nothing running";
  if (phase === "booting") {
    const ready = engines.filter((engine) => engine.state === "ready").length;
    return `booting: ${ready} of ${engines.length} engines ready`;
  }
  if (phase === "stopping") return "stopping";
  const up = engines.length - failed;
  return `${up} engine${up === 1 ? "" : "s"} ready${failed ? `, ${failed} dead` : ""}`;
}

function drawUrl(node, url) {
  node.hidden = !url;
  if (node.dataset.url === url) return;
  node.dataset.url = url ?? "";
  const copy = button("copy", async () => {
    await navigator.clipboard?.writeText(url).catch(() => {});
    write(copy, "copied");
    setTimeout(() => write(copy, "copy"), 1500);
  });
  copy.className = "mlcr-link";
  copy.setAttribute("aria-label", `Copy the address of the OpenAI endpoint, ${url}`);
  node.replaceChildren(make("span", "mlcr-address", url ?? ""), copy);
}

function drawActions(node, phase, model) {
  const can = phase === "ready" || phase === "booting";
  if (node.dataset.can === String(can)) return;
  node.dataset.can = String(can);
  const rest = () => {
    if (!can) return node.replaceChildren();
    const stop = button("Stop cluster", () => {
      const yes = button("Stop it", () => {
        model.send({ do: "stop" });
        node.replaceChildren(make("span", "mlcr-muted", "stopping ..."));
      });
      yes.classList.add("mlcr-danger");
      const no = button("Keep it", () => {
        rest();
        node.querySelector("button")?.focus();
      });
      node.replaceChildren(make("span", "mlcr-muted", "Stop?"), yes, no);
      no.focus();
    });
    return node.replaceChildren(stop);
  };
  rest();
}

function drawBoot(form, boot, model) {
  if (form.childElementCount) {
    form.querySelector("button").disabled = false;
    return;
  }
  const name = field("Model", boot?.model ?? "", "a name, or the path of a .gguf file");
  const roles = field("Roles", boot?.roles ?? "1P2D", "1P2D: one prefill and two decode engines; 2: two engines that do both");
  const go = make("button", "mlcr-button mlcr-primary", "Boot");
  go.type = "submit";
  form.onsubmit = (event) => {
    event.preventDefault();
    go.disabled = true;
    setTimeout(() => (go.disabled = false), 3000);
    model.send({ do: "boot", model: name.input.value, roles: roles.input.value });
  };
  form.append(name.label, roles.label, go, make("p", "mlcr-muted", "Boots engines on this machine; %route up does the same."));
}

function field(title, value, hint) {
  const input = make("input");
  input.value = value;
  input.title = hint;
  input.spellcheck = false;
  return { input, label: make("label", "mlcr-field", make("span", "", title), input) };
}

// Engines: prefill on the left, decode on the right; a table above eight

function drawEngines(box, engines) {
  const names = engines.map((engine) => engine.name);
  const key = JSON.stringify(engines.map((engine) => [engine.name, engine.role]));
  if (box.dataset.key !== key) {
    box.dataset.key = key;
    box.cards = new Map();
    if (engines.length > 8) buildTable(box, engines, names);
    else buildCards(box, engines, names);
  }
  for (const engine of engines) drawEngine(box.cards.get(engine.name), engine);
}

function buildCards(box, engines, names) {
  box.className = "mlcr-engines";
  const columns = ["prefill", "decode", ""].map((role) => {
    const column = make("div", "mlcr-column");
    for (const engine of engines.filter((engine) => engine.role === role)) {
      const card = buildCard(engine, names);
      box.cards.set(engine.name, card);
      column.append(card.root);
    }
    return column;
  });
  const used = columns.filter((column) => column.childElementCount);
  box.classList.toggle("mlcr-single", used.length === 1);
  box.replaceChildren(...used);
}

function buildCard(engine, names) {
  const card = { root: make("article", `mlcr-card mlcr-engine ${hue(names, engine.name)}`) };
  card.root.setAttribute("aria-label", `engine ${engine.name}, ${engine.role || "prefill and decode"}`);
  card.state = make("span", "mlcr-state");
  card.port = make("span", "mlcr-muted");
  const name = make("span", "mlcr-name", `${engine.name} ${engine.role || ""}`.trim());
  card.figures = {};
  const figures = make("div", "mlcr-figures");
  for (const [key, title] of [["in_flight", "in flight"], ["waiting", "waiting tokens"], ["prefill", "prefill tok/s"], ["decode", "decode tok/s"]]) {
    card.figures[key] = make("span", "mlcr-number");
    figures.append(make("div", "", make("span", "mlcr-caption", title), card.figures[key]));
  }
  card.pages = make("span", "mlcr-pages");
  card.bar = meter("KV pages in use");
  card.detail = make("pre", "mlcr-detail");
  card.live = make("div", "", figures, make("div", "mlcr-kv", make("span", "mlcr-muted", "KV pages"), card.bar.root, card.pages));
  card.boot = make("div", "mlcr-booting", meterInto(card, "progress", "boot progress"));
  card.root.append(make("div", "mlcr-row", name, card.port, card.state), card.live, card.boot, card.detail);
  return card;
}

function meterInto(card, key, label) {
  card[key] = meter(label);
  return card[key].root;
}

function meter(label) {
  const used = make("i", "mlcr-used");
  const cached = make("i", "mlcr-cached");
  const root = make("div", "mlcr-bar", used, cached);
  root.setAttribute("role", "meter");
  root.setAttribute("aria-label", label);
  root.setAttribute("aria-valuemin", "0");
  return { root, used, cached };
}

function fill(bar, used, cached, total) {
  bar.root.setAttribute("aria-valuemax", total);
  bar.root.setAttribute("aria-valuenow", used + cached);
  bar.used.style.width = `${total ? (100 * used) / total : 0}%`;
  bar.cached.style.width = `${total ? (100 * cached) / total : 0}%`;
}

function drawEngine(card, engine) {
  card.root.dataset.state = engine.state;
  write(card.state, engine.state === "failed" ? "dead" : engine.state);
  if (card.port) write(card.port, engine.port ? `:${engine.port}` : "");
  for (const [key, node] of Object.entries(card.figures)) write(node, number(engine[key]));
  const cached = engine.cached ?? 0;
  const used = Math.max(0, (engine.used ?? 0) - cached);
  write(card.pages, engine.total === null ? "–" : `${number(used)}${cached ? ` + ${number(cached)} cached` : ""} / ${number(engine.total)}`);
  fill(card.bar, used, cached, engine.total ?? 0);
  if (!card.boot) {
    card.root.title = engine.detail; // a row of the table has no room for it
    return;
  }
  const starting = engine.state === "starting";
  card.live.hidden = starting || engine.state === "failed";
  card.boot.hidden = !starting;
  card.boot.classList.toggle("mlcr-unknown", starting && engine.progress === null);
  fill(card.progress, Math.round(100 * (engine.progress ?? 0)), 0, 100);
  card.detail.hidden = !engine.detail;
  write(card.detail, engine.detail);
}

function buildTable(box, engines, names) {
  box.className = "mlcr-card mlcr-table";
  const head = make("tr", "", ...["engine", "state", "in flight", "waiting", "prefill tok/s", "decode tok/s", "KV pages", ""].map((title) => {
    const cell = make("th", "", title);
    cell.scope = "col";
    return cell;
  }));
  const body = make("tbody");
  for (const engine of engines) {
    const card = { root: make("tr", hue(names, engine.name)), state: make("td"), figures: {}, pages: make("td"), bar: meter("KV pages in use") };
    const name = make("th", "mlcr-name", `${engine.name} ${engine.role}`.trim());
    name.scope = "row";
    card.root.append(name, card.state);
    for (const key of ["in_flight", "waiting", "prefill", "decode"]) card.root.append((card.figures[key] = make("td")));
    card.root.append(card.pages, make("td", "mlcr-wide", card.bar.root));
    box.cards.set(engine.name, card);
    body.append(card.root);
  }
  box.replaceChildren(make("table", "", make("thead", "", head), body));
}

// Streams: rows are kept by request, so that a reader's selection survives

function drawStreams(list, state) {
  const names = state.engines.map((engine) => engine.name);
  list.rows ??= new Map();
  const rows = state.streams.map((stream) => {
    const row = list.rows.get(stream.id) ?? buildStream();
    list.rows.set(stream.id, row);
    drawStream(row, stream, names);
    return row.root;
  });
  const ids = new Set(state.streams.map((stream) => stream.id));
  for (const id of list.rows.keys()) if (!ids.has(id)) list.rows.delete(id);
  const tail = [];
  if (state.more > 0) tail.push(make("li", "mlcr-muted", `${state.more} more in flight`));
  if (!rows.length) tail.push(make("li", "mlcr-muted", "No request yet: ask with %%ask, or send one to the address above."));
  const wanted = [...rows, ...tail];
  if (tail.length || wanted.length !== list.childElementCount || wanted.some((node, i) => node !== list.children[i])) list.replaceChildren(...wanted);
}

function buildStream() {
  const row = { route: make("b"), facts: make("span", "mlcr-muted"), parts: make("span", "mlcr-parts"), text: make("p", "mlcr-text") };
  row.parts.setAttribute("role", "img");
  row.root = make("li", "mlcr-stream", make("div", "mlcr-row", row.route, row.parts, row.facts), row.text);
  return row;
}

function drawStream(row, stream, names) {
  const running = stream.state === "running";
  row.root.dataset.state = stream.state;
  drawRoute(row.route, stream.route, names);
  const facts = [];
  facts.push(stream.prompt === null ? `${number(stream.out)} tokens` : `${number(stream.prompt)} + ${number(stream.out)} tokens`);
  if (stream.cached) facts.push(`${number(stream.cached)} cached`);
  if (stream.ttft !== null) facts.push(`TTFT ${seconds(stream.ttft)}`);
  if (stream.itl !== null) facts.push(`${seconds(stream.itl)} per token`);
  if (stream.policy) facts.push(stream.policy);
  if (!running) facts.push(stream.state);
  write(row.facts, facts.join(" · "));
  drawParts(row.parts, stream.parts, names);
  write(row.text, stream.error || stream.text || (running ? "…" : ""));
  row.root.classList.toggle("mlcr-running", running);
}

function drawRoute(node, route, names) {
  if (node.dataset.route === route) return;
  node.dataset.route = route;
  const steps = route ? route.split(" → ") : [];
  node.replaceChildren(...(steps.length ? steps.flatMap((name, i) => [i ? " → " : "", make("span", hue(names, name), name)]) : ["waiting"]));
}

// The prompt from left to right: what was cached, what each engine prefilled
function drawParts(box, parts, names) {
  const key = JSON.stringify(parts);
  if (box.dataset.key === key) return;
  box.dataset.key = key;
  box.hidden = !parts.length;
  const words = parts.map(([engine, tokens]) => `${tokens} ${engine ? `on ${engine}` : "cached"}`);
  box.setAttribute("aria-label", `prefill: ${words.join(", ")}`);
  box.title = `Prompt tokens prefilled: ${words.join(", ")}`;
  box.replaceChildren(...parts.map(([engine, tokens]) => {
    const part = make("i", engine ? hue(names, engine) : "mlcr-part-cached");
    part.style.flexGrow = tokens;
    return part;
  }));
}

// History: a step line per engine, its name at its end

function buildChart() {
  const box = make("div", "mlcr-card mlcr-chart");
  const drawing = svg("svg", { role: "img", preserveAspectRatio: "none" });
  const note = make("p", "mlcr-muted mlcr-note", "A request that holds a prefill and a decode engine counts on both.");
  box.append(drawing, note);
  return { box, drawing, note, moving: false };
}

function drawHistory(chart, state, now) {
  const names = (state.engines ?? []).map((engine) => engine.name);
  const points = (state.history ?? []).filter((point) => point[0] > now - SPAN - 1);
  const width = Math.max(220, chart.box.clientWidth - 24);
  const height = 132;
  const left = 22, right = 30, top = 8, bottom = 20;
  const peak = Math.max(2, ...points.flatMap((point) => point.slice(1)));
  const step = peak <= 4 ? 1 : Math.ceil(peak / 4);
  const most = Math.ceil(peak / step) * step;
  const x = (time) => left + ((width - left - right) * Math.max(0, time - (now - SPAN))) / SPAN;
  const place = (count) => height - bottom - ((height - top - bottom) * count) / most;
  const marks = [];
  for (let count = 0; count <= most; count += step) {
    if (count % (step * Math.ceil(most / step / 4)) && count !== most) continue;
    marks.push(svg("line", { class: "mlcr-grid", x1: left, x2: width - right, y1: place(count), y2: place(count) }));
    marks.push(svg("text", { x: left - 6, y: place(count) + 4, "text-anchor": "end" }, count));
  }
  for (const [text, time, anchor] of [["-60 s", now - 60, "start"], ["-30 s", now - 30, "middle"], ["now", now, "end"]])
    marks.push(svg("text", { x: x(time), y: height - 4, "text-anchor": anchor }, text));
  const ends = [];
  const latest = state.engines ?? [];
  names.forEach((name, i) => {
    const value = latest[i].in_flight ?? 0;
    // Equal counts would hide each other: each line lies a little beside its place.
    const beside = (i - (names.length - 1) / 2) * Math.min(2, 8 / names.length);
    const y = (count) => place(count) + beside;
    let path = "";
    for (const point of points) path += path ? `H${x(point[0]).toFixed(1)}V${y(point[i + 1]).toFixed(1)}` : `M${x(point[0]).toFixed(1)} ${y(point[i + 1]).toFixed(1)}`;
    path = path ? `${path}V${y(value).toFixed(1)}H${x(now).toFixed(1)}` : `M${x(now - SPAN)} ${y(value)}H${x(now)}`;
    marks.push(svg("path", { class: `mlcr-line-path ${hue(names, name)}`, d: path }));
    ends.push({ name, at: y(value) });
  });
  // Names that would overlap are moved apart, downwards from the highest, then up from the ground.
  ends.sort((a, b) => a.at - b.at);
  const gap = Math.min(13, (height - top) / Math.max(1, ends.length));
  ends.forEach((end, i) => (end.at = Math.max(end.at, i ? ends[i - 1].at + gap : top)));
  for (let i = ends.length - 1, floor = height - bottom + 6; i >= 0; floor = ends[i].at - gap, i--) ends[i].at = Math.min(ends[i].at, floor);
  for (const end of ends) marks.push(svg("text", { class: `mlcr-end ${hue(names, end.name)}`, x: width - right + 5, y: end.at + 4 }, end.name));
  chart.drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
  chart.drawing.setAttribute("width", width);
  chart.drawing.setAttribute("height", height);
  chart.drawing.setAttribute("aria-label", `Requests in flight over the last minute; now ${latest.map((engine) => `${engine.in_flight} on ${engine.name}`).join(", ")}`);
  chart.drawing.replaceChildren(...marks);
  chart.note.hidden = !latest.some((engine) => engine.role);
  chart.moving = points.some((point) => point.slice(1).some((count) => count > 0)) || latest.some((engine) => engine.in_flight > 0);
}
