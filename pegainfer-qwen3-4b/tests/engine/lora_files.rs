//! Files of adapters: what must be refused is, by the field or tensor at fault, and odd ones load.

use crate::support::{best, bundled_model, fixtures, greedy, options, run};
use pegainfer_core::engine::{GenerateRequest, MAX_LOGPROBS};
use pegainfer_qwen3_4b::{Qwen3, Qwen3Engine};
use pegainfer_runtime::{AdapterLoader, LoadOptions, LoraOptions, load};
use serde::Deserialize;
use std::collections::BTreeMap;

/// tests/fixtures/lora/expect.json.
#[derive(Deserialize)]
struct Expected {
    refused: BTreeMap<String, Refused>,
    accepted: BTreeMap<String, String>,
    accepted_prompt_ids: Vec<u32>,
    accepted_top20: Top,
}

#[derive(Deserialize)]
struct Refused {
    reason: String,
}

#[derive(Deserialize)]
struct Top {
    ids: Vec<u32>,
    logprobs: Vec<f64>,
}

fn expected() -> Expected {
    crate::support::bundled_fixture("lora/expect")
}

fn engine() -> (Qwen3Engine, AdapterLoader) {
    let lora = Some(LoraOptions { max_loras: 1, max_rank: 32 });
    let options = LoadOptions { model_path: bundled_model("qwen3-tiny"), lora, ..options() };
    let loaded = load::<Qwen3>(best().execs(1), &options, &mut |_, _| {}).unwrap();
    (loaded.engine, loaded.adapters.unwrap())
}

/// What the message must name, where it is not the first word of the reason.
const NAMED: [(&str, &str); 27] = [
    ("alpha-nan", "lora_alpha"),
    ("alpha-zero-rank", "r is 0"),
    ("bad-regex", "alpha_pattern"),
    ("bias-all", "bias"),
    ("embedding-target", "embed_tokens"),
    ("empty", "unused"),
    ("extra-magnitude", "lora_magnitude_vector"),
    ("f64", "F64"),
    ("foreign-prefix", "visual"),
    ("head-target", "lm_head"),
    ("huge-header", "adapter_model.safetensors is damaged"),
    ("infinite", "infinite"),
    ("integers", "I32"),
    ("layer-6", "layers.6.self_attn.q_proj"),
    ("lora-bias", "lora_bias"),
    ("missing-a", "lora_A.weight is missing"),
    ("missing-b", "lora_B.weight is missing"),
    ("missing-module", "v_proj"),
    ("nan", "NaN"),
    ("no-config", "adapter_config.json"),
    ("no-weights", "adapter_model.safetensors"),
    ("other-model", "q_proj.lora_A.weight is [2, 256]"),
    ("overflow-bf16", "beyond bf16"),
    ("pickle-only", "pickle"),
    ("pissa", "init_lora_weights"),
    ("rank-64", "--max-lora-rank is 32"),
    ("rank-differs", "lora_B.weight is [512, 3]"),
];

/// As [`NAMED`], for the rest of the folders.
const ALSO_NAMED: [(&str, &str); 9] = [
    ("rank-not-as-configured", "has rank 3"),
    ("rank-pattern-40", "has rank 40"),
    ("three-dimensional", "lora_A.weight is [1, 2, 320]"),
    ("transposed", "lora_A.weight is [320, 2]"),
    ("truncated", "truncated"),
    ("unknown-key", "use_quantum"),
    ("unknown-module", "self_attn.gate_proj"),
    ("wrong-in", "lora_A.weight is [2, 321]"),
    ("wrong-out", "lora_B.weight is [500, 2]"),
];

#[test]
fn what_the_engine_does_not_compute_is_refused_by_name() {
    let (_, loader) = engine();
    let named: BTreeMap<&str, &str> = NAMED.into_iter().chain(ALSO_NAMED).collect();
    let refused = expected().refused;
    assert_eq!(refused.len(), 53);
    for (folder, Refused { reason }) in refused {
        let first = reason.split([' ', ':', ';']).next().unwrap();
        let name = named.get(folder.as_str()).copied().unwrap_or(first);
        match loader.load(&fixtures().join("lora/refused").join(&folder)) {
            Ok(_) => panic!("{folder} was loaded: {reason}"),
            Err(error) => assert!(error.to_string().contains(name), "{folder}: {error}"),
        }
    }
}

/// Variants that must give one result.
#[test]
fn odd_files_that_mean_the_same_give_the_same() {
    let (mut engine, loader) = engine();
    let Expected { accepted, accepted_prompt_ids: prompt, accepted_top20: top, .. } = expected();
    assert_eq!(accepted.len(), 6);
    let mut outputs = Vec::new();
    for folder in accepted.keys() {
        let loaded = loader.load(&fixtures().join("lora/accepted").join(folder)).unwrap();
        let request = GenerateRequest { logprobs: Some(MAX_LOGPROBS), ..greedy(&prompt, 1) };
        let output = run(&mut engine, &[GenerateRequest { adapter: Some(loaded.adapter), ..request }]).remove(0);
        let ours = &output.tokens[0].logprobs.as_ref().unwrap().top;
        for (id, logprob) in top.ids.iter().zip(&top.logprobs).take(5) {
            let our =
                ours.iter().find(|(our, _)| our == id).unwrap_or_else(|| panic!("{folder}: {id} is not near the top"));
            assert!((f64::from(our.1) - logprob).abs() < 0.3, "{folder}: {our:?} {logprob}");
        }
        outputs.push((folder, output.bits()));
    }
    for (folder, bits) in &outputs {
        assert_eq!(bits, &outputs[0].1, "{folder} and {}", outputs[0].0);
    }
}

/// A file can be named instead of its folder.
#[test]
fn a_path_may_name_the_file() {
    let (_, loader) = engine();
    let folder = fixtures().join("lora/rs-r8");
    let [one, other] =
        [folder.clone(), folder.join("adapter_model.safetensors")].map(|path| loader.load(&path).unwrap());
    assert_eq!((one.rank, one.modules, one.bytes), (other.rank, other.modules, other.bytes));
    assert_eq!((one.rank, one.modules), (16, 6 * 7));
    assert_ne!(one.adapter, other.adapter, "each load has a number of its own");
}
