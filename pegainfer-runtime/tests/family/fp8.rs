//! FP8 weights on the CPU: checkpoints, and rounding at load; and the FP8 KV cache.

use crate::support::fp8::{self, Checkpoint, Scales};
use crate::support::invariance::Alone;
use crate::support::{
    Engine, Family, SMALL_STATE_CACHE, TIGHT_BLOCKS, Target, engine, fixture, model_path, options, requests,
};
use pegainfer_core::engine::StepEngine;
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_kernels::ops::KvDType;
use pegainfer_runtime::{AtLoad, LoadOptions, Model, ModelBytes, Overrides, load};
use std::path::Path;

/// The engine of the checkpoint in `dir`, whose weights are rounded at load if `fp8`.
fn load_from(dir: &Path, fp8: bool, max_num_batched_tokens: usize) -> Engine {
    let options = LoadOptions {
        model_path: dir.to_owned(),
        overrides: Overrides { quantization: fp8.then_some(AtLoad::Fp8), ..Overrides::default() },
        max_num_batched_tokens: Some(max_num_batched_tokens),
        ..options()
    };
    load::<Family>(vec![Exec::cpu(Isa::best(), Some(2)).unwrap()], &options, &mut |_, _| {}).unwrap().engine
}

#[test]
fn a_checkpoint_gives_what_its_dequantised_weights_give() {
    fp8::equals_dequantized(&model_path(), &fixture().cases, |dir| load_from(dir, false, 1024));
}

#[test]
fn rounding_at_load_gives_the_bits_of_the_checkpoint() {
    fp8::equals_quantized_at_load(&model_path(), &fixture().cases, |dir, fp8| load_from(dir, fp8, 1024));
}

#[test]
fn chunks_and_batches_give_the_same_bits() {
    let load = |tokens| load_from(&model_path(), true, tokens);
    fp8::is_batch_invariant(&fixture().cases, &mut load(1024), &mut load(48));
}

#[test]
fn weights_take_the_memory_that_config_json_promises() {
    let file = Checkpoint::fp8(&model_path(), "bytes", Scales::Exact, "nothing");
    for (dir, overrides) in [
        (&file.0, Overrides::default()),
        (&model_path(), Overrides { quantization: Some(AtLoad::Fp8), ..Overrides::default() }),
    ] {
        for dummy_seed in [None, Some(3)] {
            let options =
                LoadOptions { model_path: dir.clone(), overrides: overrides.clone(), dummy_seed, ..options() };
            let (mut loaded, mut total) = (0, 0);
            let exec = Exec::cpu(Isa::best(), Some(2)).unwrap();
            load::<Family>(vec![exec], &options, &mut |bytes, all| (loaded, total) = (loaded + bytes, all)).unwrap();
            assert_eq!(loaded, total);
            let bf16 = ModelBytes::of::<Family>(&Family::load_config(&model_path()).unwrap()).unwrap().weights;
            assert!(total < bf16 * 3 / 4, "{total} of {bf16}");
        }
    }
}

#[test]
fn a_weight_without_scales_is_refused_by_name() {
    let lost = Checkpoint::fp8(&model_path(), "lost", Scales::Exact, "layers.1.mlp.gate_proj.weight");
    let options = LoadOptions { model_path: lost.0.clone(), ..options() };
    let error = load::<Family>(vec![Exec::cpu(Isa::best(), Some(1)).unwrap()], &options, &mut |_, _| {})
        .unwrap_err()
        .to_string();
    assert!(error.contains("layers.1.mlp.gate_proj.weight is F8_E4M3, but the checkpoint has no"), "{error}");
}

/// Options with an FP8 KV cache.
fn fp8_kv() -> LoadOptions {
    LoadOptions { overrides: Overrides { kv_dtype: KvDType::Fp8, ..Overrides::default() }, ..options() }
}

#[test]
fn an_fp8_kv_cache_is_near_bf16_and_has_more_tokens() {
    let target = Target::Cpu(Isa::best());
    let (mut bf16, mut fp8) = (engine(target, &options()), engine(target, &fp8_kv()));
    fp8::kv_cache_is_near(&fixture().cases, &mut bf16, &mut fp8);
    assert!(fp8.stats().kv_blocks_total > bf16.stats().kv_blocks_total * 9 / 5, "the same memory");
}

/// Runs on the fastest instruction set; the op tests cover the others.
#[test]
fn bits_of_an_fp8_kv_cache_do_not_depend_on_scheduling() {
    let target = Target::Cpu(Isa::best());
    let alone = Alone::new(&mut engine(target, &fp8_kv()), target, requests());
    let chunks = LoadOptions { max_num_seqs: Some(1), max_num_batched_tokens: Some(7), ..fp8_kv() };
    alone.holds("chunks of 7", &mut engine(target, &chunks));
    let many = alone.cycle(32);
    let config = Family::load_config_with(&model_path(), &fp8_kv().overrides).unwrap();
    let pool = TIGHT_BLOCKS * ModelBytes::of::<Family>(&config).unwrap().block();
    let mixed = LoadOptions { max_num_batched_tokens: Some(48), state_cache_bytes: SMALL_STATE_CACHE, ..fp8_kv() };
    let tight = LoadOptions { kv_cache_bytes: Some(pool), max_num_batched_tokens: Some(64), ..fp8_kv() };
    many.holds("mixed steps", &mut engine(target, &mixed));
    // Also with a warm prefix cache, and preempted.
    let with = |options: &LoadOptions, speculation| engine(target, &LoadOptions { speculation, ..options.clone() });
    many.holds_with_drafts(|drafts| with(&fp8_kv(), drafts), |drafts| with(&tight, drafts));
}
