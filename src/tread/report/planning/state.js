// The state of the page: what it opens at, how the address holds it, and what a model allows of it.
"use strict";

const NUMBERS = ["width", "height", "frames", "references", "image_layers", "batch", "text", "rank"];
const SCHEDULE = ["warmup_steps", "cooldown_fraction", "levels", "total_steps"];
const NAMES = ["way", "precision", "optimizer", "checkpointing", "selector", "reference_tokens"];

function startState() {
  const { tread_config: config, ...run } = DATA.start;
  const { routes, selector, reference_tokens, seed, importance = 0.5, schedule = null } = config;
  return { ...run, routes, selector, reference_tokens, seed, importance, schedule };
}

function toHash(s) {
  const fields = { model: s.model };
  for (const name of [...NUMBERS, ...NAMES, "importance", "seed"]) fields[name] = s[name];
  fields.graphs = Number(s.graphs);
  fields.ema = Number(s.ema);
  fields.routes = s.routes.map((r) => [r.selection_ratio, r.start_layer_idx, r.end_layer_idx].join("_")).join("~");
  fields.schedule = s.schedule ? SCHEDULE.map((name) => s.schedule[name] ?? "").join("_") : "";
  return new URLSearchParams(fields).toString();
}

function fromHash(text) {
  const given = new URLSearchParams(text);
  const next = { ...startState() };
  if (given.has("model") && given.get("model") in DATA.models) next.model = given.get("model");
  for (const name of NAMES) if (given.has(name)) next[name] = given.get(name);
  for (const name of [...NUMBERS, "importance", "seed"]) {
    const value = Number(given.get(name));
    if (given.has(name) && Number.isFinite(value) && value >= 0) next[name] = value;
  }
  for (const name of ["graphs", "ema"]) if (given.has(name)) next[name] = given.get(name) === "1";
  if (given.has("routes")) {
    const routes = given.get("routes").split("~").map((text) => text.split("_").map(Number));
    const whole = routes.every((route) => route.length === 3 && route.every(Number.isFinite));
    if (whole) next.routes = routes.map(([ratio, start, end]) => routeOf(ratio, start, end));
  }
  if (given.has("schedule")) next.schedule = scheduleOf(given.get("schedule"));
  return fitted(next);
}

// null where the link has none, or one that the command would refuse
function scheduleOf(text) {
  const values = text.split("_").map((part) => (part === "" ? null : Number(part)));
  const [warmup, cooldown, levels, total] = values;
  const whole = (value, least) => Number.isInteger(value) && value >= least;
  const share = cooldown !== null && cooldown >= 0 && cooldown <= 1;
  const counts = whole(warmup, 0) && whole(levels, 1) && (total === null || whole(total, 1));
  if (values.length !== SCHEDULE.length || !share || !counts) return null;
  return Object.fromEntries(SCHEDULE.map((name, index) => [name, values[index]]));
}

function routeOf(selection_ratio, start_layer_idx, end_layer_idx) {
  return { selection_ratio, start_layer_idx, end_layer_idx };
}

// The nearest state that the model allows: sides and frames on its grid, windows inside it, options that it has.
function fitted(s) {
  const model = DATA.models[s.model];
  const depth = depthOf(model);
  const step = multipleOf(model);
  const next = { ...s };
  next.width = Math.max(step, Math.round(s.width / step) * step);
  next.height = Math.max(step, Math.round(s.height / step) * step);
  const grid = gridOf(model, { ...next, frames: 1, image_layers: 0 });
  if (model.padded && next.width !== next.height && grid.rows * grid.columns > model.padded) {
    const side = Math.round(Math.sqrt(next.width * next.height) / step) * step; // only squares may have more
    next.width = next.height = side;
  }
  const frameStep = frameStepOf(model);
  next.frames = model.video ? 1 + Math.max(0, Math.round((s.frames - 1) / frameStep)) * frameStep : 1;
  next.image_layers = model.image_layers ? Math.max(1, Math.round(s.image_layers)) : 0;
  next.references = model.image_layers ? 1 : model.references ? s.references : 0;
  next.batch = model.one_sample ? 1 : Math.max(1, Math.round(s.batch));
  next.text = model.text ? Math.round(s.text) : 0;
  next.rank = Math.max(1, Math.round(s.rank));
  const ways = [...Object.keys(model.lora), "full"];
  if (!ways.includes(next.way)) next.way = ways[0];
  const precisions = precisionsOf(model, next.way);
  if (!precisions.includes(next.precision)) next.precision = precisions[0];
  if (!CHECKPOINTING.includes(next.checkpointing)) next.checkpointing = "none";
  if (!(next.optimizer in DATA.optimizers)) next.optimizer = "adamw";
  if (next.selector !== "l1") next.selector = "random";
  if (next.reference_tokens !== "route") next.reference_tokens = "keep";
  next.importance = Math.min(1, next.importance);
  let free = 0;
  next.routes = s.routes
    .map((route) => ({
      selection_ratio: route.selection_ratio < 1 ? Math.max(0, route.selection_ratio) : 0.99,
      start_layer_idx: clampLayer(layerIndex(route.start_layer_idx, depth), depth),
      end_layer_idx: clampLayer(layerIndex(route.end_layer_idx, depth), depth),
    }))
    .sort((a, b) => a.start_layer_idx - b.start_layer_idx)
    .map((route) => {
      const start = Math.max(free, route.start_layer_idx);
      const end = Math.max(start, route.end_layer_idx);
      free = end + 1;
      return { ...route, start_layer_idx: start, end_layer_idx: end };
    })
    .filter((route) => route.end_layer_idx < depth);
  return next;
}

const clampLayer = (layer, depth) => Math.min(depth - 1, Math.max(0, Math.round(layer)));
const multipleOf = (model) => model.multiple;
const frameStepOf = (model) => model.frame_factor * model.patch[0];

function configOf(s, depth) {
  const routes = s.routes.map((route) => ({
    selection_ratio: route.selection_ratio,
    start_layer_idx: route.start_layer_idx,
    // from the end, as people write it, so that it says how many dense layers follow
    end_layer_idx: route.end_layer_idx - depth,
  }));
  const config = { routes, selector: s.selector };
  if (s.selector === "l1") config.importance = s.importance;
  config.seed = s.seed;
  if (s.schedule) config.schedule = s.schedule;
  const { references, image_layers } = DATA.models[s.model];
  if (references || image_layers) config.reference_tokens = s.reference_tokens;
  return config;
}

function commandOf(s, depth) {
  const model = DATA.models[s.model];
  const words = ["tread", "plan", s.model, "--resolution", s.width === s.height ? s.width : `${s.width}x${s.height}`];
  if (model.video) words.push("--frames", s.frames);
  if (model.references && s.references) words.push("--references", s.references);
  if (model.image_layers) words.push("--image-layers", s.image_layers);
  words.push("--batch", s.batch);
  if (s.text !== model.text) words.push("--text", s.text);
  if (s.way === "full") {
    if (model.pretrained) words.push("--full");
  } else {
    words.push("--lora", s.rank);
    if (s.way === "attention") words.push("--targets", "attention");
  }
  words.push("--precision", s.precision, "--optimizer", s.optimizer, "--checkpointing", s.checkpointing);
  if (s.graphs) words.push("--graphs");
  words.push(s.ema ? "--ema" : "--no-ema", "--routes", `'${JSON.stringify(configOf(s, depth))}'`);
  return words.join(" ");
}

async function copy(control) {
  const text = $(control.dataset.copy).textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // without the permission: select it, so that one key press copies
    getSelection().selectAllChildren($(control.dataset.copy));
    $("copied").textContent = "Press Ctrl+C to copy what is selected.";
    return;
  }
  $("copied").textContent = `${control.textContent.replace("Copy ", "")} copied.`;
}
