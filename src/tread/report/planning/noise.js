// The tokens that a route keeps, bit for bit as routing/noise.py and routing/selection.py select them at step 0.
"use strict";

const GOLDEN = 0x1e3779b9;

function mix(h) {
  h ^= h >>> 16;
  h = Math.imul(h, 0x21f0aaad);
  h ^= h >>> 15;
  h = Math.imul(h, 0x735a2d97);
  h ^= h >>> 16;
  h = Math.imul(h, 0x31848bab);
  return h ^ (h >>> 15);
}

function fold(words, h = GOLDEN) {
  for (let word of words) {
    h = mix(h ^ (word % 2 ** 32));
    while ((word = Math.floor(word / 2 ** 32)) > 0) h = mix(h ^ (word % 2 ** 32)); // a seed may be longer than 32 bits
    h = (h + GOLDEN) | 0;
  }
  return h;
}

// 32 random bits of the first sample's tokens, for one route.
function noiseBits(seed, route, tokens) {
  const shared = fold([seed, 0, 0, route, 0]); // step, micro-step, route, sample
  return Array.from({ length: tokens }, (_, token) => mix(fold([token], shared)) >>> 0);
}

// The rank of each value, 0 for the smallest; equal values in their order.
function rankOf(values) {
  const order = Array.from(values, (_, i) => i).sort((a, b) => values[a] - values[b] || a - b);
  const rank = Array(values.length);
  order.forEach((token, place) => (rank[token] = place));
  return rank;
}

// (1 - importance) * uniform + importance * rank / S in integers below 2^49, which a double holds exactly.
function mixedScore(noise, rank, importance) {
  const weight = roundHalfEven(importance * 65536);
  const count = rank.length;
  return noise.map((bits, i) => (65536 - weight) * bits + weight * Math.floor((rank[i] * 2 ** 32) / count));
}

function roundHalfEven(value) {
  const floor = Math.floor(value);
  if (value - floor !== 0.5) return Math.round(value);
  return floor % 2 === 0 ? floor : floor + 1;
}

// A Uint8Array with 1 for the `kept` highest scores; of equal ones the earlier token. The last `always` are forced.
function keptTokens(score, kept, always) {
  const count = score.length;
  const forced = (token) => token >= count - always;
  const order = Array.from(score, (_, i) => i).sort((a, b) => forced(b) - forced(a) || score[b] - score[a] || a - b);
  const mask = new Uint8Array(count);
  for (const token of order.slice(0, kept)) mask[token] = 1;
  return mask;
}
