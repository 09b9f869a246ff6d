// The controls: each writes to `state`, and `show` draws it. The address holds the state: a link opens the same plan.
"use strict";

const $ = (id) => document.getElementById(id);
const ASPECTS = { "1:1": 1, "4:3": 4 / 3, "3:2": 3 / 2, "16:9": 16 / 9, "3:4": 3 / 4, "2:3": 2 / 3, "9:16": 9 / 16 };
const WAYS = { lora: "LoRA", attention: "LoRA on attention", full: "all weights" };

let state = startState();
let chosen = 0; // the window that the sliders change

function options(select, values, label = (value) => value) {
  select.replaceChildren(...values.map((value) => new Option(label(value), value)));
}

function prepare() {
  options($("model"), Object.keys(DATA.models), (name) => DATA.models[name].title.replaceAll("`", ""));
  options($("optimizer"), Object.keys(DATA.optimizers));
  options($("preset"), ["", ...Object.keys(DATA.presets)], (name) => name || "your own");
  options($("aspect"), ["", ...Object.keys(ASPECTS)], (name) => name || "as it is");
  for (const control of document.querySelectorAll("#controls input, #controls select")) {
    control.addEventListener("input", () => change(control));
  }
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copy(button));
  addEventListener("hashchange", () => {
    state = fromHash(location.hash.slice(1));
    chosen = 0;
    show();
  });
}

function change(control) {
  const next = { ...state, routes: state.routes.map((route) => ({ ...route })) };
  const model = DATA.models[state.model];
  const value = Number(control.value);
  const route = next.routes[chosen];
  switch (control.id) {
    case "model":
      Object.assign(next, opened(control.value));
      break;
    case "way":
      next.way = control.value;
      if ((state.way === "full") !== (next.way === "full")) next.precision = precisionsOf(model, next.way)[0];
      break;
    case "resolution":
      Object.assign(next, sides(value * multipleOf(model), state.width / state.height, model));
      break;
    case "aspect":
      if (!control.value) break;
      Object.assign(next, sides(Math.sqrt(state.width * state.height), ASPECTS[control.value], model));
      break;
    case "ratio":
      route.selection_ratio = value / 100;
      break;
    case "start":
      route.start_layer_idx = value;
      route.end_layer_idx = Math.max(value, route.end_layer_idx);
      break;
    case "end":
      route.end_layer_idx = value;
      route.start_layer_idx = Math.min(value, route.start_layer_idx);
      break;
    case "preset":
      if (control.value) next.routes = [{ ...DATA.presets[control.value] }];
      chosen = 0;
      break;
    case "importance":
      next.importance = value / 100;
      break;
    case "graphs":
    case "ema":
      next[control.id] = control.checked;
      break;
    default:
      next[control.id] = control.type === "range" ? value : control.value;
  }
  update(next);
}

// What a model usually trains on; the routes keep their distance from the last layer. Between released models and those
// from scratch, what is trained changes too, and so do routes that are the default.
function opened(name) {
  const model = DATA.models[name];
  const before = depthOf(DATA.models[state.model]);
  const [width, height] = model.size;
  let routes = state.routes.map((route) => ({ ...route, end_layer_idx: route.end_layer_idx - before }));
  const another = {};
  if (model.pretrained !== DATA.models[state.model].pretrained) {
    const [old, usual] = model.pretrained ? ["paper", "lora"] : ["lora", "paper"];
    if (routes.length === 1 && samePlace(DATA.presets[old], state.routes[0], before)) routes = [{ ...DATA.presets[usual] }];
    another.way = [...Object.keys(model.lora), "full"][0];
    another.precision = precisionsOf(model, another.way)[0];
  }
  const batch = model.pretrained ? 1 : 256;
  const { frames, image_layers, text } = model;
  const references = Number(model.references);
  const ema = !model.pretrained;
  return { ...another, model: name, width, height, batch, frames, references, image_layers, text, routes, ema };
}

function sides(side, aspect, model) {
  const step = multipleOf(model);
  const near = (value) => Math.max(step, Math.round(value / step) * step);
  return { width: near(side * Math.sqrt(aspect)), height: near(side / Math.sqrt(aspect)) };
}

function update(next) {
  state = fitted(next);
  chosen = Math.min(chosen, state.routes.length - 1);
  history.replaceState(null, "", `#${toHash(state)}`);
  show();
}

prepare();
state = location.hash.length > 1 ? fromHash(location.hash.slice(1)) : fitted(state);
show();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
