//! DSpark's blocks in f64, in the plainest way.

use super::arithmetic::{dot, inverse_rms, sigmoid, softmax, weighted};
use super::{DIM, History, Oracle, RATIOS, Stages};

impl Oracle<'_> {
    /// Log-softmax of the logits from which each of `drafts` is drawn, in a block that starts with `first`, the token
    /// after `tokens`.
    pub fn block_logits(&self, tokens: &[u32], first: u32, drafts: &[u32], stages: &Stages<'_>) -> Vec<Vec<f64>> {
        let last = format!("mtp.{}.", stages.count - 1);
        let inputs: Vec<Vec<f64>> = self.main(tokens, stages.targets);
        let ids: Vec<u32> = (0..stages.positions).map(|i| if i == 0 { first } else { stages.noise }).collect();
        let mut block: Vec<Vec<Vec<f64>>> =
            ids.iter().map(|id| vec![self.row("embed.weight", *id as usize); 4]).collect();
        for stage in 0..stages.count {
            let keys: Vec<Vec<f64>> =
                inputs.iter().enumerate().map(|(p, x)| self.key(&format!("mtp.{stage}.attn."), x, p)).collect();
            block = self.stage(&format!("mtp.{stage}."), &ids, &block, &keys);
        }
        let before = std::iter::once(&first).chain(drafts);
        let position = |(streams, before): (&Vec<Vec<f64>>, &u32)| {
            let hidden = self.norm(&self.mixed(streams, &last), &format!("{last}norm.weight"));
            let markov = self.row(&format!("{last}markov_head.markov_w1.weight"), *before as usize);
            let transition = self.matrix(&markov, &format!("{last}markov_head.markov_w2.weight"));
            let logits = self.matrix(&hidden, "head.weight");
            let sum: Vec<f64> = logits.iter().zip(&transition).map(|(a, b)| a + b).collect();
            softmax(&sum).iter().map(|p| p.ln()).collect()
        };
        block.iter().zip(before).take(drafts.len()).map(position).collect()
    }

    /// Input of the stages' keys, for each token.
    fn main(&self, tokens: &[u32], targets: &[usize]) -> Vec<Vec<f64>> {
        let mut histories = vec![History::default(); RATIOS.len()];
        let mut of_token = |(p, token): (usize, &u32)| {
            let mut streams = vec![self.row("embed.weight", *token as usize); 4];
            let mut means = Vec::new();
            for (i, history) in histories.iter_mut().enumerate() {
                streams = self.block(&format!("layers.{i}."), RATIOS[i], (p, *token), &streams, history);
                means.push(weighted(&[0.25; 4], &streams));
            }
            let joined: Vec<f64> = targets.iter().flat_map(|layer| means[*layer].clone()).collect();
            self.norm(&self.linear(&joined, "mtp.0.main_proj"), "mtp.0.main_norm.weight")
        };
        tokens.iter().enumerate().map(&mut of_token).collect()
    }

    fn key(&self, prefix: &str, x: &[f64], p: usize) -> Vec<f64> {
        let mut key = self.norm(&self.linear(x, &format!("{prefix}wkv")), &format!("{prefix}kv_norm.weight"));
        self.rotate(&mut key, p, false, false);
        self.round_key(&mut key);
        key
    }

    /// One stage over a block after tokens with these `keys`.
    fn stage(&self, prefix: &str, ids: &[u32], block: &[Vec<Vec<f64>>], keys: &[Vec<f64>]) -> Vec<Vec<Vec<f64>>> {
        let name = |tail: &str| format!("{prefix}{tail}");
        let mixes: Vec<_> = block.iter().map(|streams| self.mix(streams, &name("hc_attn"))).collect();
        let inputs: Vec<_> = mixes.iter().map(|(x, ..)| self.norm(x, &name("attn_norm.weight"))).collect();
        let attended = self.block_attention(&name("attn."), &inputs, keys);
        let outputs = (0..block.len()).map(|i| {
            let (_, post, comb) = &mixes[i];
            let streams = self.merge(&block[i], &attended[i], post, comb);
            let (x, post, comb) = self.mix(&streams, &name("hc_ffn"));
            let f = self.experts(&name("ffn."), ids[i] as usize, &self.norm(&x, &name("ffn_norm.weight")));
            self.merge(&streams, &f, &post, &comb)
        });
        outputs.collect()
    }

    /// Each position of a block attends to the newest 128 of `keys` and to all positions of the block.
    fn block_attention(&self, prefix: &str, inputs: &[Vec<f64>], keys: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let name = |tail: &str| format!("{prefix}{tail}");
        let context = keys.len();
        let own: Vec<_> = inputs.iter().enumerate().map(|(i, x)| self.key(prefix, x, context + i)).collect();
        let seen: Vec<&Vec<f64>> = keys[context.saturating_sub(128)..].iter().chain(&own).collect();
        let sinks = &self.get(&name("attn_sink")).values;
        let position = |(i, x): (usize, &Vec<f64>)| {
            let p = context + i;
            let qr = self.norm(&self.linear(x, &name("wq_a")), &name("q_norm.weight"));
            let mut q = self.linear(&qr, &name("wq_b"));
            for head in q.chunks_mut(DIM) {
                let scale = inverse_rms(head);
                head.iter_mut().for_each(|v| *v *= scale);
                self.rotate(head, p, false, false);
            }
            let head = |(q, sink): (&[f64], &f64)| {
                let scores = seen.iter().map(|key| dot(q, key) / (DIM as f64).sqrt());
                let shares = softmax(&scores.chain([*sink]).collect::<Vec<_>>());
                let mut out = weighted(&shares[..seen.len()], &seen);
                self.rotate(&mut out, p, false, true);
                out
            };
            let o: Vec<f64> = q.chunks(DIM).zip(sinks).flat_map(head).collect();
            let wo_a = self.get(&name("wo_a.weight"));
            let group = wo_a.shape[1];
            let row = |(r, row): (usize, &[f64])| dot(row, &o[r / 128 * group..][..group]);
            self.linear(&wo_a.values.chunks(group).enumerate().map(row).collect::<Vec<_>>(), &name("wo_b"))
        };
        inputs.iter().enumerate().map(position).collect()
    }

    /// The mixed streams after the last stage.
    fn mixed(&self, streams: &[Vec<f64>], prefix: &str) -> Vec<f64> {
        let m = self.mixes(streams, &format!("{prefix}hc_head"));
        let base = &self.get(&format!("{prefix}hc_head_base")).values;
        let scale = self.get(&format!("{prefix}hc_head_scale")).values[0];
        let shares: Vec<f64> = m.iter().zip(base).map(|(m, base)| sigmoid(m * scale + base) + 1e-6).collect();
        weighted(&shares, streams)
    }
}
