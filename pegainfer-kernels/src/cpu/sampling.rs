//! Sampling a token from a row of logits, and log-probabilities.
//!
//! Temperature keeps the order of the logits, so min-p, top-k and top-p each keep the front of the same order: larger
//! logit first, lower id first on ties. Truncation is therefore one [`Cut`] in that order. It is found without sorting
//! the vocabulary, and the draw then walks the kept tokens by id. NaN counts as -inf everywhere.

use crate::draw::{DRAW_WORDS, Draw};
use pegainfer_core::{rng, team};
use std::cmp::Ordering;
use weight::{WEIGHT_BITS, Weight, fraction_of};

#[cfg(test)]
mod tests;
mod weight;

/// Logits per group; the maximum of a group shows whether it can hold a kept token.
const GROUP: usize = 64;

/// Memory of one thread that samples; reused, it does not allocate again for the same vocabulary.
#[derive(Debug, Default)]
pub struct SampleScratch {
    /// Largest logit of each group.
    maxima: Vec<f32>,
    /// Copy of `maxima` to select from.
    order: Vec<f32>,
    /// Sum of weights of each group.
    masses: Vec<u64>,
    /// Tokens among which a cut is searched.
    candidates: Vec<(f32, u32)>,
}

impl SampleScratch {
    /// Scratch for rows of `vocab` logits.
    pub fn new(vocab: usize) -> Self {
        let groups = vocab.div_ceil(GROUP);
        Self {
            maxima: Vec::with_capacity(groups),
            order: Vec::with_capacity(groups),
            masses: Vec::with_capacity(groups),
            candidates: Vec::with_capacity(vocab),
        }
    }
}

/// Draws a token from one row of raw logits (`[vocab]` f32, `vocab > 0`).
///
/// Steps as in `SamplingParams`: temperature, min-p, top-k, top-p, one draw. top-p is relative to the tokens kept by
/// min-p and top-k, and keeps the token that reaches it. Greedy takes the largest logit, the lowest id on ties.
///
/// Weights and their sums are integers, see weight.rs: the same logits give the same token on every device.
///
/// NaN is never drawn. A row of only NaN gives token 0.
pub fn sample_row(logits: &[f32], draw: &Draw, scratch: &mut SampleScratch) -> u32 {
    let max = index(logits, scratch);
    if draw.is_greedy() || max == f32::NEG_INFINITY {
        return first(logits, max, scratch);
    }
    let weight = Weight::new(max, draw.scale);
    let cut = truncate(logits, draw, max, &weight, scratch);
    let total = weigh(logits, &weight, cut, scratch);
    let mut target = rng::below(draw.random, total);
    let mut reached = |mass: u64| {
        let reached = target < mass;
        target -= if reached { 0 } else { mass };
        reached
    };
    let group = scratch.masses.iter().position(|&mass| reached(mass)).unwrap_or(0);
    let mut tokens = (group * GROUP..).zip(logits.chunks(GROUP).nth(group).unwrap_or_default());
    let token = tokens.find(|&(id, &x)| cut.keeps(x, id as u32) && reached(weight.of(x)));
    token.map_or(0, |(id, _)| id as u32)
}

/// [`sample_row`] for each row of `logits` (`[rows, vocab]` f32), in parallel over the rows. `draws`: `[rows,
/// DRAW_WORDS]` packed [`Draw`]s; `scratch`: one per thread to use, at least one; `out`: `[rows]`.
pub fn sample_rows(logits: &[f32], vocab: usize, draws: &[u32], scratch: &mut [SampleScratch], out: &mut [u32]) {
    let draws = draws.as_chunks::<DRAW_WORDS>().0;
    assert!(logits.len() == out.len() * vocab && draws.len() == out.len());
    let rows = out.len().div_ceil(scratch.len()).max(1);
    let scratch = &mut scratch[..out.len().div_ceil(rows)];
    team::for_each_chunk_pair((out, rows), (scratch, 1), |part, out, scratch| {
        for (i, token) in out.iter_mut().enumerate() {
            let row = part * rows + i;
            *token = sample_row(&logits[row * vocab..][..vocab], &Draw::from_words(&draws[row]), &mut scratch[0]);
        }
    });
}

/// Log-softmax of the raw logits (`[vocab]` f32) at `chosen`, with its rank (1 + the number of larger logits), and at
/// the `top_n` largest, best first, lower id first on ties.
///
/// Numerics: weights as in [`sample_row`] at temperature 1; the logarithm in f64, rounded once.
pub fn logprobs_row(logits: &[f32], chosen: u32, top_n: usize) -> (f32, u32, Vec<(u32, f32)>) {
    let scratch = &mut SampleScratch::default();
    let max = index(logits, scratch);
    let mass = weigh(logits, &Weight::new(max, std::f32::consts::LOG2_E), Cut::NONE, scratch);
    let sum = (mass as f64 / (1u64 << WEIGHT_BITS) as f64).ln();
    let logprob = |x: f32| if x == max { -sum as f32 } else { (f64::from(x) - f64::from(max) - sum) as f32 };
    let own = logits[chosen as usize];
    let own = if own.is_nan() { f32::NEG_INFINITY } else { own };
    let rank = 1 + logits.iter().map(|&x| u32::from(x > own)).sum::<u32>();
    let mut top = Vec::new();
    if top_n > 0 {
        select(logits, top_n, Cut::NONE, scratch);
        scratch.candidates.sort_unstable_by(best_first);
        top.extend(scratch.candidates.iter().map(|&(x, id)| (id, logprob(x))));
    }
    (logprob(own), rank, top)
}

/// The last kept token in the order "larger logit, then lower id".
#[derive(Debug, Clone, Copy)]
struct Cut {
    logit: f32,
    id: u32,
}

impl Cut {
    /// Keeps all but NaN.
    const NONE: Self = Self { logit: f32::NEG_INFINITY, id: u32::MAX };

    fn keeps(self, logit: f32, id: u32) -> bool {
        logit > self.logit || (logit == self.logit && id <= self.id)
    }
}

fn best_first(a: &(f32, u32), b: &(f32, u32)) -> Ordering {
    b.0.partial_cmp(&a.0).unwrap_or(Ordering::Equal).then(a.1.cmp(&b.1))
}

/// Fills `scratch.maxima` and returns the largest logit, -inf if there is none.
fn index(logits: &[f32], scratch: &mut SampleScratch) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    scratch.maxima.clear();
    scratch.maxima.extend(logits.chunks(GROUP).map(|group| {
        let (rows, tail) = group.as_chunks::<16>();
        let lanes = rows.iter().fold([f32::NEG_INFINITY; 16], |m, row| std::array::from_fn(|i| larger(m[i], row[i])));
        lanes.iter().chain(tail).copied().fold(f32::NEG_INFINITY, larger)
    }));
    scratch.maxima.iter().copied().fold(f32::NEG_INFINITY, larger)
}

/// Lowest id with this logit, 0 if there is none.
fn first(logits: &[f32], logit: f32, scratch: &SampleScratch) -> u32 {
    let groups = logits.chunks(GROUP).zip(&scratch.maxima).enumerate().filter(|(_, (_, max))| **max == logit);
    for (group, (values, _)) in groups {
        // A group of NaN has -inf as its maximum as well.
        if let Some(at) = values.iter().position(|&x| x == logit) {
            return (group * GROUP + at) as u32;
        }
    }
    0
}

/// Finds the cut of min-p, top-k and top-p.
fn truncate(logits: &[f32], draw: &Draw, max: f32, weight: &Weight, scratch: &mut SampleScratch) -> Cut {
    let mut cut = Cut::NONE;
    if draw.min_p_offset > f64::NEG_INFINITY {
        let floor = f64::from(max) + draw.min_p_offset;
        let nearest = floor as f32;
        cut.logit = if f64::from(nearest) < floor { nearest.next_up() } else { nearest };
    }
    let top_k = draw.top_k as usize;
    if (1..logits.len()).contains(&top_k) {
        cut = select(logits, top_k, cut, scratch);
    }
    if draw.top_p < 1.0 {
        let total = weigh(logits, weight, cut, scratch);
        // Tokens lighter than this weigh less than 1 - top_p together, so the rest contains all that top-p keeps. The
        // factor covers the rounding of weights far above the smallest one.
        let one = (1u64 << WEIGHT_BITS) as f64;
        let lightest = 0.99 * (1.0 - f64::from(draw.top_p)) * total as f64 / one / logits.len() as f64;
        let safe = lightest * one > 1000.0;
        let floor = if safe { (weight.logit(lightest) as f32).next_down() } else { f32::NEG_INFINITY };
        collect(logits, cut, floor, scratch);
        cut = nucleus(&mut scratch.candidates, weight, fraction_of(draw.top_p, total)).unwrap_or(cut);
    }
    cut
}

/// Leaves the best `k` tokens that `cut` keeps in `scratch.candidates`, in no order, and returns the cut after them.
fn select(logits: &[f32], k: usize, cut: Cut, scratch: &mut SampleScratch) -> Cut {
    // The k-th largest of the group maxima is not above the k-th largest logit, and few logits are above it.
    let mut floor = f32::NEG_INFINITY;
    if k <= scratch.maxima.len() {
        scratch.order.clear();
        scratch.order.extend_from_slice(&scratch.maxima);
        floor = *scratch.order.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a)).1;
    }
    collect(logits, cut, floor, scratch);
    if scratch.candidates.len() < k {
        return cut;
    }
    let (logit, id) = *scratch.candidates.select_nth_unstable_by(k - 1, best_first).1;
    scratch.candidates.truncate(k);
    Cut { logit, id }
}

/// Collects the tokens of at least `floor` that `cut` keeps, by id.
fn collect(logits: &[f32], cut: Cut, floor: f32, scratch: &mut SampleScratch) {
    let floor = if cut.logit > floor { cut.logit } else { floor };
    scratch.candidates.clear();
    for (group, values) in logits.chunks(GROUP).enumerate().filter(|(group, _)| scratch.maxima[*group] >= floor) {
        let tokens = values.iter().zip(group * GROUP..).map(|(&x, id)| (x, id as u32));
        scratch.candidates.extend(tokens.filter(|&(x, id)| x >= floor && cut.keeps(x, id)));
    }
}

/// The last token of the shortest front of the order whose weights reach `target`: a binary search that partitions only
/// the relevant half, so it is linear overall.
fn nucleus(tokens: &mut [(f32, u32)], weight: &Weight, mut target: u64) -> Option<Cut> {
    let mut range = 0..tokens.len();
    while range.len() > 1 {
        let middle = range.start + range.len() / 2;
        tokens[range.clone()].select_nth_unstable_by(middle - range.start, best_first);
        let mass: u64 = tokens[range.start..middle].iter().map(|&(x, _)| weight.of(x)).sum();
        if mass >= target {
            range.end = middle;
        } else {
            target -= mass;
            range.start = middle;
        }
    }
    tokens.get(range.start).map(|&(logit, id)| Cut { logit, id })
}

/// Fills `scratch.masses` with the weight of each group's tokens kept by `cut`, and returns the sum.
fn weigh(logits: &[f32], weight: &Weight, cut: Cut, scratch: &mut SampleScratch) -> u64 {
    scratch.masses.clear();
    scratch.masses.extend(logits.chunks(GROUP).zip(&scratch.maxima).enumerate().map(|(group, (values, &max))| {
        let first = group * GROUP;
        match max >= cut.logit {
            // Ids of this group are all on one side of the cut's id: one comparison per logit is enough.
            true if first + GROUP <= cut.id as usize => weight.sum(values, cut.logit),
            true if first > cut.id as usize => weight.sum(values, cut.logit.next_up()),
            true => {
                let kept = values.iter().zip(first..).filter(|&(&x, id)| cut.keeps(x, id as u32));
                kept.map(|(&x, _)| weight.of(x)).sum()
            }
            false => 0,
        }
    }));
    scratch.masses.iter().sum()
}
