use std::collections::BTreeMap;

use super::*;
use pegainfer_core::sampling::SamplingParams;

/// A number in [0, 1).
fn uniform(seed: u64, position: u64) -> f64 {
    rng::bits(seed, position) as f64 / 2f64.powi(64)
}

/// The token at `position`.
fn draw(logits: &[f32], params: &SamplingParams, position: u64, scratch: &mut SampleScratch) -> u32 {
    sample_row(logits, &Draw::new(params, position, None), scratch)
}

/// Logits with ties, of about the spread of a language model's.
fn logits(vocab: usize, seed: u64) -> Vec<f32> {
    let value = |i| {
        let normal: f64 = (0..6).map(|j| uniform(seed, i * 6 + j) - 0.5).sum();
        (normal * 48.0).round() as f32 / 8.0
    };
    (0..vocab as u64).map(value).collect()
}

/// The kept tokens with their probabilities, in f64, straight from the definition.
fn reference(logits: &[f32], params: &SamplingParams) -> BTreeMap<u32, f64> {
    let mut kept: Vec<(f32, u32)> = logits.iter().copied().zip(0..).filter(|(x, _)| !x.is_nan()).collect();
    kept.sort_by(|a, b| b.0.partial_cmp(&a.0).unwrap().then(a.1.cmp(&b.1)));
    let max = f64::from(kept[0].0);
    let weight = |x: f32| ((f64::from(x) - max) / f64::from(params.temperature())).exp();
    kept.retain(|(x, _)| weight(*x) >= f64::from(params.min_p()));
    if params.top_k() > 0 {
        kept.truncate(params.top_k() as usize);
    }
    let sum = |kept: &[(f32, u32)]| kept.iter().map(|(x, _)| weight(*x)).sum::<f64>();
    if params.top_p() < 1.0 {
        let (total, mut reached, mut keep) = (sum(&kept), 0.0, 0);
        while reached < f64::from(params.top_p()) * total {
            reached += weight(kept[keep].0);
            keep += 1;
        }
        kept.truncate(keep);
    }
    let total = sum(&kept);
    kept.iter().map(|(x, id)| (*id, weight(*x) / total)).collect()
}

fn combinations(seed: u64) -> impl Iterator<Item = SamplingParams> {
    let values = [(0.0, 0), (0.0, 7), (0.02, 0), (0.02, 25)];
    [0.3, 1.0, 2.5].into_iter().flat_map(move |t| {
        values.into_iter().flat_map(move |(min_p, k)| {
            [1.0, 0.95, 0.5, 1e-6].into_iter().map(move |p| SamplingParams::new(t, k, p, min_p, seed).unwrap())
        })
    })
}

#[test]
fn the_cut_keeps_what_the_definition_keeps() {
    for (vocab, seed) in [(1, 0), (63, 1), (64, 2), (65, 3), (1000, 4), (151_936, 5)] {
        let mut logits = logits(vocab, seed);
        if vocab > 2 {
            logits[vocab / 2] = f32::NAN;
            logits[1] = f32::NEG_INFINITY;
        }
        let scratch = &mut SampleScratch::new(vocab);
        for params in combinations(seed) {
            let (max, draw) = (index(&logits, scratch), Draw::new(&params, 0, None));
            let cut = truncate(&logits, &draw, max, &Weight::new(max, draw.scale), scratch);
            let kept: Vec<u32> = (0..vocab as u32).filter(|&id| cut.keeps(logits[id as usize], id)).collect();
            let expected: Vec<u32> = reference(&logits, &params).into_keys().collect();
            assert_eq!(kept.len(), expected.len(), "{vocab} {params:?}");
            assert_eq!(kept, expected, "{vocab} {params:?}");
        }
    }
}

#[test]
fn frequencies_follow_the_definition() {
    const DRAWS: u64 = 20_000;
    let logits = logits(150, 11);
    let scratch = &mut SampleScratch::new(logits.len());
    for params in combinations(9) {
        let mut counts = BTreeMap::<u32, u64>::new();
        (0..DRAWS).for_each(|i| *counts.entry(draw(&logits, &params, i, scratch)).or_default() += 1);
        let expected = reference(&logits, &params);
        assert!(counts.keys().all(|id| expected.contains_key(id)), "{params:?}");
        // Tokens expected less than 8 times share one cell, so that chi-square is near its limit distribution, with
        // mean `cells - 1` and variance `2 (cells - 1)`; the bound is seven standard deviations.
        let (mut chi, mut cells, mut rest) = (0.0, 0, (0.0, 0.0));
        for (id, p) in expected {
            let (want, got) = (p * DRAWS as f64, counts.get(&id).copied().unwrap_or(0) as f64);
            if want < 8.0 {
                rest = (rest.0 + want, rest.1 + got);
            } else {
                chi += (got - want).powi(2) / want;
                cells += 1;
            }
        }
        if rest.0 >= 8.0 {
            chi += (rest.1 - rest.0).powi(2) / rest.0;
            cells += 1;
        }
        let freedom = f64::from(cells - 1);
        assert!(chi <= freedom + 7.0 * (2.0 * freedom).sqrt() + 1e-9, "{params:?}: {chi} with {freedom}");
    }
}

#[test]
fn every_kept_token_is_reachable() {
    let logits: Vec<f32> = (0..200).map(|i| (i % 3) as f32 * 0.25).collect();
    let params = SamplingParams::new(1.0, 150, 0.9, 0.0, 3).unwrap();
    let scratch = &mut SampleScratch::new(logits.len());
    let drawn: std::collections::BTreeSet<u32> = (0..20_000).map(|i| draw(&logits, &params, i, scratch)).collect();
    assert_eq!(drawn, reference(&logits, &params).into_keys().collect());
}

#[test]
fn greedy_is_the_lowest_id_of_the_largest_logit() {
    let scratch = &mut SampleScratch::new(300);
    let mut greedy = |logits: &[f32]| draw(logits, &SamplingParams::greedy(), 0, scratch);
    for seed in 0..50 {
        let mut logits = logits(300, seed);
        logits[rng::bits(seed, 0) as usize % 300] = f32::NAN;
        let max = logits.iter().copied().fold(f32::MIN, f32::max);
        assert_eq!(greedy(&logits) as usize, logits.iter().position(|&x| x == max).unwrap());
    }
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    assert_eq!(greedy(&[nan, -inf, 3.0, 3.0, nan]), 2);
    assert_eq!(greedy(&[nan, inf, inf]), 1);
    assert_eq!(greedy(&[nan, nan]), 0);
    let mut late = vec![nan; 64];
    late.extend([nan, -inf]);
    assert_eq!(greedy(&late), 65);
}

#[test]
fn edge_cases_draw_a_possible_token() {
    let scratch = &mut SampleScratch::new(200);
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for params in combinations(1) {
        let mut one = vec![-inf; 200];
        one[130] = -7.0;
        one[131] = nan;
        for position in 0..20 {
            assert_eq!(draw(&one, &params, position, scratch), 130);
            assert_eq!(draw(&[0.5], &params, position, scratch), 0);
            assert_eq!(draw(&[nan, nan], &params, position, scratch), 0);
            assert_eq!(draw(&[nan, -inf, -inf], &params, position, scratch), 1);
            assert!([1, 3].contains(&draw(&[0.0, inf, nan, inf], &params, position, scratch)));
            assert_eq!(draw(&[f32::MIN, f32::MAX], &params, position, scratch), 1);
        }
    }
    let params = |t, k| SamplingParams::new(t, k, 1.0, 0.0, 5).unwrap();
    let hot: std::collections::BTreeSet<u32> =
        (0..2000).map(|i| draw(&[0.0, 5.0, -5.0], &params(100.0, 1000), i, scratch)).collect();
    assert_eq!(hot.len(), 3);
    for cold in [1e-3, f32::MIN_POSITIVE, 1e-45] {
        assert!((0..50).all(|i| draw(&[0.0, 5.0, 4.9], &params(cold, 0), i, scratch) == 1));
    }
}

#[test]
fn a_batch_gives_what_its_rows_give() {
    let (rows, vocab) = (13, 500);
    let all: Vec<f32> = (0..rows).flat_map(|row| logits(vocab, row as u64)).collect();
    let specs: Vec<(SamplingParams, u64)> = combinations(4).step_by(3).zip(70..).take(rows).collect();
    let scratch = &mut SampleScratch::new(vocab);
    let alone: Vec<u32> =
        (0..rows).map(|r| draw(&all[r * vocab..][..vocab], &specs[r].0, specs[r].1, scratch)).collect();
    let draws: Vec<u32> = specs.iter().flat_map(|(params, at)| Draw::new(params, *at, None).words()).collect();
    for threads in [1, 2, 5, 20] {
        let mut scratch: Vec<_> = (0..threads).map(|_| SampleScratch::new(vocab)).collect();
        let mut out = vec![u32::MAX; rows];
        sample_rows(&all, vocab, &draws, &mut scratch, &mut out);
        assert_eq!(out, alone);
    }
    sample_rows(&[], vocab, &[], &mut [SampleScratch::default()], &mut []);
}

#[test]
fn logprobs_match_f64() {
    for (vocab, seed) in [(1, 0), (70, 1), (151_936, 2)] {
        let logits = logits(vocab, seed);
        let sum = logits.iter().map(|&x| f64::from(x).exp()).sum::<f64>().ln();
        let mut order: Vec<u32> = (0..vocab as u32).collect();
        order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
        for (chosen, top_n) in [(0, 0), (vocab / 2, 1), (vocab - 1, 20), (0, 100)] {
            let (logprob, rank, top) = logprobs_row(&logits, chosen as u32, top_n);
            let exact = |id: u32| f64::from(logits[id as usize]) - sum;
            assert!((f64::from(logprob) - exact(chosen as u32)).abs() < 2e-6, "{logprob}");
            assert_eq!(rank as usize, 1 + logits.iter().filter(|x| **x > logits[chosen]).count());
            let ids: Vec<u32> = top.iter().map(|(id, _)| *id).collect();
            assert_eq!(ids, order[..top_n.min(vocab)]);
            assert!(top.iter().all(|(id, p)| (f64::from(*p) - exact(*id)).abs() < 2e-6));
        }
    }
    let (logprob, rank, top) = logprobs_row(&[f32::NAN, 1.0, f32::NEG_INFINITY, 1.0], 0, 4);
    assert_eq!((logprob, rank), (f32::NEG_INFINITY, 3));
    assert_eq!(top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 3, 2]);
    assert!((top[0].1 + 2f32.ln()).abs() < 1e-6 && top[2].1 == f32::NEG_INFINITY);
}
