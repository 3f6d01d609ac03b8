//! FP8 weights on the CPU: checkpoints, and rounding at load.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../pegainfer-core/tests/engines/fp8.rs"]
mod fp8;
mod support;

use fp8::{Checkpoint, Scales};
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_kernels::runtime::{LoadOptions, Model, Overrides, load};
use pegainfer_qwen35_4b::{Engine, Qwen35};
use std::path::Path;
use support::{fixture, model_path, options};

/// The engine of the checkpoint in `dir`, whose weights are rounded at load if `fp8`.
fn engine(dir: &Path, fp8: bool, max_num_batched_tokens: usize) -> Engine {
    let options = LoadOptions {
        model_path: dir.to_owned(),
        overrides: Overrides { fp8, ..Overrides::default() },
        max_num_batched_tokens: Some(max_num_batched_tokens),
        ..options()
    };
    load::<Qwen35>(Exec::cpu(Isa::best(), Some(2)).unwrap(), &options, &mut |_, _| {}).unwrap().engine
}

#[test]
fn a_checkpoint_gives_what_its_dequantised_weights_give() {
    fp8::equals_dequantized(&model_path(), &fixture().cases, |dir| engine(dir, false, 1024));
}

#[test]
fn rounding_at_load_gives_the_bits_of_the_checkpoint() {
    fp8::equals_quantized_at_load(&model_path(), &fixture().cases, |dir, fp8| engine(dir, fp8, 1024));
}

#[test]
fn chunks_and_batches_give_the_same_bits() {
    let load = |tokens| engine(&model_path(), true, tokens);
    fp8::is_batch_invariant(&fixture().cases, &mut load(1024), &mut load(48));
}

#[test]
fn weights_take_the_memory_that_config_json_promises() {
    let file = Checkpoint::fp8(&model_path(), "bytes", Scales::Exact, "nothing");
    for (dir, overrides) in
        [(&file.0, Overrides::default()), (&model_path(), Overrides { fp8: true, ..Overrides::default() })]
    {
        for dummy_seed in [None, Some(3)] {
            let options =
                LoadOptions { model_path: dir.clone(), overrides: overrides.clone(), dummy_seed, ..options() };
            let (mut loaded, mut total) = (0, 0);
            let exec = Exec::cpu(Isa::best(), Some(2)).unwrap();
            load::<Qwen35>(exec, &options, &mut |bytes, all| (loaded, total) = (loaded + bytes, all)).unwrap();
            assert_eq!(loaded, total);
            let bf16 = Qwen35::info(&Qwen35::load_config(&model_path()).unwrap()).weight_bytes;
            assert!(total < bf16 * 3 / 4, "{total} of {bf16}");
        }
    }
}

#[test]
fn a_weight_without_scales_is_refused_by_name() {
    let lost = Checkpoint::fp8(&model_path(), "lost", Scales::Exact, "layers.1.mlp.gate_proj.weight");
    let options = LoadOptions { model_path: lost.0.clone(), ..options() };
    let error =
        load::<Qwen35>(Exec::cpu(Isa::best(), Some(1)).unwrap(), &options, &mut |_, _| {}).unwrap_err().to_string();
    assert!(error.contains("layers.1.mlp.gate_proj.weight is F8_E4M3, but the checkpoint has no"), "{error}");
}
