//! Tests of config.json.

use super::*;
use crate::config::DSpark;
use crate::testing::{flash, tiny, tiny_dir};
use pegainfer_runtime::BlockShape;
use serde_json::json;

#[test]
fn reads_the_bundled_model() {
    let config = Config::load(&tiny_dir()).unwrap();
    use LayerKind::{Heavy, Sparse, Window};
    assert_eq!(config.layers, [Window, Window, Sparse, Heavy, Sparse]);
    assert_eq!((config.heads, config.head_dim, config.hash_layers, config.drafts), (8, 512, 2, Drafts::None));
    assert!(config.quantized);
    assert_eq!(config.eos_token_ids, [4089, 4087], "generation_config.json comes first");
}

#[test]
fn the_april_and_the_0731_configuration_differ_in_their_draft_layers() {
    let (april, july) = (flash(false), flash(true));
    assert_eq!((april.layers.len(), april.drafts), (43, Drafts::Mtp { layers: 1 }));
    let block = BlockShape { tokens: 5, noise_token: 128_799 };
    let dspark = DSpark { layers: 3, targets: vec![40, 41, 42], markov_rank: 256, block };
    assert_eq!(july.drafts, Drafts::DSpark(dspark));
    assert_eq!(april.layers, july.layers);
}

#[test]
fn refuses_what_it_does_not_implement_by_name() {
    for (field, value) in [
        ("model_type", json!("deepseek_v41")),
        ("vision_config", json!({"depth": 24})),
        ("hc_mult", json!(2)),
        ("sliding_window", json!(256)),
        ("attention_bias", json!(true)),
        ("tie_word_embeddings", json!(true)),
        ("scoring_func", json!("sigmoid")),
        ("expert_dtype", json!("fp8")),
        ("compress_ratios", json!([0, 0, 2, 128, 4])),
        ("quantization_config", json!({"quant_method": "fp8", "weight_block_size": [32, 32]})),
    ] {
        let mut config = tiny();
        config[field] = value;
        let error = Config::parse(&config.to_string()).unwrap_err().to_string();
        assert!(error.contains(field) && error.contains("serves"), "{error}");
    }
}

#[test]
fn names_the_field_that_is_missing_or_wrong() {
    for field in ["head_dim", "compress_ratios", "o_groups", "compress_rope_theta", "rope_scaling"] {
        let mut config = tiny();
        config.as_object_mut().unwrap().remove(field);
        let error = Config::parse(&config.to_string()).unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
    }
    let mut config = tiny();
    config["compress_ratios"] = json!([0, 0, 4]);
    assert!(Config::parse(&config.to_string()).unwrap_err().to_string().contains("3 entries for 5 layers"));
    config["hidden_size"] = json!(250);
    assert!(Config::parse(&config.to_string()).unwrap_err().to_string().contains("hidden_size"));
}

#[test]
fn sizes_without_bound_are_refused_by_name() {
    for field in [
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "head_dim",
        "q_lora_rank",
        "o_groups",
        "o_lora_rank",
        "index_n_heads",
        "index_head_dim",
        "index_topk",
        "n_routed_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "hc_sinkhorn_iters",
        "max_position_embeddings",
        "num_nextn_predict_layers",
    ] {
        let mut config = tiny();
        config[field] = json!(1u64 << 31);
        let error = Config::parse(&config.to_string()).unwrap_err().to_string();
        assert!(error.contains(&format!("{field} is 2147483648; it must be at most")), "{error}");
    }
}

#[test]
fn an_empty_quantization_is_none() {
    let mut config = tiny();
    config["quantization_config"] = json!({});
    assert!(!Config::parse(&config.to_string()).unwrap().quantized);
}
