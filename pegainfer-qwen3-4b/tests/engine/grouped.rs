//! Checkpoints with group-quantised weights against reference outputs of their dequantised weights in f32.

use crate::support::{Family, Fixture, Limits, RANKS, best, bundled_model, e2e, engine, engine_on, options};
use pegainfer_qwen3_4b::config::Config;
use pegainfer_runtime::{LoadOptions, Model, ModelBytes, load};

/// transformers in bf16 changes tokens at margins up to 0.065 for these checkpoints, and its log-probabilities are off by
/// up to 0.33.
const LIMITS: Limits = Limits { margin: 0.1, mean: 0.03, max: 0.35, close: 0.1 };

const AWQ: &str = "qwen3-tiny-256-awq-g128";
const W4A16: &str = "qwen3-tiny-256-w4a16-g128";

fn under_test(name: &str) -> (Fixture, LoadOptions) {
    let fixture = Fixture { limits: LIMITS, ..Fixture::bundled(name) };
    (fixture, LoadOptions { model_path: bundled_model(name), ..options() })
}

#[test]
fn awq_answers_as_its_dequantised_weights() {
    let (fixture, options) = under_test(AWQ);
    e2e::greedy_text_equals_the_reference(&fixture, |target| engine(target, &options));
}

#[test]
fn compressed_tensors_with_ignored_modules_answer_as_their_dequantised_weights() {
    let (fixture, options) = under_test(W4A16);
    e2e::greedy_text_equals_the_reference(&fixture, |target| engine(target, &options));
}

/// Two ranks cut 768 columns of the MLP between groups of 128.
#[test]
fn ranks_share_groups_and_refuse_to_divide_them() {
    let (fixture, options) = under_test(AWQ);
    e2e::greedy_text_equals_the_reference(&fixture, |target| engine_on(RANKS[0], target, &options));
    let error = load::<Family>(best().execs(4), &options, &mut |_, _| {}).unwrap_err().to_string();
    assert!(error.contains("down_proj") && error.contains("multiples of 128"), "{error}");
}

#[test]
fn a_plan_counts_the_bytes_that_are_loaded() {
    for name in [AWQ, W4A16] {
        let (_, options) = under_test(name);
        let config = Family::load_config(&options.model_path).unwrap();
        let mut loaded = 0;
        load::<Family>(best().execs(1), &options, &mut |bytes, _| loaded += bytes).unwrap();
        let bytes = |config: &Config| ModelBytes::of::<Family>(config).unwrap().weights;
        let (grouped, plain) = (bytes(&config), bytes(&Config { quantization: None, ..config.clone() }));
        assert_eq!(loaded, grouped, "{name}");
        // The embedding, 2.1 MB, and the ignored modules of one checkpoint stay bf16.
        assert!(plain > 3 * (grouped - 2_100_000), "{name}: {grouped} of {plain}");
        let dummy = LoadOptions { dummy_seed: Some(1), ..options };
        let mut loaded = 0;
        load::<Family>(best().execs(1), &dummy, &mut |bytes, _| loaded += bytes).unwrap();
        assert_eq!(loaded, grouped, "dummy weights have the formats of the checkpoint");
    }
}
