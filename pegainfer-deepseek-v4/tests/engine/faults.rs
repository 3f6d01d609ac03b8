//! A rank that fails in the middle of a step ends the step of all ranks and is named. So is a rank with different
//! results, if ranks are compared. A slow rank is waited for.

use crate::support::{Target, best, model_path, rank_counts};
use half::bf16;
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::Shard;
use pegainfer_core::tensor::DType;
use pegainfer_core::weights::Source;
use pegainfer_deepseek_v4::config::Config;
use pegainfer_deepseek_v4::weights::{Router, Weights};
use pegainfer_deepseek_v4::{DeepSeekV4, Options, RankConfig, plan};
use pegainfer_runtime::{Bounds, Executor, StepSize, load_rank_weights};
use std::time::{Duration, Instant};

/// An executor of two ranks, the second modified by `change`; `None` without two GPUs if the ranks run on GPUs.
fn two_ranks(change: impl FnOnce(&mut Exec, &mut Weights)) -> Option<Executor<DeepSeekV4>> {
    if !rank_counts().contains(&2) {
        return None;
    }
    let config = RankConfig::new(Config::load(&model_path()).unwrap(), Options::default());
    let source = Source::open(&model_path()).unwrap();
    let mut ranks: Vec<_> = best().execs(2).into_iter().zip(Shard::all(2)).collect();
    let mut weights = load_rank_weights::<DeepSeekV4>(&mut ranks, &config, &source, &mut |_| {}).unwrap();
    change(&mut ranks[1].0, &mut weights[1]);
    let size = StepSize { tokens: 64, rows: 2, samples: 2, context: 256 };
    let bounds = Bounds { slots: 4, ..Bounds::exact(size, 8) };
    let ranks = ranks.into_iter().zip(weights).map(|((exec, shard), weights)| (exec, shard, weights)).collect();
    let mut executor = Executor::new(config, ranks, &bounds).unwrap();
    executor.check_ranks();
    Some(executor)
}

/// The error of a step; the next step has the same one.
fn error_of(change: impl FnOnce(&mut Exec, &mut Weights)) -> Option<String> {
    let (mut executor, step, start) = (two_ranks(change)?, plan::uniform(2, 8, 8), Instant::now());
    let error = executor.run(&step).unwrap_err().to_string();
    assert!(start.elapsed() < Duration::from_secs(60), "the other rank waited");
    assert_eq!(executor.run(&step).unwrap_err().to_string(), error, "no step runs after a failure");
    Some(error)
}

/// Fails in the second of five layers, after an exchange of the first.
#[test]
fn a_rank_that_fails_between_two_layers_ends_the_step() {
    let error = error_of(|exec, weights| {
        let narrow = exec.tensor("narrow", &[1, 1], DType::U32).unwrap();
        weights.layers[1].moe.router = Router::Hash(narrow);
    });
    assert!(error.as_ref().is_none_or(|error| error.starts_with("route: rank 1: narrow ")), "{error:?}");
}

/// A rank that leaves out a layer is at another exchange than the others.
#[test]
fn a_rank_that_is_out_of_step_is_seen() {
    let error = error_of(|_, weights| weights.layers.truncate(4));
    // On GPUs its part of an exchange never arrives.
    let reason = if best() == Target::Cuda { "rank 0" } else { "out of step" };
    assert!(error.as_ref().is_none_or(|error| error.contains(reason)), "{error:?}");
}

/// A weight of a norm of the third layer is twice as large, or half as large.
#[test]
fn a_rank_that_computes_something_else_is_seen() {
    let error = error_of(|exec, weights| {
        let norm = &mut weights.layers[2].attn.kv_norm;
        let mut values = vec![bf16::ZERO; norm.elements()];
        exec.read(norm, 0, &mut values).unwrap();
        values[100] = bf16::from_bits(values[100].to_bits() ^ (1 << 7));
        exec.write(norm, 0..values.len(), |first, out| out.copy_from_slice(&values[first..][..out.len()])).unwrap();
    });
    let expected = "check_ranks: rank 1 and rank 0 differ in the state of layer 2";
    assert!(error.as_ref().is_none_or(|error| error == expected), "{error:?}");
}

/// Slow by five seconds, one in each of five layers: less than the timeout of the others.
#[test]
fn a_slow_rank_is_waited_for() {
    let step = plan::uniform(2, 8, 8);
    let run = |slow: Option<Duration>| {
        let change = |exec: &mut Exec, _: &mut Weights| {
            slow.into_iter().for_each(|time| exec.slow_down("route", time));
        };
        let mut executor = two_ranks(change)?;
        let start = Instant::now();
        Some((executor.run(&step).unwrap().tokens, start.elapsed()))
    };
    let (Some((expected, _)), Some((tokens, time))) = (run(None), run(Some(Duration::from_secs(1)))) else { return };
    assert_eq!(tokens, expected);
    assert!(time >= Duration::from_secs(5), "{time:?}");
}
