//! The real engine against reference outputs, with the roundings of activations and keys switched off: then it computes
//! what transformers computes in f32, and must agree everywhere to f32 noise.

#![cfg(feature = "deepseek-v4")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use pegainfer_core::engine::{FinishReason, StepEngine};
use pegainfer_deepseek_v4::numerics::Numerics;
use support::{engine, fixture, greedy, logits, options, run};

/// Largest difference from a log-probability of the reference, nats.
const TOLERANCE: f64 = 1e-3;
/// Nats between the reference's best two tokens above which the engine must agree.
const MARGIN: f64 = 2e-3;

/// Every step of every case, each with the reference's own tokens before it.
#[test]
fn every_step_agrees_with_the_reference() {
    let mut engine = engine(1, &options(Numerics::F32));
    let (mut steps, mut worst) = (0, 0f64);
    for case in &fixture().cases {
        let text = case.text();
        let rows = logits(&mut engine, &text[..text.len() - 1], 1024, case.greedy_ids.len());
        for (i, row) in rows.iter().enumerate() {
            steps += 1;
            let best = (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
            assert!(case.margins[i] < MARGIN || best as u32 == case.greedy_ids[i], "{}, step {i}", case.name);
            for (id, logprob) in case.top20.get(i).iter().flat_map(|top| top.ids.iter().zip(&top.logprobs)) {
                let error = (f64::from(row[*id as usize]) - logprob).abs();
                assert!(error < TOLERANCE, "{}, step {i}, token {id}: off by {error}", case.name);
                worst = worst.max(error);
            }
        }
    }
    println!("{steps} steps, the largest error of a log-probability is {worst:.2e}");
    assert!(steps >= 500, "the fixture tests nothing");
}

/// The engine's own greedy text, all cases in one batch.
#[test]
fn greedy_text_equals_the_reference() {
    let fixture = fixture();
    let mut engine = engine(1, &options(Numerics::F32));
    let requests: Vec<_> = fixture.cases.iter().map(|c| greedy(&c.prompt_ids, c.greedy_ids.len())).collect();
    for (case, output) in fixture.cases.iter().zip(run(&mut engine, &requests)) {
        let decided = case.margins.iter().position(|&m| m <= MARGIN).unwrap_or(case.margins.len());
        assert_eq!(output.ids()[..decided], case.greedy_ids[..decided], "{}", case.name);
        assert_eq!(output.end.unwrap().0, FinishReason::Length);
    }
    let stats = engine.stats();
    assert_eq!((stats.running, stats.kv_blocks_free), (0, stats.kv_blocks_total));
}
