//! Four ranks, which the bundled checkpoint has too few heads for: a checkpoint with more of them. The reference is one
//! rank.

use crate::ranks::{graphs_equal_launches, scheduling_changes_no_bit};
use crate::support::invariance::DRIFT;
use crate::support::{BUNDLED, best, bundled_model, engine_on, fixture, greedy, options, rank_counts, run};
use pegainfer_core::engine::GenerateRequest;
use pegainfer_core::rng;
use pegainfer_runtime::LoadOptions;
use safetensors::tensor::TensorView;
use safetensors::{SafeTensors, serialize};
use serde_json::{Value, json};
use std::path::PathBuf;

/// Two ranks share the KV heads, four have a copy each; all share the heads of the delta rule.
const RANKS: &[usize] = &[2, 4];
/// Nats by which bf16 sums of several ranks may move a log-probability, on average and at most. A CPU with
/// AVX-512 needs 0.016 and 0.086.
const NOISE: (f32, f32) = (0.03, 0.15);
/// Parts of the names of tensors with a row, or a group of rows, for each head.
const ROWS_OF_HEADS: [&str; 7] = ["A_log", "conv1d", "dt_bias", "in_proj_", "q_proj", "k_proj", "v_proj"];
/// Parts of the names of tensors with a group of columns for each head.
const COLUMNS_OF_HEADS: [&str; 2] = ["out_proj", "o_proj"];

/// A checkpoint in its own directory.
struct Wide(PathBuf);

impl Drop for Wide {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Wide {
    /// The first four layers of the bundled checkpoint with twice as many heads of each kind, in directory `name`.
    fn new(name: &str) -> Self {
        let (from, name) = (bundled_model(BUNDLED), format!("pegainfer-qwen35-{name}-{}", std::process::id()));
        let dir = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&dir).unwrap();
        let mut config: Value = serde_json::from_slice(&std::fs::read(from.join("config.json")).unwrap()).unwrap();
        let text = &mut config["text_config"];
        for heads in ["num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"] {
            text[heads] = json!(2 * text[heads].as_u64().unwrap());
        }
        (text["num_hidden_layers"], text["layer_types"]) = (json!(4), Value::Null);
        std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
        let file = std::fs::read(from.join("model.safetensors")).unwrap();
        let stored = SafeTensors::deserialize(&file).unwrap();
        let wide: Vec<_> = stored.iter().map(|(name, view)| (name, view.dtype(), widened(name, &view))).collect();
        let views = wide
            .iter()
            .map(|(name, dtype, (shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
        std::fs::write(dir.join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
        Self(dir)
    }

    fn options(&self) -> LoadOptions {
        LoadOptions { model_path: self.0.clone(), ..options() }
    }
}

/// Shape and bytes of a tensor for twice as many heads, each element a random one of the original tensor.
fn widened(name: &str, view: &TensorView<'_>) -> (Vec<usize>, Vec<u8>) {
    let (mut shape, bytes) = (view.shape().to_vec(), view.data());
    let is_one_of = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    let axis = match (is_one_of(&ROWS_OF_HEADS), is_one_of(&COLUMNS_OF_HEADS)) {
        (true, _) => 0,
        (_, true) => 1,
        _ => return (shape, bytes.to_vec()),
    };
    let elements: Vec<&[u8]> = bytes.chunks_exact(bytes.len() / shape.iter().product::<usize>()).collect();
    shape[axis] *= 2;
    let seed = name.bytes().fold(0, |seed, byte| rng::bits(seed, u64::from(byte)));
    let drawn = (0..2 * elements.len() as u64).map(|i| elements[rng::bits(seed, i) as usize % elements.len()]);
    (shape, drawn.flatten().copied().collect())
}

/// Log-probabilities of each token of a long prompt.
fn logprobs(ranks: usize, options: &LoadOptions) -> Vec<f32> {
    let prompts = fixture().cases.into_iter().map(|case| case.prompt_ids);
    let longest = prompts.max_by_key(Vec::len).unwrap();
    let request = GenerateRequest { prompt_logprobs: Some(0), ..greedy(&longest, 1) };
    let output = run(&mut engine_on(ranks, best(), options), &[request]).remove(0);
    output.prompt.unwrap().into_iter().map(|token| token.logprob).collect()
}

#[test]
fn many_ranks_agree_with_one() {
    let model = Wide::new("one");
    let expected = logprobs(1, &model.options());
    let spread = |sign: f32| expected.iter().map(|logprob| sign * logprob).fold(f32::MIN, f32::max);
    assert!(spread(1.0) + spread(-1.0) > 2.0, "all tokens are equally likely: nothing is tested");
    for ranks in rank_counts(RANKS) {
        let found = logprobs(ranks, &LoadOptions { check_ranks: true, ..model.options() });
        assert_eq!(found.len(), expected.len());
        let off = || found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
        let (mean, max) = (off().sum::<f32>() / expected.len() as f32, off().fold(0.0, f32::max));
        assert!(mean < NOISE.0 && max < NOISE.1, "{ranks} ranks: off by {mean} on average, {max} at most");
    }
}

#[test]
fn bits_of_many_ranks_do_not_depend_on_scheduling() {
    scheduling_changes_no_bit(RANKS, &Wide::new("bits").options(), DRIFT);
}

#[test]
fn graphs_of_many_ranks_equal_launches() {
    graphs_equal_launches(RANKS, &Wide::new("graphs").options());
}
