//! A rank that fails in the middle of a step ends the step of all ranks, and is named; so is one that computes something else, where
//! the ranks are compared.

#![cfg(feature = "deepseek-v4")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_core::tensor::{DType, Tensor};
use pegainfer_core::weights::Checkpoint;
use pegainfer_deepseek_v4::bounds::StepBounds;
use pegainfer_deepseek_v4::config::Config;
use pegainfer_deepseek_v4::executor::Executor;
use pegainfer_deepseek_v4::numerics::Numerics;
use pegainfer_deepseek_v4::plan;
use pegainfer_deepseek_v4::shard::Shard;
use pegainfer_deepseek_v4::weights::{Router, Source, Weights};
use std::time::{Duration, Instant};
use support::model_path;

/// The error of a step of two CPU ranks, of which `change` has changed the second; the next step has the same one.
fn error_of(change: impl FnOnce(&mut Weights, Tensor)) -> String {
    let config = Config::load(&model_path()).unwrap();
    let checkpoint = Checkpoint::open(&model_path()).unwrap();
    let exec = || Exec::cpu(Isa::best(), Some(1)).unwrap();
    let mut ranks: Vec<_> = Shard::all(&config, 2).unwrap().into_iter().map(|shard| (exec(), shard)).collect();
    let mut weights = Weights::load(&mut ranks, &config, Source::Checkpoint(&checkpoint), &mut |_| {}).unwrap();
    let small = ranks[1].0.tensor("small", &[1, config.experts_per_token], DType::U32).unwrap();
    change(&mut weights[1], small);
    let bounds =
        StepBounds { tokens: 64, rows: 2, samples: 2, drafts: 0, context: 256, slots: 4, pages: 8, graphs: false };
    let ranks = ranks.into_iter().zip(weights).map(|((exec, shard), weights)| (exec, shard, weights)).collect();
    let mut executor = Executor::new(config, Numerics::REFERENCE, ranks, bounds).unwrap();
    executor.check_ranks();
    let (step, start) = (plan::uniform(2, 8, 8), Instant::now());
    let error = executor.run(&step).unwrap_err().to_string();
    assert!(start.elapsed() < Duration::from_secs(60), "the other rank waited");
    assert_eq!(executor.run(&step).unwrap_err().to_string(), error, "no step runs after a failure");
    error
}

/// In the second of five layers, behind an exchange of the first.
#[test]
fn a_rank_that_fails_between_two_layers_ends_the_step() {
    let error = error_of(|weights, small| weights.layers[1].moe.router = Router::Hash(small));
    assert_eq!(error, "route: rank 1: a token has no row in the hash table");
}

/// A rank that leaves out a layer is at another exchange than the others.
#[test]
fn a_rank_that_is_out_of_step_is_seen() {
    let error = error_of(|weights, _| weights.layers.truncate(4));
    assert!(error.contains("out of step"), "{error}");
}

/// A weight of a norm of the third layer is twice as large, or half as large.
#[test]
fn a_rank_that_computes_something_else_is_seen() {
    let error = error_of(|weights, _| {
        let norm = &mut weights.layers[2].attn.kv_norm.host_mut::<bf16>()[100];
        *norm = bf16::from_bits(norm.to_bits() ^ (1 << 7));
    });
    assert_eq!(error, "check_ranks: rank 1 and rank 0 differ in the state of layer 2");
}
