// Tokens, FLOPs and memory of a run: the formulas of estimate.py. `state` has the fields of settings.Run and `routes`.
"use strict";

const GIB = 2 ** 30;
const EVERY_STEP = ["none", "selective", "full"];
const CHECKPOINTING = [...EVERY_STEP, "dense"];

// The state in dense steps and in routed ones; they differ if dense steps alone are checkpointed.
function sidesOf(state) {
  if (state.checkpointing !== "dense") return [state, state];
  return ["full", "none"].map((checkpointing) => ({ ...state, checkpointing }));
}

// What settings.py allows of the base, the default first.
function precisionsOf(model, way) {
  const found = way === "full" ? DATA.full_precisions : Object.keys(DATA.precisions);
  return found.filter((name) => !(model.one_dtype && name === "fp32"));
}

function depthOf(model) {
  return model.stacks.reduce((sum, stack) => sum + stack.layers, 0);
}

function layerKinds(model) {
  return model.stacks.flatMap((stack) => Array(stack.layers).fill(stack));
}

function gridOf(model, state) {
  const [frames, rows, columns] = model.patch;
  const latentFrames = 1 + Math.floor((state.frames - 1) / model.frame_factor) + state.image_layers;
  return {
    frames: Math.ceil(latentFrames / frames),
    rows: Math.floor(state.height / (model.factor * rows)),
    columns: Math.floor(state.width / (model.factor * columns)),
  };
}

// The index of a layer from the start; negative ones count from the end.
function layerIndex(index, depth) {
  return index < 0 ? index + depth : index;
}

// tokens - int((tokens - always) * ratio): routing/budget.py
function keptCount(tokens, ratio, always) {
  return tokens - Math.trunc((tokens - always) * ratio);
}

function flopsOf(layers, state, image, recomputed) {
  const { forward, backward, again } = layers.flops[state.way];
  const parts = [forward, backward, recomputed && state.checkpointing === "full" ? (again ?? forward) : []];
  return state.batch * parts.reduce((total, part) => total + polynomial(part, image, state.text), 0);
}

// In image and text tokens; the last terms may be left out.
function polynomial(coefficients, image, text) {
  const terms = [1, image, text, image * image, image * text, text * text];
  return coefficients.reduce((total, value, i) => total + value * terms[i], 0);
}

function savedBytes(counts, state, image) {
  const each = counts.sample + counts.image * image + counts.text * state.text;
  return counts.constant + state.batch * each + (counts.square ?? 0) * pairsOf(state, image);
}

// Pairs of tokens that attention scores, in the whole batch.
function pairsOf(state, image) {
  return state.batch * (image + state.text) ** 2;
}

function fixedBytes(model, state) {
  let weights = 0;
  for (const [name, size] of Object.entries(DATA.precisions[state.precision])) weights += size * model.weights[name];
  const full = state.way === "full";
  const trained = full ? model.weights.all : state.rank * model.lora[state.way];
  const size = full ? DATA.precisions[state.precision].all : 4;
  const optimizer = DATA.optimizers[state.optimizer];
  const held = {
    weights,
    adapter: full ? 0 : trained * size,
    optimizer: trained * ("bytes" in optimizer ? optimizer.bytes : optimizer.moments * size),
    average: state.ema ? trained * 4 : 0,
  };
  return { held, gradients: trained * size };
}

function activationBytes(model, state, counts) {
  const total = Math.max(...counts);
  let saved = savedBytes(model.outside.saved[state.way][state.checkpointing], state, total);
  let largest = 0;
  layerKinds(model).forEach((kind, layer) => {
    const kept = savedBytes(kind.saved[state.way][state.checkpointing], state, counts[layer]);
    const whole = savedBytes(kind.saved[state.way].none, state, counts[layer]);
    saved += kept;
    const width = state.checkpointing === "none" ? 0 : (kind.adapted[state.way] ?? 0);
    const apart = DATA.apart_bytes * state.batch * counts[layer] * width;
    const bias = kind.saved[state.way].none.square ? DATA.bias_bytes * pairsOf(state, counts[layer]) : 0;
    largest = Math.max(largest, whole - kept + DATA.working.layer * whole + apart + bias); // and its gradients
  });
  return { saved, working: DATA.working.bytes + largest };
}

// Segments that weights leave unused, and, trained as a whole, gradients, moments and average too.
function spareBytes(model, state) {
  const copies = state.way === "full" ? 2 + (DATA.optimizers[state.optimizer].moments ?? 0) + Number(state.ema) : 1;
  return copies * model.weights[DATA.spare[state.precision]];
}

// At the peak: when backward begins, or at its end, where gradients have replaced activations.
function memoryOf(model, state, dense, routed) {
  const { held, gradients } = fixedBytes(model, state);
  const sides = sidesOf(state);
  const [whole, part] = [dense, routed].map((counts, side) => activationBytes(model, sides[side], counts));
  const spare = spareBytes(model, state);
  const made = ({ saved, working }, more) => ({
    ...held,
    activations: saved,
    working: working + (state.graphs ? DATA.working.graphs * saved + more + spare : 0),
    gradients: Math.max(0, gradients - saved - working),
  });
  const more = DATA.working.other_graphs * Math.max(0, whole.saved - part.saved);
  return { dense: made(whole, more), routed: made(part, 0) };
}

function sum(parts) {
  return Object.values(parts).reduce((total, size) => total + size, 0);
}

function smallestCard(gib) {
  return DATA.cards.find((card) => gib <= card - DATA.reserved) ?? null;
}

function estimate(state) {
  const model = DATA.models[state.model];
  const depth = depthOf(model);
  const grid = gridOf(model, state);
  const image = grid.frames * grid.rows * grid.columns;
  const reference = state.references * grid.rows * grid.columns;
  const padding = state.width === state.height ? 0 : Math.max(0, model.padded - image);
  const total = image + reference + padding;
  const always = padding + (state.reference_tokens === "keep" ? reference : 0);
  const dense = Array(depth).fill(total);
  const routed = [...dense];
  for (const route of state.routes) {
    const kept = keptCount(total, route.selection_ratio, always);
    routed.fill(kept, layerIndex(route.start_layer_idx, depth), layerIndex(route.end_layer_idx, depth) + 1);
  }
  const outside = flopsOf(model.outside, state, total, false);
  const kinds = layerKinds(model);
  const [denseSide, routedSide] = sidesOf(state);
  const layerFlops = (side, counts) => counts.map((count, layer) => flopsOf(kinds[layer], side, count, true));
  const add = (values) => values.reduce((a, b) => a + b, 0);
  const routedFlops = layerFlops(routedSide, routed);
  const flops = { dense: add(layerFlops(denseSide, dense)) + outside, routed: add(routedFlops) + outside };
  const memory = memoryOf(model, state, dense, routed);
  return {
    depth,
    grid,
    image,
    reference,
    padding,
    total,
    always,
    layers: routed,
    layerFlops: routedFlops,
    flops,
    speedup: flops.dense / flops.routed,
    memory,
    gib: { dense: sum(memory.dense) / GIB, routed: sum(memory.routed) / GIB },
    warnings: warningsOf(state, depth, image),
  };
}

function choicesOf(state) {
  const allowed = precisionsOf(DATA.models[state.model], state.way);
  const shown = (state.way === "full" ? ["fp32", "bf16"] : ["bf16", "fp8", "nf4"]).filter((one) => allowed.includes(one));
  return [...new Set([state.precision, ...shown])].flatMap((precision) =>
    [...new Set([...EVERY_STEP, state.checkpointing])].map((checkpointing) => {
      const { gib } = estimate({ ...state, precision, checkpointing });
      const cards = { dense: smallestCard(gib.dense), routed: smallestCard(gib.routed) };
      return { precision, checkpointing, gib, cards };
    }),
  );
}

// routing/risks.py decides and words them; the sentences come from there.
function warningsOf(state, depth, image) {
  const { risks } = DATA;
  const routes = state.routes
    .map((route) => ({
      ratio: route.selection_ratio,
      start: layerIndex(route.start_layer_idx, depth),
      end: layerIndex(route.end_layer_idx, depth),
    }))
    .sort((a, b) => a.start - b.start);
  const named = (route) => `route ${route.start}..${route.end} at ${pythonFloat(route.ratio)}`;
  const said = (sentence, route) =>
    sentence
      .replaceAll("{route}", named(route))
      .replaceAll("{depth}", depth)
      .replaceAll("{kept}", image - Math.trunc(image * route.ratio))
      .replaceAll("{tokens}", image);
  const found = [];
  for (const route of routes) {
    if (route.start < risks.earliest_start) found.push(said(risks.first, route));
    if (route.end === depth - 1) found.push(said(risks.last, route));
  }
  const left = routes.reduce((sum, route) => sum - (route.end - route.start + 1), depth);
  if (left < risks.fewest_layers) {
    const every = routes.map(named).join(" and ");
    found.push(said(risks.passage.replaceAll("{route}", every).replaceAll("{left}", left), routes[0]));
  }
  for (const route of routes) {
    if (route.ratio > risks.high_ratio && image <= risks.few_tokens) found.push(said(risks.few, route));
  }
  for (const route of routes) {
    if (state.way !== "full" && route.ratio > risks.adapter_ratio) found.push(said(risks.adapter, route));
  }
  return found;
}

// A number as Python prints a float: 0.5, and 0.0 for 0.
function pythonFloat(value) {
  return Number.isInteger(value) ? value.toFixed(1) : String(value);
}
