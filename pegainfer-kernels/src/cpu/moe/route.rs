//! Reference kernel of `ops::moe::route`.

use crate::ops::moe::RouteSpec;

/// Experts and weights of a token with these `logits`.
pub fn route(logits: &[f32], spec: RouteSpec, (chosen, weights): (&mut [u32], &mut [f32])) {
    let experts = &logits[..spec.experts];
    top_k(experts, spec.chosen, &mut chosen[..spec.chosen]);
    let max = experts[chosen[0] as usize];
    let over_all: f32 = experts.iter().map(|l| (l - max).exp()).sum();
    weights.iter_mut().zip(&chosen[..spec.chosen]).for_each(|(w, e)| *w = (experts[*e as usize] - max).exp());
    let sum = if spec.normalize { weights[..spec.chosen].iter().sum() } else { over_all };
    weights[..spec.chosen].iter_mut().for_each(|w| *w /= sum);
    if spec.shared {
        chosen[spec.chosen] = spec.experts as u32;
        weights[spec.chosen] = 1.0 / (1.0 + (-logits[spec.experts]).exp());
    }
}

/// The indices of the `k` largest values, largest first; of equal ones the lower index.
pub fn top_k(values: &[f32], k: usize, out: &mut [u32]) {
    let mut order: Vec<u32> = (0..values.len() as u32).collect();
    let before = |a: &u32, b: &u32| values[*b as usize].total_cmp(&values[*a as usize]).then(a.cmp(b));
    if k < order.len() {
        order.select_nth_unstable_by(k, before);
        order.truncate(k);
    }
    order.sort_unstable_by(before);
    out.copy_from_slice(&order);
}
