//! The minimal model in f32, written for reading: one sequence, no cache, nothing fused.

use super::checkpoint::{EPS, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, THETA, Tensors};

fn tensor(tensors: &Tensors, name: &str) -> Vec<f32> {
    tensors[&format!("{name}.weight")].1.iter().map(|v| v.to_f32()).collect()
}

/// `w x`: `w` `[rows, inputs]`, `x` `[inputs]`.
fn linear(w: &[f32], x: &[f32]) -> Vec<f32> {
    w.chunks_exact(x.len()).map(|row| row.iter().zip(x).map(|(a, b)| a * b).sum()).collect()
}

fn rms_norm(x: &[f32], weight: &[f32]) -> Vec<f32> {
    let mean = x.iter().map(|v| v * v).sum::<f32>() / x.len() as f32;
    let scale = (mean + EPS as f32).sqrt().recip();
    x.iter().zip(weight).map(|(v, w)| v * scale * w).collect()
}

/// Rotates each head of `x` by its position (RoPE, half-split).
fn rope(x: &mut [f32], position: usize) {
    for head in x.chunks_exact_mut(HEAD_DIM) {
        let (low, high) = head.split_at_mut(HEAD_DIM / 2);
        for (i, (a, b)) in low.iter_mut().zip(high).enumerate() {
            let angle = position as f64 * THETA.powf(-2.0 * i as f64 / HEAD_DIM as f64);
            let (sin, cos) = (angle.sin() as f32, angle.cos() as f32);
            (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
        }
    }
}

/// Softmax attention of the last of `keys.len()` positions.
fn attention(q: &[f32], keys: &[Vec<f32>], values: &[Vec<f32>]) -> Vec<f32> {
    let head = |h: usize| {
        let kv = h / (HEADS / KV_HEADS) * HEAD_DIM..;
        let q = &q[h * HEAD_DIM..][..HEAD_DIM];
        let dot = |k: &Vec<f32>| q.iter().zip(&k[kv.clone()]).map(|(a, b)| a * b).sum::<f32>();
        let scores: Vec<f32> = keys.iter().map(|k| dot(k) / (HEAD_DIM as f32).sqrt()).collect();
        let top = scores.iter().copied().fold(f32::MIN, f32::max);
        let weights: Vec<f32> = scores.iter().map(|s| (s - top).exp()).collect();
        let sum: f32 = weights.iter().sum();
        let value = |d: usize| weights.iter().zip(values).map(|(w, v)| w * v[kv.start + d]).sum::<f32>() / sum;
        (0..HEAD_DIM).map(value).collect::<Vec<f32>>()
    };
    (0..HEADS).flat_map(head).collect()
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// Log-probabilities of the token after each of `ids`, `[ids, vocab]`.
pub fn logprobs(tensors: &Tensors, ids: &[u32]) -> Vec<Vec<f32>> {
    let embedding = tensor(tensors, "model.embed_tokens");
    let mut residual: Vec<Vec<f32>> =
        ids.iter().map(|&id| embedding[id as usize * HIDDEN..][..HIDDEN].to_vec()).collect();
    for i in 0..LAYERS {
        let weight = |tail: &str| tensor(tensors, &format!("model.layers.{i}.{tail}"));
        let (input_norm, post_norm) = (weight("input_layernorm"), weight("post_attention_layernorm"));
        let projections = ["q", "k", "v", "o"].map(|name| weight(&format!("self_attn.{name}_proj")));
        let [gate, up, down] = ["gate", "up", "down"].map(|name| weight(&format!("mlp.{name}_proj")));
        let (mut keys, mut values) = (Vec::new(), Vec::new());
        for (position, x) in residual.iter_mut().enumerate() {
            let normed = rms_norm(x, &input_norm);
            let [mut q, mut k, v] = [0, 1, 2].map(|p: usize| linear(&projections[p], &normed));
            rope(&mut q, position);
            rope(&mut k, position);
            keys.push(k);
            values.push(v);
            add(x, &linear(&projections[3], &attention(&q, &keys, &values)));
            let normed = rms_norm(x, &post_norm);
            let silu = |g: f32| g / (1.0 + (-g).exp());
            let (gate, up) = (linear(&gate, &normed), linear(&up, &normed));
            let activated: Vec<f32> = gate.iter().zip(up).map(|(&g, u)| silu(g) * u).collect();
            add(x, &linear(&down, &activated));
        }
    }
    let (norm, head) = (tensor(tensors, "model.norm"), tensor(tensors, "lm_head"));
    residual.iter().map(|x| log_softmax(&linear(&head, &rms_norm(x, &norm)))).collect()
}

fn log_softmax(logits: &[f32]) -> Vec<f32> {
    let top = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f32 = logits.iter().map(|l| (l - top).exp()).sum();
    logits.iter().map(|l| l - top - sum.ln()).collect()
}
