// What the page shows of the state: figures, layers, memory.
"use strict";

const PARTS = ["weights", "adapter", "optimizer", "average", "activations", "working", "gradients"];

function show() {
  const found = estimate(state);
  showControls(found);
  showFigures(found);
  drawLayers(found);
  drawPictures(found);
  showMemory(found);
  $("warnings-section").hidden = !found.warnings.length;
  $("warnings").replaceChildren(...found.warnings.map((text) => element("li", { textContent: text })));
  $("config").textContent = JSON.stringify({ tread_config: configOf(state, found.depth) }, null, 2);
  $("command").textContent = commandOf(state, found.depth);
  $("link").textContent = `${location.href.split("#")[0]}#${toHash(state)}`;
}

function showControls(found) {
  const model = DATA.models[state.model];
  const depth = found.depth;
  const route = state.routes[chosen];
  options($("way"), [...Object.keys(model.lora), "full"], (way) => WAYS[way]);
  options($("precision"), precisionsOf(model, state.way));
  const selects = ["model", "way", "precision", "optimizer", "checkpointing", "selector"];
  for (const name of selects) $(name).value = state[name];
  for (const name of ["graphs", "ema"]) $(name).checked = state[name];
  const alike = Object.keys(DATA.presets).find((name) => samePlace(DATA.presets[name], route, depth));
  $("preset").value = (state.routes.length === 1 && alike) || "";
  const ratio = state.width / state.height;
  $("aspect").value = Object.keys(ASPECTS).find((name) => Math.abs(ASPECTS[name] / ratio - 1) < 0.04) ?? "";
  const step = multipleOf(model);
  const largest = Math.floor((model.video ? 1280 : model.pretrained ? 2048 : 1024) / step);
  const side = Math.round(Math.sqrt(state.width * state.height) / step);
  const smallest = Math.max(1, Math.ceil(128 / step));
  slide("resolution", side, `${state.width} × ${state.height} px`, { min: smallest, max: largest });
  const frameStep = frameStepOf(model);
  slide("frames", state.frames, state.frames, { step: frameStep, max: Math.max(1 + 40 * frameStep, model.frames) });
  slide("references", state.references, state.references);
  slide("image_layers", state.image_layers, state.image_layers);
  slide("text", state.text, state.text, { max: Math.max(512, model.text) });
  slide("batch", state.batch, state.batch, { max: model.pretrained ? 32 : 512 });
  slide("rank", state.rank, state.rank);
  slide("ratio", Math.round(route.selection_ratio * 100), `${percent(route.selection_ratio)}`);
  slide("start", route.start_layer_idx, route.start_layer_idx, { max: depth - 1 });
  slide("end", route.end_layer_idx, `${route.end_layer_idx} (${route.end_layer_idx - depth})`, { max: depth - 1 });
  slide("importance", Math.round(state.importance * 100), state.importance);
  $("rank-row").hidden = state.way === "full";
  $("frames-row").hidden = !model.video;
  $("references-row").hidden = !model.references;
  $("image_layers-row").hidden = !model.image_layers;
  $("text-row").hidden = !model.text;
  $("batch-row").hidden = model.one_sample;
  $("importance-row").hidden = state.selector !== "l1";
  showWindows(depth);
}

function slide(id, value, text, limits = {}) {
  Object.assign($(id), limits);
  $(id).value = value;
  $(`${id}-out`).textContent = text;
  $(id).setAttribute("aria-valuetext", text);
}

function samePlace(preset, route, depth) {
  return (
    preset.selection_ratio === route.selection_ratio &&
    layerIndex(preset.start_layer_idx, depth) === route.start_layer_idx &&
    layerIndex(preset.end_layer_idx, depth) === route.end_layer_idx
  );
}

function showWindows(depth) {
  const buttons = state.routes.map((route, i) =>
    button(`${route.start_layer_idx}–${route.end_layer_idx}`, () => choose(i, state.routes), i === chosen, `Window ${i + 1}`),
  );
  const last = state.routes.at(-1).end_layer_idx;
  if (last < depth - 3) {
    const more = { selection_ratio: 0.5, start_layer_idx: last + 2, end_layer_idx: depth - 2 };
    const routes = [...state.routes, more];
    buttons.push(button("add", () => choose(state.routes.length, routes), false, "Add a window"));
  }
  if (state.routes.length > 1) {
    const others = state.routes.filter((_, i) => i !== chosen);
    buttons.push(button("remove", () => choose(0, others), false, "Remove this window"));
  }
  $("windows").replaceChildren(...buttons);
}

function choose(index, routes) {
  chosen = index;
  update({ ...state, routes });
}

function button(text, act, pressed, label) {
  const made = element("button", { type: "button", textContent: text, onclick: act });
  made.setAttribute("aria-pressed", pressed);
  made.setAttribute("aria-label", `${label}: ${text}`);
  return made;
}

function showFigures(found) {
  const { gib } = found;
  const card = smallestCard(gib.routed);
  $("speedup").textContent = `${found.speedup.toFixed(2)}×`;
  $("flops").textContent = `${teras(found.flops.dense)} to ${teras(found.flops.routed)} TFLOPs a step`;
  $("memory").textContent = `${gib.routed.toFixed(1)} GiB`;
  const fits = card ? `fits a ${card} GB GPU` : `more than ${DATA.cards.at(-1)} GB`;
  $("memory-dense").textContent = `${gib.dense.toFixed(1)} dense; ${fits}`;
  const kept = found.layers[state.routes[chosen].start_layer_idx];
  $("tokens").textContent = whole(kept);
  const parts = [whole(found.image)];
  if (found.reference) parts.push(`${whole(found.reference)} of ${state.image_layers ? "the given image" : "references"}`);
  if (found.padding) parts.push(`${whole(found.padding)} of padding`);
  if (state.text) parts.push(`${whole(state.text)} of text`);
  $("tokens-all").textContent = `of ${parts.join(" + ")}`;
}

function drawLayers(found) {
  const svg = $("layers");
  const width = 1000;
  const height = 100;
  const each = width / found.depth;
  const gap = Math.min(4, each * 0.2);
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const bars = found.layers.flatMap((tokens, layer) => {
    const tall = (height * tokens) / found.total;
    const x = layer * each + gap / 2;
    const rest = rectangle(x, 0, each - gap, height - tall, "ghost");
    const bar = rectangle(x, height - tall, each - gap, tall, tokens < found.total ? "bar routed" : "bar");
    const title = svgElement("title");
    title.textContent = `layer ${layer}: ${whole(tokens)} tokens, ${teras(found.layerFlops[layer], 3)} TFLOPs`;
    bar.append(title);
    return [rest, bar];
  });
  svg.replaceChildren(...bars);
  const windows = state.routes.map(({ start_layer_idx: start, end_layer_idx: end }) => {
    return `layers ${start} to ${end} see ${whole(found.layers[start])} tokens`;
  });
  const text = `${found.depth} layers; ${windows.join(", ")}, the others all ${whole(found.total)}.`;
  $("layers-text").textContent = text;
  svg.setAttribute("aria-label", text);
}

function rectangle(x, y, width, height, name) {
  const made = svgElement("rect");
  for (const [key, value] of Object.entries({ x, y, width, height, class: name })) made.setAttribute(key, value);
  return made;
}

function showMemory(found) {
  const most = Math.max(found.gib.dense, found.gib.routed) * 1.02;
  const used = PARTS.filter((part) => Math.max(found.memory.dense[part], found.memory.routed[part]) > 0.005 * GIB);
  const rows = ["routed", "dense"].map((name) => {
    const row = element("div", { className: "bar-row" });
    const label = element("div", { className: "name" });
    const size = `${found.gib[name].toFixed(1)} GiB`;
    label.append(element("span", { textContent: name }), element("span", { textContent: size }));
    const stack = element("div", { className: "stack" });
    for (const part of used) {
      const size = found.memory[name][part] / GIB;
      const span = element("span", { className: `part-${part}`, title: `${part}: ${size.toFixed(2)} GiB` });
      span.style.width = `${(100 * size) / most}%`;
      stack.append(span);
    }
    row.append(label, stack);
    return row;
  });
  const scale = element("div", { className: "scale" });
  scale.setAttribute("aria-hidden", "true");
  let last = -1000;
  const apart = 100 * (52 / Math.max(200, $("bars").clientWidth)); // the width of a label in percent
  for (const card of DATA.cards) {
    const at = (100 * (card - DATA.reserved)) / most;
    if (at > 100 - apart || at - last < apart) continue;
    last = at;
    const tick = element("i", { textContent: `${card} GB` });
    tick.style.left = `${at}%`;
    scale.append(tick);
  }
  $("bars").replaceChildren(...rows, scale);
  $("legend").replaceChildren(
    ...used.map((part) => {
      const item = element("li");
      const [routed, dense] = ["routed", "dense"].map((name) => (found.memory[name][part] / GIB).toFixed(1));
      const size = routed === dense ? routed : `${routed} routed, ${dense} dense`;
      item.append(element("i", { className: `part-${part}` }), `${part} ${size} GiB`);
      return item;
    }),
  );
  showFits();
}

function showFits() {
  const head = element("tr");
  const columns = ["base", "checkpointing", "routed", "dense"];
  head.append(...columns.map((text) => element("th", { textContent: text, scope: "col" })));
  $("fits").tHead.replaceChildren(head);
  const cell = (gib, card) => `${card ? `${card} GB` : `over ${DATA.cards.at(-1)} GB`} (${gib.toFixed(1)})`;
  const rows = choicesOf(state).map((choice) => {
    const row = element("tr");
    row.append(
      element("td", { textContent: choice.precision }),
      element("td", { textContent: choice.checkpointing }),
      element("td", { textContent: cell(choice.gib.routed, choice.cards.routed) }),
      element("td", { textContent: cell(choice.gib.dense, choice.cards.dense) }),
    );
    if (choice.precision === state.precision && choice.checkpointing === state.checkpointing) row.className = "chosen";
    return row;
  });
  $("fits").tBodies[0].replaceChildren(...rows);
}

function element(tag, fields = {}) {
  return Object.assign(document.createElement(tag), fields);
}

function svgElement(tag) {
  return document.createElementNS("http://www.w3.org/2000/svg", tag);
}

const whole = (value) => Math.round(value).toLocaleString("en");
const teras = (flops, digits = 1) =>
  (flops / 1e12).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (fraction) => `${Number((fraction * 100).toFixed(1))} %`;
