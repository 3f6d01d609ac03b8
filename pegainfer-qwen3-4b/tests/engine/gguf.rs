//! A GGUF file, by the rule of [`e2e`](crate::support::e2e): the reference computes in f32 with the file's values.

use crate::support::{Fixture, Target, best, bundled_model, e2e, engine, options};
use pegainfer_core::exec::Exec;
use pegainfer_core::isa::Isa;
use pegainfer_qwen3_4b::{Qwen3, Qwen3Engine};
use pegainfer_runtime::{LoadOptions, Model, ModelBytes, load};
use std::path::PathBuf;

const NAME: &str = "qwen3-tiny-256-Q4_K_M";

fn folder() -> PathBuf {
    bundled_model("qwen3-tiny-256-gguf")
}

fn load_on(target: Target) -> Qwen3Engine {
    engine(target, &LoadOptions { model_path: folder(), ..options() })
}

#[test]
fn every_step_agrees_with_the_reference() {
    let fixture = Fixture::bundled(NAME);
    let steps = |target: Target, case: &crate::support::Case| {
        if target == best() { case.greedy_ids.len() } else { case.top20.len() }
    };
    e2e::every_step_agrees(&fixture, load_on, steps, 100);
}

#[test]
fn greedy_text_equals_the_reference_up_to_its_first_close_call() {
    e2e::greedy_text_equals_the_reference(&Fixture::bundled(NAME), load_on);
}

#[test]
fn the_folder_and_the_file_are_the_same_model() {
    let file = folder().join(format!("{NAME}.gguf"));
    let config = Qwen3::load_config(&file).unwrap();
    assert_eq!(Qwen3::load_config(&folder()).unwrap(), config);
    assert_eq!((config.layers, config.hidden_size, config.vocab_size, config.shape.head_dim), (6, 256, 4096, 128));
    assert_eq!((config.rms_norm_eps, config.rope.theta, config.tie_word_embeddings), (1e-6, 1e6, true));
    assert_eq!(config.eos_token_ids, [4089, 4087], "both tokens that end a text, although metadata names one");
    // Plans know the formats: the embedding in bf16 and, as the output matrix, in Q6_K.
    let bytes = ModelBytes::of::<Qwen3>(&config).unwrap().weights;
    let mut loaded = 0;
    let exec = Exec::cpu(Isa::best(), Some(2)).unwrap();
    let options = LoadOptions { model_path: file, ..options() };
    load::<Qwen3>(vec![exec], &options, &mut |bytes, _| loaded += bytes).unwrap();
    assert_eq!(loaded, bytes);
    let quantised = std::fs::metadata(&options.model_path).unwrap().len();
    assert!((quantised..quantised + 2 * 4096 * 256).contains(&bytes), "{bytes} of a file of {quantised}");
}
