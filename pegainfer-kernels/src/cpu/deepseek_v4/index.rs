//! Reference kernel of `ops::deepseek_v4::select_entries`.

use super::matmul::dot;
use crate::cpu::isa::Isa;
use crate::cpu::lanes::{Kernel, Lanes, dispatch};

/// `Σ_h weights[h] · relu(queries[h] · entry)`; `queries`: `[heads, dim]`.
pub fn score(isa: Isa, queries: &[f32], weights: &[f32], entry: &[f32]) -> f32 {
    dispatch(isa, Score { queries, weights, entry })
}

struct Score<'a> {
    queries: &'a [f32],
    weights: &'a [f32],
    entry: &'a [f32],
}

impl Kernel for Score<'_> {
    type Out = f32;

    #[inline(always)]
    fn run<S: Lanes>(self, s: S) -> f32 {
        let mut sum = 0.0;
        for (query, weight) in self.queries.chunks_exact(self.entry.len()).zip(self.weights) {
            sum += weight * dot(s, query, self.entry).max(0.0);
        }
        sum
    }
}

/// Indices of the `k` largest scores, ascending. Ties go to the lower index, so the choice depends only on the scores,
/// not on how the step was split.
pub fn top_k(scores: &[f32], k: usize) -> Vec<u32> {
    let mut order: Vec<u32> = (0..scores.len() as u32).collect();
    if scores.len() > k {
        let score = |i: &u32| scores[*i as usize];
        order.select_nth_unstable_by(k, |a, b| score(b).total_cmp(&score(a)).then(a.cmp(b)));
        order.truncate(k);
        order.sort_unstable();
    }
    order
}
