//! Tests of config.json.

use super::*;
use crate::Qwen35;
use pegainfer_runtime::{Model, ModelBytes, record};
use std::path::Path;

fn tiny() -> Value {
    serde_json::from_str(include_str!("../../../models/qwen35-tiny/config.json")).unwrap()
}

#[test]
fn reads_the_tiny_model() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/qwen35-tiny");
    let config = Qwen35::load_config(&dir).unwrap();
    assert_eq!((config.layers.len(), config.hidden_size, config.shape.heads), (8, 256, 2));
    assert_eq!((config.count(LayerKind::Full), config.layers[3], config.rotary_dim), (2, LayerKind::Full, 64));
    assert_eq!(config.eos_token_ids, [4089, 4087], "generation_config.json comes first");
    assert_eq!(ModelBytes::of::<Qwen35>(&config).unwrap().kv_per_token, 2048);
    assert!(config.tie_word_embeddings);
}

#[test]
fn a_chat_turn_ends_where_only_the_end_of_text_is_named() {
    let mut config = tiny();
    config["text_config"]["eos_token_id"] = json!(248_044);
    assert_eq!(Qwen35::parse_config(&config.to_string()).unwrap().eos_token_ids, [248_044, 248_046]);
}

/// Fields and numbers of Qwen3.6-27B and Qwen3.8-27B, whose layers equal those of Qwen3.5-27B.
#[test]
fn reads_the_27b_of_the_later_releases() {
    let config = json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "language_model_only": false,
        "model_type": "qwen3_5",
        "text_config": {
            "attention_bias": false, "attention_dropout": 0.0, "attn_output_gate": true, "bos_token_id": 248_044,
            "dtype": "bfloat16", "eos_token_id": 248_044, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
            "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 17_408, "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
            "linear_value_head_dim": 128, "mamba_ssm_dtype": "float32", "max_position_embeddings": 262_144,
            "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": false,
            "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4, "output_gate_type": "swish",
            "pad_token_id": null, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
            "rope_parameters": {
                "mrope_interleaved": true, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
                "rope_theta": 10_000_000, "rope_type": "default",
            },
            "use_cache": true, "vocab_size": 248_320,
        },
        "tie_word_embeddings": false,
        "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
    });
    let read = Qwen35::parse_config(&config.to_string()).unwrap();
    assert_eq!((read.count(LayerKind::Linear), read.count(LayerKind::Full)), (48, 16));
    assert_eq!((read.rotary_dim, read.delta.value_heads, read.max_position_embeddings), (64, 48, 262_144));
    assert_eq!(read.parameters() / 100_000_000, 268, "26.9e9 of the text model");
    assert_eq!(read.eos_token_ids, [248_044, 248_046]);
    let mut long = config;
    long["text_config"]["rope_parameters"] = json!({
        "mrope_interleaved": true, "mrope_section": [11, 11, 10], "rope_type": "yarn", "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25, "factor": 4.0, "original_max_position_embeddings": 262_144,
    });
    assert_eq!(Qwen35::parse_config(&long.to_string()).unwrap().max_position_embeddings, 1_048_576);
}

#[test]
fn the_text_model_alone_and_older_fields_are_read_too() {
    let mut text = tiny()["text_config"].clone();
    text["rope_parameters"] = json!(null);
    text["rope_theta"] = json!(5e5);
    text["partial_rotary_factor"] = json!(0.5);
    text.as_object_mut().unwrap().remove("layer_types");
    let config = Qwen35::parse_config(&text.to_string()).unwrap();
    assert_eq!((config.rope.theta, config.rotary_dim), (5e5, 128));
    assert_eq!(config.layers, Qwen35::parse_config(&tiny().to_string()).unwrap().layers);
}

#[test]
fn tying_is_asked_of_the_text_first() {
    let mut config = tiny();
    config["tie_word_embeddings"] = json!(false);
    assert!(Qwen35::parse_config(&config.to_string()).unwrap().tie_word_embeddings);
    config["text_config"].as_object_mut().unwrap().remove("tie_word_embeddings");
    assert!(!Qwen35::parse_config(&config.to_string()).unwrap().tie_word_embeddings);
}

#[test]
fn refuses_what_it_does_not_implement_by_name() {
    for (field, value) in [
        ("rope_scaling", json!({"rope_type": "dynamic", "factor": 4.0})),
        ("rope_parameters", json!({"rope_type": "linear"})),
        ("quantization_config", json!({"quant_method": "fp8"})),
        ("attn_output_gate", json!(false)),
        ("output_gate_type", json!("sigmoid")),
        ("attention_bias", json!(true)),
        ("hidden_act", json!("gelu")),
        ("dtype", json!("float64")),
        ("head_dim", json!(40)),
        ("linear_key_head_dim", json!(40)),
    ] {
        let mut config = tiny();
        config["text_config"][field] = value;
        let error = Qwen35::parse_config(&config.to_string()).unwrap_err().to_string();
        assert!(error.contains(field) && error.contains("serves"), "{error}");
    }
    let mut config = tiny();
    config["text_config"]["layer_types"][7] = json!("linear_attention");
    let error = Qwen35::parse_config(&config.to_string()).unwrap_err().to_string();
    assert!(error.contains("layer_types") && error.contains("end with full_attention"), "{error}");
    let mut config = tiny();
    config["quantization_config"] = json!({"quant_method": "fp8"});
    assert!(Qwen35::parse_config(&config.to_string()).unwrap_err().to_string().contains("quantization_config"));
}

#[test]
fn names_the_field_that_is_missing_or_wrong() {
    for field in ["vocab_size", "linear_num_value_heads", "linear_conv_kernel_dim", "rms_norm_eps"] {
        let mut config = tiny();
        config["text_config"].as_object_mut().unwrap().remove(field);
        let error = Qwen35::parse_config(&config.to_string()).unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
    }
    for (field, value) in [
        ("linear_num_value_heads", json!(3)),
        ("num_key_value_heads", json!(0)),
        ("layer_types", json!(["full_attention"])),
        ("layer_types", json!(["full_attention", "x", "x", "x", "x", "x", "x", "x"])),
    ] {
        let mut config = tiny();
        config["text_config"][field] = value;
        let error = Qwen35::parse_config(&config.to_string()).unwrap_err().to_string();
        assert!(error.contains(field), "{error}");
    }
    assert!(Qwen35::parse_config("{").unwrap_err().to_string().contains("config.json"));
}

#[test]
fn harmless_fields_are_accepted() {
    let mut config = tiny();
    config["quantization_config"] = json!({});
    config["text_config"]["dtype"] = json!("float32");
    config["text_config"]["eos_token_id"] = json!([7]);
    config["eos_token_id"] = json!([8, 7]);
    let text = config["text_config"].as_object_mut().unwrap();
    text.remove("head_dim");
    let read = Qwen35::parse_config(&config.to_string()).unwrap();
    assert_eq!((read.shape.head_dim, read.quantization), (256, None));
    assert_eq!(read.eos_token_ids, [7, 8], "those of the text part first");
}

#[test]
fn sizes_without_bound_are_refused_by_name() {
    for field in [
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "vocab_size",
        "num_attention_heads",
        "linear_num_value_heads",
        "linear_num_key_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
        "max_position_embeddings",
    ] {
        let mut config = tiny();
        config["text_config"][field] = json!(1_000_000_000);
        let error = Qwen35::parse_config(&config.to_string()).unwrap_err().to_string();
        assert!(error.contains(&format!("{field} is 1000000000, and must be an integer from 1 to")), "{error}");
    }
}

/// config.json of a model with experts in the official layout: hidden size, layers, heads, value heads, experts, their
/// width and number for a token.
fn with_experts(
    (hidden, layers, heads, value_heads): (usize, usize, usize, usize),
    (experts, width, chosen): (usize, usize, usize),
) -> Value {
    let mut config = tiny();
    config["architectures"] = json!(["Qwen3_5MoeForConditionalGeneration"]);
    config["model_type"] = json!("qwen3_5_moe");
    config["tie_word_embeddings"] = json!(false);
    let text = config["text_config"].as_object_mut().unwrap();
    text.retain(|field, _| !["intermediate_size", "tie_word_embeddings", "layer_types"].contains(&field.as_str()));
    let fields = json!({
        "model_type": "qwen3_5_moe_text", "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 248_320,
        "linear_num_key_heads": 16, "linear_num_value_heads": value_heads, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "num_experts": experts, "moe_intermediate_size": width,
        "shared_expert_intermediate_size": width, "num_experts_per_tok": chosen, "mlp_only_layers": [],
        "mtp_num_hidden_layers": 1,
    });
    text.extend(fields.as_object().unwrap().clone());
    config
}

/// Qwen3.5-35B-A3B.
fn a3b() -> Value {
    with_experts((2048, 40, 16, 32), (256, 512, 8))
}

#[test]
fn official_sizes_with_experts_have_their_published_totals() {
    for (config, parameters, mtp) in [
        (a3b(), 34_660_610_688, 844_640_768),
        (with_experts((3072, 48, 32, 64), (256, 1024, 8)), 122_111_526_912, 2_523_679_232),
        (with_experts((4096, 60, 32, 64), (512, 1024, 10)), 396_346_350_336, 6_595_568_128),
    ] {
        let read = Qwen35::parse_config(&config.to_string()).unwrap();
        assert_eq!(read.parameters(), parameters);
        assert_eq!(Config { mtp: true, ..read.clone() }.parameters() - parameters, mtp);
        let route = read.moe.unwrap().route;
        assert!(route.normalize && route.shared, "what config.json does not say");
        // Matrices and tables are bf16, and so is the router with its rows of zeros.
        let padding = (read.layers.len() * (route.rows() - route.count()) * read.hidden_size * 2) as u64;
        let small = ModelBytes::of::<Qwen35>(&read).unwrap().weights - 2 * parameters - padding;
        assert!(small < 8_000_000, "norms in f32: {small}");
    }
}

/// At 1,024 tokens of context: the experts that tokens hit if they choose evenly, and the shared one.
#[test]
fn a_decode_step_reads_the_experts_that_its_tokens_hit() {
    let config = Qwen35::parse_config(&a3b().to_string()).unwrap();
    let expert = (config.layers.len() * 3 * 2048 * 512 * 2) as f64;
    for (batch, hits, gigabytes) in [(1, 9.0, 6.04), (8, 58.4, 19.5), (32, 164.3, 49.8), (128, 252.6, 86.4)] {
        let records = record::<Qwen35>(&config, 1, (batch, 1, 1024)).unwrap();
        let read: u64 = records.iter().filter(|r| r.op == "experts").map(|r| r.bytes).sum();
        let read = read as f64 / expert;
        assert!((read / hits - 1.0).abs() < 0.005, "{batch} sequences: {read} experts, expected {hits}");
        let all = records.iter().map(|r| r.bytes).sum::<u64>() as f64 / 1e9;
        assert!((all / gigabytes - 1.0).abs() < 0.04, "{batch} sequences: {all} GB, expected {gigabytes}");
    }
}

#[test]
fn experts_that_cannot_be_are_refused_by_name() {
    for (field, value, expected) in [
        ("num_experts_per_tok", json!(257), "num_experts_per_tok is 257, and must be an integer from 1 to 31"),
        ("num_experts", json!(7), "num_experts_per_tok is 8, but num_experts is 7"),
        ("num_experts", json!(1 << 20), "num_experts is 1048576, and must be an integer from 1 to 1023"),
        ("num_experts", Value::Null, "num_experts is missing"),
        ("moe_intermediate_size", Value::Null, "moe_intermediate_size is missing"),
        ("shared_expert_intermediate_size", json!(1024), "asks for shared_expert_intermediate_size = 1024"),
    ] {
        let mut config = a3b();
        config["text_config"][field] = value;
        let error = Qwen35::parse_config(&config.to_string()).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let mut config = a3b();
    let text = config["text_config"].as_object_mut().unwrap();
    let experts = text.remove("num_experts").unwrap();
    text.insert("num_local_experts".to_owned(), experts);
    assert_eq!(Qwen35::parse_config(&config.to_string()).unwrap().moe.unwrap().route.experts, 256);
}
