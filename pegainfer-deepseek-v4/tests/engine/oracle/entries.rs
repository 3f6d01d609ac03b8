//! Entries of the compressed layers, and those that a token attends to.

use super::arithmetic::{E2M1, dot, round_group, softmax};
use super::{History, Mistake, Oracle};

impl Oracle<'_> {
    /// Values and scores of a token in a compressor.
    pub(super) fn token(&self, x: &[f64], p: usize, ratio: usize, prefix: &str) -> (Vec<f64>, Vec<f64>) {
        let bias = self.row(&format!("{prefix}.ape"), p % ratio);
        let scores = self.matrix(x, &format!("{prefix}.wgate.weight"));
        (self.matrix(x, &format!("{prefix}.wkv.weight")), scores.iter().zip(bias).map(|(s, b)| s + b).collect())
    }

    /// The entry that the token at `p` completes.
    pub(super) fn entry(
        &self,
        p: usize,
        ratio: usize,
        dim: usize,
        tokens: &[(Vec<f64>, Vec<f64>)],
        prefix: &str,
    ) -> Option<Vec<f64>> {
        if !(p + 1).is_multiple_of(ratio) {
            return None;
        }
        let own = p + 1 - ratio;
        let channel = |c: usize| {
            let mut pairs = Vec::new();
            if ratio == 4 {
                for j in 1..=4 {
                    match own.checked_sub(j) {
                        Some(q) => pairs.push((tokens[q].0[c], tokens[q].1[c])),
                        None if self.mistake == Mistake::ZerosBefore => pairs.push((0.0, 0.0)),
                        None => {}
                    }
                }
            }
            let half = if ratio == 4 { dim } else { 0 };
            pairs.extend((own..=p).map(|q| (tokens[q].0[half + c], tokens[q].1[half + c])));
            let weights = softmax(&pairs.iter().map(|pair| pair.1).collect::<Vec<_>>());
            pairs.iter().zip(weights).map(|(pair, w)| pair.0 * w).sum()
        };
        let pooled: Vec<f64> = (0..dim).map(channel).collect();
        let mut entry = self.norm(&pooled, &format!("{prefix}.norm.weight"));
        let position = if self.mistake == Mistake::EntryPosition { own / ratio } else { own };
        self.rotate(&mut entry, position, true, false);
        if dim == 128 {
            self.turn(&mut entry)
        } else {
            self.round_key(&mut entry)
        }
        Some(entry)
    }

    /// Hadamard and FP4.
    fn turn(&self, x: &mut [f64]) {
        let sign = |i: usize, j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
        let n = x.len();
        let turned: Vec<f64> =
            (0..n).map(|i| (0..n).map(|j| sign(i, j) * x[j]).sum::<f64>() / (n as f64).sqrt()).collect();
        x.copy_from_slice(&turned);
        if self.quantize {
            x.chunks_mut(32).for_each(|group| round_group(group, 6.0, 6.0 * 2f64.powi(-126), &E2M1));
        }
    }

    /// The entries that the token at `p` attends to.
    pub(super) fn choose(&self, p: usize, x: &[f64], qr: &[f64], history: &History, prefix: &str) -> Vec<usize> {
        let mut q = self.linear(qr, &format!("{prefix}.wq_b"));
        for head in q.chunks_mut(128) {
            self.rotate(head, p, true, false);
            self.turn(head);
        }
        let weights = self.matrix(x, &format!("{prefix}.weights_proj.weight"));
        let score =
            |entry: &Vec<f64>| -> f64 { q.chunks(128).zip(&weights).map(|(q, w)| w * dot(q, entry).max(0.0)).sum() };
        let scores: Vec<f64> = history.index_entries.iter().map(score).collect();
        let mut order: Vec<usize> = (0..scores.len()).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
        order.truncate(16);
        order
    }
}
