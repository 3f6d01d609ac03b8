//! Sampled tokens follow the probabilities that the engine reports.

use super::{Case, greedy, run};
use pegainfer_core::engine::{GenerateRequest, MAX_LOGPROBS, StepEngine};
use pegainfer_core::sampling::SamplingParams;

/// Requests per distribution, each with its own seed.
const SEEDS: usize = 1024;
/// Expected count of a token that is counted by itself; the others are counted together.
const MIN_EXPECTED: f64 = 5.0;
/// `-ln` of the probability that a right sampler exceeds the bound of the test: 1e-6.
const SURPRISE: f64 = 13.8;
/// Temperature of the draws from few tokens.
const TEMPERATURE: f64 = 0.7;

/// Draws the token after one prompt with many seeds: from all tokens, and from the most likely ones at another
/// temperature. Compares counts with the engine's own probabilities for that prompt by Pearson's chi-square. On a CPU
/// the result is always the same.
pub fn samples_follow_their_probabilities(engine: &mut impl StepEngine, cases: &[Case]) {
    // The prompt whose next token is least certain in the reference.
    let best = |case: &&Case| case.top20[0].logprobs[0];
    let case = cases.iter().min_by(|a, b| best(a).total_cmp(&best(b))).unwrap();
    let reported = GenerateRequest { logprobs: Some(MAX_LOGPROBS), ..greedy(&case.prompt_ids, 1) };
    let top = run(engine, &[reported]).remove(0).tokens.remove(0).logprobs.unwrap().top;
    let weight = |temperature: f64| move |&(id, logprob): &(u32, f32)| (id, (f64::from(logprob) / temperature).exp());

    let listed: Vec<_> = top.iter().map(weight(1.0)).collect();
    let params = |seed| SamplingParams::new(1.0, 0, 1.0, 0.0, seed);
    check("all tokens", &draws(engine, case, params), &listed);

    // Cuts at the largest gap between neighbours, so that another batch does not change which tokens are kept.
    let gap = |k: &usize| top[k - 1].1 - top[*k].1;
    let kept = (2..10).max_by(|a, b| gap(a).total_cmp(&gap(b))).unwrap();
    let weights: Vec<_> = top[..kept].iter().map(weight(TEMPERATURE)).collect();
    let sum: f64 = weights.iter().map(|(_, weight)| weight).sum();
    let listed: Vec<_> = weights.into_iter().map(|(id, weight)| (id, weight / sum)).collect();
    let params = |seed| SamplingParams::new(TEMPERATURE as f32, kept as u32, 1.0, 0.0, seed);
    let ids = draws(engine, case, params);
    assert!(ids.iter().all(|id| listed.iter().any(|(listed, _)| listed == id)), "top-k {kept}: {ids:?}");
    check(&format!("the {kept} most likely tokens"), &ids, &listed);
}

/// The first token of each seed.
fn draws<E>(engine: &mut impl StepEngine, case: &Case, params: impl Fn(u64) -> Result<SamplingParams, E>) -> Vec<u32>
where
    E: std::fmt::Debug,
{
    let request = |seed| GenerateRequest { sampling: params(seed).unwrap(), ..greedy(&case.prompt_ids, 1) };
    let requests: Vec<_> = (0..SEEDS as u64).map(request).collect();
    run(engine, &requests).iter().map(|output| output.tokens[0].id).collect()
}

/// Pearson's statistic of `ids` against the `listed` probabilities.
///
/// The bound is that of Laurent and Massart (2000): a chi-square variable with k degrees of freedom exceeds
/// `k + 2 sqrt(k x) + 2 x` with a probability of at most `exp(-x)`.
fn check(what: &str, ids: &[u32], listed: &[(u32, f64)]) {
    let n = ids.len() as f64;
    let alone = listed.iter().filter(|(_, probability)| n * probability >= MIN_EXPECTED);
    let (mut statistic, mut bins, mut rest, mut left) = (0.0, 0.0, ids.len(), n);
    for (id, probability) in alone {
        let (count, expected) = (ids.iter().filter(|drawn| *drawn == id).count(), n * probability);
        statistic += (count as f64 - expected).powi(2) / expected;
        (bins, rest, left) = (bins + 1.0, rest - count, left - expected);
    }
    if left >= MIN_EXPECTED {
        statistic += (rest as f64 - left).powi(2) / left;
        bins += 1.0;
    }
    let freedom: f64 = bins - 1.0;
    let bound = freedom + 2.0 * (freedom * SURPRISE).sqrt() + 2.0 * SURPRISE;
    println!("{what}: chi-square {statistic:.1} with {freedom} degrees of freedom, at most {bound:.1}");
    assert!(freedom >= 1.0, "{what}: one token is nearly certain");
    assert!(statistic <= bound, "{what}: chi-square {statistic} with {freedom} degrees of freedom");
}
