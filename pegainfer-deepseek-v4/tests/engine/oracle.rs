//! An independent f64 implementation of the model, token by token, that keeps the whole history of every layer and
//! shares no code with the engine. It can make known mistakes of other implementations, to show that the comparison
//! detects them.

#![allow(dead_code, reason = "each test binary uses its own part")]

mod arithmetic;
mod dspark_oracle;
mod entries;

use super::stored::Numbers;
use arithmetic::{E4M3, dot, inverse_rms, round_group, sigmoid, softmax, weighted};
use std::collections::HashMap;

const DIM: usize = 512;
const RATIOS: [usize; 5] = [0, 0, 4, 128, 4];

/// A known way to get the model wrong.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mistake {
    None,
    /// Cosine and sine times YaRN's 0.1 ln(16) + 1.
    Mscale,
    /// Entries rotated by their number instead of the position of their first token.
    EntryPosition,
    /// Window frequencies in all layers.
    OneTheta,
    /// The attention output is left rotated.
    Rotated,
    /// The mixing of streams is not transposed.
    Comb,
    /// Before the first entry come scores of 0.
    ZerosBefore,
    /// The sink is left out.
    NoSink,
}

/// The numbers of DSpark's stages.
pub struct Stages<'a> {
    pub count: usize,
    pub targets: &'a [usize],
    /// Positions of a block, and the input of all but the first.
    pub positions: usize,
    pub noise: u32,
}

/// History of every layer.
#[derive(Default, Clone)]
struct History {
    keys: Vec<Vec<f64>>,
    main: Vec<(Vec<f64>, Vec<f64>)>,
    index: Vec<(Vec<f64>, Vec<f64>)>,
    entries: Vec<Vec<f64>>,
    index_entries: Vec<Vec<f64>>,
}

/// The model, with or without the roundings of activations and keys.
pub struct Oracle<'a> {
    pub weights: &'a HashMap<String, Numbers>,
    pub quantize: bool,
    pub mistake: Mistake,
}

impl Oracle<'_> {
    /// Log-softmax of the logits after each of the last `count` tokens.
    pub fn logits(&self, tokens: &[u32], count: usize) -> Vec<Vec<f64>> {
        let streams = self.streams(tokens);
        streams[tokens.len() - count..].iter().map(|streams| self.head(streams, "")).collect()
    }

    /// Log-softmax of the logits from which the layer `mtp.0` drafts after `tokens`. The model has run over the first
    /// `known`; the others are drafts of that layer.
    pub fn draft_logits(&self, tokens: &[u32], known: usize) -> Vec<f64> {
        let (streams, mut history, mut last) = (self.streams(&tokens[..known]), History::default(), Vec::new());
        for (p, token) in tokens.iter().enumerate().skip(1) {
            let before = streams.get(p - 1).unwrap_or(&last);
            let e = self.norm(&self.row("embed.weight", *token as usize), "mtp.0.enorm.weight");
            let e = self.linear(&e, "mtp.0.e_proj");
            let join = |x: &Vec<f64>| {
                let x = self.linear(&self.norm(x, "mtp.0.hnorm.weight"), "mtp.0.h_proj");
                x.iter().zip(&e).map(|(x, e)| x + e).collect()
            };
            let joined: Vec<Vec<f64>> = before.iter().map(join).collect();
            last = self.block("mtp.0.", 0, (p - 1, *token), &joined, &mut history);
        }
        self.head(&last, "mtp.0.")
    }

    /// The streams of each token after the last layer.
    fn streams(&self, tokens: &[u32]) -> Vec<Vec<Vec<f64>>> {
        let mut histories = vec![History::default(); RATIOS.len()];
        let mut of_token = |(p, token): (usize, &u32)| {
            let mut streams = vec![self.row("embed.weight", *token as usize); 4];
            for (i, history) in histories.iter_mut().enumerate() {
                streams = self.block(&format!("layers.{i}."), RATIOS[i], (p, *token), &streams, history);
            }
            streams
        };
        tokens.iter().enumerate().map(&mut of_token).collect()
    }

    /// Runs the layer with this tensor name `prefix` on a token at position `p`.
    fn block(
        &self,
        prefix: &str,
        ratio: usize,
        (p, token): (usize, u32),
        streams: &[Vec<f64>],
        history: &mut History,
    ) -> Vec<Vec<f64>> {
        let name = |tail: &str| format!("{prefix}{tail}");
        let (x, post, comb) = self.mix(streams, &name("hc_attn"));
        let f = self.attention(&name("attn."), ratio, p, &self.norm(&x, &name("attn_norm.weight")), history);
        let streams = self.merge(streams, &f, &post, &comb);
        let (x, post, comb) = self.mix(&streams, &name("hc_ffn"));
        let f = self.experts(&name("ffn."), token as usize, &self.norm(&x, &name("ffn_norm.weight")));
        self.merge(&streams, &f, &post, &comb)
    }

    fn get(&self, name: &str) -> &Numbers {
        self.weights.get(name).unwrap_or_else(|| panic!("no {name}"))
    }

    fn row(&self, name: &str, i: usize) -> Vec<f64> {
        let w = self.get(name);
        let width = w.shape[1];
        w.values[i * width..][..width].to_vec()
    }

    fn matrix(&self, x: &[f64], name: &str) -> Vec<f64> {
        self.get(name).values.chunks(x.len()).map(|row| dot(row, x)).collect()
    }

    /// A GEMM whose input the reference rounds to FP8.
    fn linear(&self, x: &[f64], name: &str) -> Vec<f64> {
        let mut x = x.to_vec();
        if self.quantize {
            x.chunks_mut(128).for_each(|group| round_group(group, 448.0, 1e-4, &E4M3));
        }
        self.matrix(&x, &format!("{name}.weight"))
    }

    fn norm(&self, x: &[f64], name: &str) -> Vec<f64> {
        let scale = inverse_rms(x);
        x.iter().zip(&self.get(name).values).map(|(x, w)| x * scale * w).collect()
    }

    fn mixes(&self, streams: &[Vec<f64>], prefix: &str) -> Vec<f64> {
        let x = streams.concat();
        let scale = inverse_rms(&x);
        self.matrix(&x, &format!("{prefix}_fn")).iter().map(|m| m * scale).collect()
    }

    fn mix(&self, streams: &[Vec<f64>], prefix: &str) -> (Vec<f64>, Vec<f64>, Vec<Vec<f64>>) {
        let m = self.mixes(streams, prefix);
        let (base, scale) = (&self.get(&format!("{prefix}_base")).values, &self.get(&format!("{prefix}_scale")).values);
        let pre: Vec<f64> = (0..4).map(|j| sigmoid(m[j] * scale[0] + base[j]) + 1e-6).collect();
        let post = (0..4).map(|j| 2.0 * sigmoid(m[4 + j] * scale[1] + base[4 + j])).collect();
        let value = |j: usize, k: usize| m[8 + 4 * j + k] * scale[2] + base[8 + 4 * j + k];
        let mut c: Vec<Vec<f64>> = (0..4).map(|j| softmax(&(0..4).map(|k| value(j, k)).collect::<Vec<_>>())).collect();
        c.iter_mut().flatten().for_each(|v| *v += 1e-6);
        for round in 0..20 {
            for row in c.iter_mut().filter(|_| round > 0) {
                let sum = row.iter().sum::<f64>() + 1e-6;
                row.iter_mut().for_each(|v| *v /= sum);
            }
            for k in 0..4 {
                let sum = c.iter().map(|row| row[k]).sum::<f64>() + 1e-6;
                c.iter_mut().for_each(|row| row[k] /= sum);
            }
        }
        (weighted(&pre, streams), post, c)
    }

    fn merge(&self, streams: &[Vec<f64>], f: &[f64], post: &[f64], comb: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let weight = |j: usize, k: usize| if self.mistake == Mistake::Comb { comb[k][j] } else { comb[j][k] };
        let stream = |k: usize| {
            let mixed = weighted(&(0..4).map(|j| weight(j, k)).collect::<Vec<_>>(), streams);
            mixed.iter().zip(f).map(|(x, f)| x + post[k] * f).collect()
        };
        (0..4).map(stream).collect()
    }

    /// Rotates the last 64 values by the angles of a position.
    fn rotate(&self, x: &mut [f64], position: usize, compressed: bool, back: bool) {
        let compressed = compressed && self.mistake != Mistake::OneTheta;
        let first = x.len() - 64;
        for (i, pair) in x[first..].chunks_mut(2).enumerate() {
            let theta: f64 = if compressed { 160_000.0 } else { 10_000.0 };
            let mut frequency = theta.powf(-(i as f64) / 32.0);
            if compressed {
                let ramp = ((i as f64 - 15.0) / 10.0).clamp(0.0, 1.0);
                frequency = frequency / 16.0 * ramp + frequency * (1.0 - ramp);
            }
            let (mut sin, mut cos) = (position as f64 * frequency).sin_cos();
            if compressed && self.mistake == Mistake::Mscale {
                let mscale = 0.1 * 16f64.ln() + 1.0;
                (sin, cos) = (sin * mscale, cos * mscale);
            }
            let sin = if back { -sin } else { sin };
            (pair[0], pair[1]) = (pair[0] * cos - pair[1] * sin, pair[0] * sin + pair[1] * cos);
        }
    }

    fn attention(&self, prefix: &str, ratio: usize, p: usize, x: &[f64], history: &mut History) -> Vec<f64> {
        let name = |tail: &str| format!("{prefix}{tail}");
        let qr = self.norm(&self.linear(x, &name("wq_a")), &name("q_norm.weight"));
        let mut q = self.linear(&qr, &name("wq_b"));
        for head in q.chunks_mut(DIM) {
            let scale = inverse_rms(head);
            head.iter_mut().for_each(|v| *v *= scale);
            self.rotate(head, p, ratio > 0, false);
        }
        let mut key = self.norm(&self.linear(x, &name("wkv")), &name("kv_norm.weight"));
        self.rotate(&mut key, p, ratio > 0, false);
        self.round_key(&mut key);
        history.keys.push(key);
        if ratio > 0 {
            history.main.push(self.token(x, p, ratio, &name("compressor")));
            if let Some(entry) = self.entry(p, ratio, DIM, &history.main, &name("compressor")) {
                history.entries.push(entry);
            }
        }
        if ratio == 4 {
            history.index.push(self.token(x, p, ratio, &name("indexer.compressor")));
            if let Some(entry) = self.entry(p, ratio, 128, &history.index, &name("indexer.compressor")) {
                history.index_entries.push(entry);
            }
        }
        let mut keys: Vec<&[f64]> = history.keys[(p + 1).saturating_sub(128)..].iter().map(Vec::as_slice).collect();
        let chosen = if ratio == 4 {
            self.choose(p, x, &qr, history, &name("indexer"))
        } else {
            (0..history.entries.len()).collect()
        };
        keys.extend(chosen.into_iter().map(|i| history.entries[i].as_slice()));
        let sinks = &self.get(&name("attn_sink")).values;
        let head = |(q, sink): (&[f64], &f64)| {
            let scores = keys.iter().map(|key| dot(q, key) / (DIM as f64).sqrt());
            let none = if self.mistake == Mistake::NoSink { f64::NEG_INFINITY } else { *sink };
            let p = softmax(&scores.chain([none]).collect::<Vec<_>>());
            weighted(&p[..keys.len()], &keys)
        };
        let mut o: Vec<f64> = q.chunks(DIM).zip(sinks).flat_map(head).collect();
        if self.mistake != Mistake::Rotated {
            o.chunks_mut(DIM).for_each(|head| self.rotate(head, p, ratio > 0, true));
        }
        let wo_a = self.get(&name("wo_a.weight"));
        let group = wo_a.shape[1];
        let z: Vec<f64> =
            wo_a.values.chunks(group).enumerate().map(|(r, row)| dot(row, &o[r / 128 * group..][..group])).collect();
        self.linear(&z, &name("wo_b"))
    }

    fn round_key(&self, key: &mut [f64]) {
        if self.quantize {
            let end = key.len() - 64;
            key[..end].chunks_mut(64).for_each(|group| round_group(group, 448.0, 1e-4, &E4M3));
        }
    }

    fn experts(&self, prefix: &str, token: usize, x: &[f64]) -> Vec<f64> {
        let name = |tail: &str| format!("{prefix}{tail}");
        let softplus = |l: &f64| l.exp().ln_1p().sqrt();
        let gates: Vec<f64> = self.matrix(x, &name("gate.weight")).iter().map(softplus).collect();
        let chosen: Vec<usize> = match self.weights.get(&name("gate.tid2eid")) {
            Some(_) => self.row(&name("gate.tid2eid"), token).iter().map(|e| *e as usize).collect(),
            None => {
                let bias = &self.get(&name("gate.bias")).values;
                let mut order: Vec<usize> = (0..8).collect();
                order.sort_by(|a, b| (gates[*b] + bias[*b]).total_cmp(&(gates[*a] + bias[*a])).then(a.cmp(b)));
                order[..2].to_vec()
            }
        };
        let sum: f64 = chosen.iter().map(|e| gates[*e]).sum();
        let mut out = self.expert(x, &name("shared_experts"), 1.0);
        for e in chosen {
            let y = self.expert(x, &name(&format!("experts.{e}")), gates[e] / sum * 1.5);
            out.iter_mut().zip(y).for_each(|(out, y)| *out += y);
        }
        out
    }

    fn expert(&self, x: &[f64], prefix: &str, weight: f64) -> Vec<f64> {
        let (a, b) = (self.linear(x, &format!("{prefix}.w1")), self.linear(x, &format!("{prefix}.w3")));
        let inner = |(a, b): (&f64, &f64)| weight * a.min(10.0) * sigmoid(a.min(10.0)) * b.clamp(-10.0, 10.0);
        self.linear(&a.iter().zip(&b).map(inner).collect::<Vec<_>>(), &format!("{prefix}.w2"))
    }

    /// Log-softmax through the mixing and the norm with this tensor name `prefix`.
    fn head(&self, streams: &[Vec<f64>], prefix: &str) -> Vec<f64> {
        let name = |tail: &str| format!("{prefix}{tail}");
        let m = self.mixes(streams, &name("hc_head"));
        let (base, scale) = (&self.get(&name("hc_head_base")).values, self.get(&name("hc_head_scale")).values[0]);
        let pre: Vec<f64> = (0..4).map(|j| sigmoid(m[j] * scale + base[j]) + 1e-6).collect();
        let logits = self.matrix(&self.norm(&weighted(&pre, streams), &name("norm.weight")), "head.weight");
        softmax(&logits).iter().map(|p| p.ln()).collect()
    }
}
