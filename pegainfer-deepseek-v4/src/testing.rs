//! The published configuration, for tests.

use crate::config::Config;
use serde_json::{Value, json};
use std::path::PathBuf;

/// The bundled checkpoint.
pub(crate) fn tiny_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/dsv4-tiny-fp4fp8")
}

/// config.json of the bundled checkpoint.
pub(crate) fn tiny() -> Value {
    serde_json::from_str(include_str!("../../models/dsv4-tiny-fp4fp8/config.json")).unwrap()
}

/// The numbers of V4-Flash, with the draft layers of April (MTP) or of 0731 (DSpark).
pub(crate) fn flash_json(dspark: bool) -> Value {
    let mut config = tiny();
    let mut ratios = vec![0, 0];
    ratios.extend((2..43).map(|i| if i % 2 == 0 { 4 } else { 128 }));
    ratios.extend(vec![0; if dspark { 3 } else { 1 }]);
    for (field, value) in [
        ("compress_ratios", json!(ratios)),
        ("num_hidden_layers", json!(43)),
        ("vocab_size", json!(129_280)),
        ("hidden_size", json!(4096)),
        ("num_attention_heads", json!(64)),
        ("q_lora_rank", json!(1024)),
        ("o_lora_rank", json!(1024)),
        ("o_groups", json!(8)),
        ("index_n_heads", json!(64)),
        ("index_topk", json!(512)),
        ("num_hash_layers", json!(3)),
        ("n_routed_experts", json!(256)),
        ("num_experts_per_tok", json!(6)),
        ("moe_intermediate_size", json!(2048)),
        ("max_position_embeddings", json!(1_048_576)),
        ("num_nextn_predict_layers", json!(1)),
    ] {
        config[field] = value;
    }
    if dspark {
        config["dspark_block_size"] = json!(5);
        config["dspark_noise_token_id"] = json!(128_799);
        config["dspark_markov_rank"] = json!(256);
        config["dspark_target_layer_ids"] = json!([40, 41, 42]);
    }
    config
}

/// [`flash_json`], parsed.
pub(crate) fn flash(dspark: bool) -> Config {
    Config::parse(&flash_json(dspark).to_string()).unwrap()
}
