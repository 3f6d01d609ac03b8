//! Several ranks give what one gives, up to the rounding of their sums, and the same bits however requests are
//! scheduled.

use crate::support::graphs::ROWS;
use crate::support::invariance::{Alone, DRIFT};
use crate::support::speculation::oracle;
use crate::support::{
    Family, RANKS, TIGHT_BLOCKS, Target, best, e2e, engine_on, fixture, graphs, model_path, options, rank_counts,
    requests,
};
use pegainfer_core::engine::{GenerateRequest, StepEngine};
use pegainfer_core::parallel::Shard;
use pegainfer_core::sampling::SamplingParams;
use pegainfer_core::weights::{Checkpoint, Source};
use pegainfer_runtime::{Executor, LoadOptions, Model, ModelBytes, Overrides, load, load_rank_weights, padded, ragged};
use std::path::Path;

/// Bytes of all tensors of the checkpoint, and bytes that were read of them.
fn stored_and_read(checkpoint: &Checkpoint) -> (u64, u64) {
    let bytes = |name| {
        let (dtype, shape) = checkpoint.describe(name).unwrap();
        (shape.iter().product::<usize>() * dtype.bitsize() / 8) as u64
    };
    (checkpoint.names().map(bytes).sum(), checkpoint.bytes_read())
}

/// Only small vectors that are converted while they are loaded are read by every rank.
#[test]
fn several_ranks_read_the_checkpoint_once() {
    for ranks in rank_counts(RANKS) {
        let (config, source) = (Family::load_config(&model_path()).unwrap(), Source::open(&model_path()).unwrap());
        let mut parts: Vec<_> = best().execs(ranks).into_iter().zip(Shard::all(ranks)).collect();
        assert_eq!(load_rank_weights::<Family>(&mut parts, &config, &source, &mut |_| {}).unwrap().len(), ranks);
        let Source::Checkpoint(checkpoint) = &source else { panic!("it is a checkpoint") };
        let (stored, read) = stored_and_read(checkpoint);
        assert!(read <= stored + stored / 100, "{ranks} ranks read {read} of {stored} bytes");
    }
}

/// Every step's tokens and residual streams are compared between the ranks, bit for bit.
fn checked() -> LoadOptions {
    LoadOptions { check_ranks: true, ..options() }
}

/// Bytes of a KV block of one of `ranks` ranks of the checkpoint in `dir`.
fn block_bytes(dir: &Path, ranks: usize) -> u64 {
    let config = Family::load_config(dir).unwrap();
    ModelBytes::of::<Family>(&Family::shard(&config, Shard { rank: 0, ranks }).unwrap()).unwrap().block()
}

#[test]
fn every_step_of_several_ranks_agrees_with_the_reference() {
    for ranks in rank_counts(RANKS) {
        let engine = |target| engine_on(ranks, target, &checked());
        e2e::every_step_agrees(&fixture(), engine, |_, case| case.top20.len().min(4), 20);
        e2e::greedy_text_equals_the_reference(&fixture(), engine);
    }
}

/// FP8 weights are cut at their blocks, so that all ranks together have the bits of one.
#[test]
fn fp8_weights_and_fp8_kv_of_several_ranks_agree_with_those_of_one() {
    let overrides = Overrides {
        quantization: Some(pegainfer_runtime::AtLoad::Fp8),
        kv_dtype: pegainfer_kernels::ops::KvDType::Fp8,
        ..Overrides::default()
    };
    let options = LoadOptions { overrides, ..checked() };
    // Longer texts leave the common path at different close calls.
    let short = |request: GenerateRequest| GenerateRequest {
        max_tokens: 2,
        sampling: SamplingParams::greedy(),
        logits_processors: None,
        ..request
    };
    let requests: Vec<_> = requests().into_iter().map(short).collect();
    for ranks in rank_counts(RANKS) {
        let loaded = load::<Family>(best().execs(ranks), &options, &mut |_, _| {});
        if let Err(error) = &loaded {
            assert!(error.to_string().contains("cannot share"), "{error}");
            continue;
        }
        let one = Alone::new(&mut engine_on(1, best(), &options), Target::Cuda, requests.clone());
        one.holds(&format!("{ranks} ranks"), &mut loaded.unwrap().engine);
    }
}

#[test]
fn a_request_gives_the_same_bits_however_it_is_scheduled() {
    scheduling_changes_no_bit(RANKS, &options(), DRIFT);
}

/// Checks engines of each number of ranks, loaded with `options`: requests alone, together, cached, preempted and
/// drafted give the same bits, and so do all ranks; on a GPU, log-probabilities within `drift`.
pub fn scheduling_changes_no_bit(ranks: &[usize], options: &LoadOptions, drift: f32) {
    let checked = LoadOptions { check_ranks: true, ..options.clone() };
    for ranks in rank_counts(ranks) {
        let engine = |options: &LoadOptions| engine_on(ranks, best(), options);
        let mut alone = Alone::new(&mut engine(&checked), best(), requests());
        alone.drift = drift;
        let many = alone.cycle(32);
        many.holds_cold_and_warm(&mut engine(&checked));
        let mixed = LoadOptions { max_num_batched_tokens: Some(48), ..checked.clone() };
        let tight = LoadOptions {
            kv_cache_bytes: Some(TIGHT_BLOCKS * block_bytes(&checked.model_path, ranks)),
            max_num_batched_tokens: Some(64),
            ..checked.clone()
        };
        many.holds_mixed_and_preempted(|| engine(&mixed), || engine(&tight));
        let texts = alone.outputs.iter().zip(requests()).map(|(output, request)| {
            let generated = output.tokens.iter().map(|token| token.id);
            request.prompt.iter().copied().chain(generated).collect()
        });
        let drafts = LoadOptions { speculation: oracle(3, texts.collect()), ..checked.clone() };
        let mut drafting = engine(&drafts);
        alone.holds("drafts", &mut drafting);
        assert!(drafting.stats().speculation.accepted_tokens() > 0);
    }
}

#[test]
fn graphs_of_several_ranks_equal_launches() {
    graphs_equal_launches(RANKS, &options());
}

/// Checks engines of each number of ranks, loaded with `options`, see [`graphs::graph_equals_eager`].
pub fn graphs_equal_launches(ranks: &[usize], options: &LoadOptions) {
    let model = graphs::Model {
        ragged: ragged::<Family>,
        padded: padded::<Family>,
        replays: |executor: &Executor<_>| executor.graph_replays().decode,
    };
    for ranks in rank_counts(ranks) {
        let load = |cuda_graph| {
            engine_on(ranks, best(), &LoadOptions { cuda_graph, max_num_seqs: Some(ROWS), ..options.clone() })
        };
        graphs::graph_equals_eager(load, &model);
    }
}

#[test]
fn numbers_that_do_not_divide_are_refused_with_those_that_do() {
    let loaded =
        load::<Family>(best().execs(1), &LoadOptions { loop_back_ranks: Some(3), ..options() }, &mut |_, _| {});
    let error = loaded.unwrap_err().to_string();
    assert!(error.contains("3 ranks cannot share") && error.contains("--tensor-parallel-size takes 1, 2"), "{error}");
}
