// The example: a landscape, and the tokens of it that a window keeps.
"use strict";

function drawPictures(found) {
  const { rows, columns, frames } = found.grid;
  const importance = state.selector === "l1" ? state.importance : 0.5;
  const route = state.routes[chosen];
  const kept = keptCount(found.total, route.selection_ratio, found.always);
  const noise = noiseBits(state.seed, chosen, found.total);
  const scene = landscape(state.width, state.height);
  const contrast = contrastOf(scene, rows, columns);
  const detail = Array.from({ length: found.total }, (_, token) => contrast[token % contrast.length]);
  const masks = {
    random: keptTokens(noise, kept, found.always),
    l1: keptTokens(mixedScore(noise, rankOf(detail), importance), kept, found.always),
  };
  for (const [name, mask] of Object.entries(masks)) {
    paint($(`picture-${name}`), scene, mask, rows, columns);
    const text = `Example with the ${whole(kept)} of ${whole(found.total)} tokens that the window keeps`;
    $(`picture-${name}`).setAttribute("aria-label", text);
  }
  for (const name of ["random", "l1"]) $(`caption-${name}`).className = name === state.selector ? "used" : "";
  $("caption-l1").textContent = `by importance ${importance}`;
  const layered = state.image_layers ? " The image itself is shown, without its layers." : "";
  const clip = layered || (frames > 1 ? ` The first of ${frames} latent frames is shown.` : "");
  $("pictures-text").textContent =
    `The tokens that seed ${state.seed} keeps for the first sample of step 0; the others skip the window.` +
    ` Importance is the L1 norm of a token in the model; local contrast stands in for it here.${clip}`;
}

function landscape(width, height) {
  const scale = 384 / Math.max(width, height);
  const canvas = element("canvas", { width: Math.round(width * scale), height: Math.round(height * scale) });
  const [w, h] = [canvas.width, canvas.height];
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const random = (i) => (mix(fold([7, i])) >>> 0) / 2 ** 32;
  const gradient = (y0, y1, ...colors) => {
    const made = context.createLinearGradient(0, y0 * h, 0, y1 * h);
    colors.forEach((color, i) => made.addColorStop(i / (colors.length - 1), color));
    return made;
  };
  context.fillStyle = gradient(0, 0.62, "#2c5d8f", "#8fb8d6", "#f6d9b0");
  context.fillRect(0, 0, w, h);
  context.fillStyle = "#fff3cf";
  context.beginPath();
  context.arc(0.7 * w, 0.27 * h, 0.075 * Math.min(w, h), 0, 7);
  context.fill();
  const ridge = (base, rough, color, seed) => {
    context.fillStyle = color;
    context.beginPath();
    context.moveTo(0, h);
    for (let i = 0; i <= 48; i++) {
      const slow = 0.6 * Math.sin(i * 0.33 + seed) + 0.3 * Math.sin(i * 0.81 + seed * 2);
      const wave = slow + 0.5 * (random(seed * 100 + i) - 0.5);
      context.lineTo((i / 48) * w, (base - rough * wave) * h);
    }
    context.lineTo(w, h);
    context.fill();
  };
  ridge(0.5, 0.1, "#7d8fae", 1);
  ridge(0.6, 0.07, "#55708a", 5);
  ridge(0.68, 0.04, "#3d6150", 9);
  context.fillStyle = gradient(0.72, 1, "#5f93a8", "#24495e");
  context.fillRect(0, 0.76 * h, w, h);
  context.strokeStyle = "rgb(255 245 220 / 55%)";
  for (let i = 0; i < 40; i++) {
    const y = (0.78 + 0.22 * random(i + 400)) * h;
    const x = (0.7 + (random(i + 500) - 0.5) * 0.35) * w;
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x + (0.01 + 0.03 * random(i + 600)) * w, y);
    context.stroke();
  }
  for (let i = 0; i < 26; i++) {
    const x = (random(i + 200) * 0.5 - 0.02) * w;
    const tall = (0.1 + 0.12 * random(i + 300)) * h;
    const foot = (0.76 + 0.03 * random(i + 250)) * h;
    context.fillStyle = i % 2 ? "#1f4334" : "#2b5a41";
    for (let part = 0; part < 3; part++) {
      const top = foot - tall * (1 - 0.22 * part);
      const half = tall * (0.1 + 0.06 * part);
      context.beginPath();
      context.moveTo(x, top);
      context.lineTo(x - half, top + tall * 0.42);
      context.lineTo(x + half, top + tall * 0.42);
      context.fill();
    }
  }
  return canvas;
}

// The mean distance of a token's pixels from their mean.
function contrastOf(scene, rows, columns) {
  const { width, height } = scene;
  const pixels = scene.getContext("2d").getImageData(0, 0, width, height).data;
  const found = [];
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const [top, left] = [Math.floor((row * height) / rows), Math.floor((column * width) / columns)];
      const bottom = Math.max(top + 1, Math.floor(((row + 1) * height) / rows));
      const right = Math.max(left + 1, Math.floor(((column + 1) * width) / columns));
      const values = [];
      for (let y = top; y < bottom; y++) for (let x = left; x < right; x++) {
        const i = 4 * (y * width + x);
        values.push(pixels[i] + pixels[i + 1] + pixels[i + 2]);
      }
      const mean = values.reduce((a, b) => a + b, 0) / values.length;
      found.push(values.reduce((a, b) => a + Math.abs(b - mean), 0) / values.length);
    }
  }
  return found;
}

function paint(canvas, scene, mask, rows, columns) {
  canvas.width = scene.width;
  canvas.height = scene.height;
  const context = canvas.getContext("2d");
  context.drawImage(scene, 0, 0);
  context.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--paper");
  context.globalAlpha = 0.88;
  const [tall, wide] = [scene.height / rows, scene.width / columns];
  for (let row = 0; row < rows; row++) for (let column = 0; column < columns; column++) {
    if (mask[row * columns + column]) continue;
    const [x, y] = [Math.round(column * wide), Math.round(row * tall)];
    context.fillRect(x, y, Math.round((column + 1) * wide) - x, Math.round((row + 1) * tall) - y);
  }
}
