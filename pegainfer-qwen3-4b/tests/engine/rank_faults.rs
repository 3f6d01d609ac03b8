//! A rank that fails in the middle of a step ends the step of all ranks and is named. So is a rank with different
//! results, if ranks are compared.

use crate::support::{best, model_path, rank_counts};
use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::Shard;
use pegainfer_core::tensor::DType;
use pegainfer_core::weights::Source;
use pegainfer_qwen3_4b::Qwen3;
use pegainfer_qwen3_4b::weights::Weights;
use pegainfer_runtime::{Bounds, Executor, Model, StepSize, load_rank_weights, uniform};
use std::time::{Duration, Instant};

/// The error of a step on two ranks, the second modified by `change`; the next step has the same one. `None` without
/// two GPUs if the ranks run on GPUs.
fn error_of(change: impl FnOnce(&mut Exec, &mut Weights)) -> Option<String> {
    if !rank_counts(&[2]).contains(&2) {
        return None;
    }
    let config = Qwen3::load_config(&model_path()).unwrap();
    let source = Source::open(&model_path()).unwrap();
    let mut ranks: Vec<_> = best().execs(2).into_iter().zip(Shard::all(2)).collect();
    let mut weights = load_rank_weights::<Qwen3>(&mut ranks, &config, &source, &mut |_| {}).unwrap();
    change(&mut ranks[1].0, &mut weights[1]);
    let ranks = ranks.into_iter().zip(weights).map(|((exec, shard), weights)| (exec, shard, weights)).collect();
    let size = StepSize { tokens: 64, rows: 2, samples: 2, context: 256 };
    let mut executor = Executor::<Qwen3>::new(config, ranks, &Bounds::exact(size, 32)).unwrap();
    executor.check_ranks();
    let (step, start) = (uniform::<Qwen3>(2, 8, 8), Instant::now());
    let error = executor.run(&step).unwrap_err().to_string();
    assert!(start.elapsed() < Duration::from_secs(60), "the other rank waited");
    assert_eq!(executor.run(&step).unwrap_err().to_string(), error, "no step runs after a failure");
    Some(error)
}

/// Fails in the first of six layers, after its first sum.
#[test]
fn a_rank_that_fails_between_two_layers_ends_the_step() {
    let error = error_of(|exec, weights| {
        weights.layers[1].input_norm = exec.tensor("narrow", &[1], DType::Bf16).unwrap();
    });
    assert!(error.as_ref().is_none_or(|error| error.starts_with("reduce_add_norm: rank 1: ")), "{error:?}");
}

/// A rank that leaves out a layer is at another exchange than the others.
#[test]
fn a_rank_that_is_out_of_step_is_seen() {
    let error = error_of(|_, weights| weights.layers.truncate(5));
    // On GPUs its part of an exchange never arrives.
    let reasons = ["rank 0", "rank 1", "out of step"];
    assert!(error.as_ref().is_none_or(|error| reasons.iter().any(|reason| error.contains(reason))), "{error:?}");
}

/// A weight of the final norm is twice as large, or half as large.
#[test]
fn a_rank_that_computes_something_else_is_seen() {
    let error = error_of(|exec, weights| {
        let norm = &mut weights.norm;
        let mut values = vec![bf16::ZERO; norm.elements()];
        exec.read(norm, 0, &mut values).unwrap();
        values[100] = bf16::from_bits(values[100].to_bits() ^ (1 << 7));
        exec.write(norm, 0..values.len(), |first, out| out.copy_from_slice(&values[first..][..out.len()])).unwrap();
    });
    let expected = "check_ranks: rank 1 and rank 0 differ in the output of the last layer";
    assert!(error.as_ref().is_none_or(|error| error == expected), "{error:?}");
}
