//! config.json and the recorded plan of the official sizes against their published totals: recording needs no weights.

use pegainfer_core::exec::Activations;
use pegainfer_core::record::OpRecord;
use pegainfer_core::tensor::DType;
use pegainfer_kernels::ops::KvDType;
use pegainfer_qwen35_4b::Qwen35;
use pegainfer_qwen35_4b::config::{BF16_MODULES, Config, LayerKind};
use pegainfer_qwen35_4b::plan::Step;
use pegainfer_runtime::{
    GpuFit, LoadOptions, Model, ModelBytes, Overrides, Quantization, record, record_step, uniform,
};
use serde_json::{Value, json};

/// An official model: the numbers that differ between sizes, and published totals of its text part.
struct Size {
    hidden: usize,
    intermediate: usize,
    layers: usize,
    heads: (usize, usize),
    value_heads: usize,
    tied: bool,
    parameters: u64,
    kv_bytes: u64,
    slot_bytes: u64,
}

const SIZES: [Size; 5] = [
    size((1024, 3584, 24), (8, 2), 16, true, 752_393_024, 12_288, 18_874_368 + 663_552),
    size((2048, 6144, 24), (8, 2), 16, true, 1_881_825_088, 12_288, 18_874_368 + 663_552),
    size((2560, 9216, 32), (16, 4), 32, true, 4_205_751_296, 32_768, 50_331_648 + 1_179_648),
    size((4096, 12_288, 32), (16, 4), 32, false, 8_953_803_264, 32_768, 50_331_648 + 1_179_648),
    size((5120, 17_408, 64), (24, 4), 48, false, 26_895_998_464, 65_536, 150_994_944 + 2_949_120),
];

const fn size(
    (hidden, intermediate, layers): (usize, usize, usize),
    heads: (usize, usize),
    value_heads: usize,
    tied: bool,
    parameters: u64,
    kv_bytes: u64,
    slot_bytes: u64,
) -> Size {
    Size { hidden, intermediate, layers, heads, value_heads, tied, parameters, kv_bytes, slot_bytes }
}

/// config.json in the official layout. The larger sizes say that nothing is tied at the root only.
fn json(size: &Size) -> Value {
    let kind = |i: usize| if i % 4 == 3 { "full_attention" } else { "linear_attention" };
    let mut config = json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {
            "attn_output_gate": true, "dtype": "bfloat16", "eos_token_id": 248_044, "full_attention_interval": 4,
            "head_dim": 256, "hidden_act": "silu", "hidden_size": size.hidden, "initializer_range": 0.02,
            "intermediate_size": size.intermediate, "layer_types": (0..size.layers).map(kind).collect::<Vec<_>>(),
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": size.value_heads, "linear_value_head_dim": 128,
            "max_position_embeddings": 262_144, "model_type": "qwen3_5_text", "num_attention_heads": size.heads.0,
            "num_hidden_layers": size.layers, "num_key_value_heads": size.heads.1, "rms_norm_eps": 1e-6,
            "vocab_size": 248_320,
            "rope_parameters": {
                "mrope_interleaved": true, "mrope_section": [11, 11, 10], "rope_type": "default",
                "rope_theta": 10_000_000, "partial_rotary_factor": 0.25
            }
        },
        "tie_word_embeddings": size.tied,
        "vision_config": {"model_type": "qwen3_5"}
    });
    if size.tied {
        config["text_config"]["tie_word_embeddings"] = json!(true);
    }
    config
}

fn config(size: &Size) -> Config {
    Qwen35::parse_config(&json(size).to_string()).unwrap()
}

fn bytes_of(config: &Config) -> ModelBytes {
    ModelBytes::of::<Qwen35>(config).unwrap()
}

fn total(records: &[OpRecord], of: impl Fn(&OpRecord) -> u64) -> u64 {
    records.iter().map(of).sum()
}

#[test]
fn every_official_size_has_its_published_totals() {
    for size in &SIZES {
        let config = config(size);
        assert_eq!(config.parameters(), size.parameters, "{} layers of {}", size.layers, size.hidden);
        assert_eq!((bytes_of(&config).kv_per_token, bytes_of(&config).state_slot), (size.kv_bytes, size.slot_bytes));
        assert_eq!(config.count(LayerKind::Full), size.layers / 4);
        assert_eq!((config.rotary_dim, config.tie_word_embeddings), (64, size.tied));
        assert_eq!(config.eos_token_ids, [248_044, 248_046]);
    }
}

#[test]
fn the_layer_that_drafts_has_its_published_total_and_a_cache_of_its_own() {
    let plain = config(&SIZES[2]);
    let drafting = Config { mtp: true, ..plain.clone() };
    assert_eq!(drafting.parameters() - plain.parameters(), 120_599_552);
    assert_eq!(bytes_of(&drafting).kv_per_token * 8, bytes_of(&plain).kv_per_token * 9);
}

#[test]
fn a_decode_step_reads_every_weight_and_moves_the_state_once() {
    for size in &SIZES {
        let (config, batch, context) = (config(size), 8, 1024);
        let records = record::<Qwen35>(&config, 1, (batch, 1, context)).unwrap();
        let untied = if size.tied { 0 } else { (config.vocab_size * config.hidden_size) as u64 };
        let gemms = |r: &OpRecord| match r.op.starts_with("linear") {
            true => 2 * (batch * r.reads[1].shape.iter().product::<usize>()) as u64,
            false => 0,
        };
        let linear = config.count(LayerKind::Linear);
        let norms = bytes_of(&config).weights / 2 - config.parameters();
        assert_eq!(total(&records, gemms), 2 * batch as u64 * (size.parameters - untied - norms));
        let kv = (batch * context) as u64 * bytes_of(&config).kv_per_token;
        let states = 2 * batch as u64 * bytes_of(&config).state_slot;
        let floor = 2 * (size.parameters - untied) + kv + states;
        let bytes = total(&records, |r| r.bytes);
        assert!(bytes >= floor && bytes < floor + floor / 20, "{bytes} bytes, floor {floor}");
        assert!(records.iter().filter(|r| r.op == "decode_delta").count() == linear);
        assert_eq!(records.len(), 2 + 5 * size.layers + 2, "nodes do not grow with the batch");
    }
}

#[test]
fn a_prompt_runs_in_chunks_where_there_are_tensor_cores() {
    let config = config(&SIZES[2]);
    let records = record::<Qwen35>(&config, 1, (2, 100, 100)).unwrap();
    let count = |op: &str| records.iter().filter(|r| r.op == op).count();
    assert_eq!((count("gated_delta_chunks"), count("gated_delta_rule"), count("attention")), (24, 0, 8));
    let end = records.iter().rev().find(|r| r.op == "linear_swiglu").unwrap();
    assert_eq!(end.writes[0].shape, [2, 9216], "of the last layer only the sampled rows are wanted");
    let end = records.iter().rev().find(|r| r.op == "attention").unwrap();
    assert_eq!(end.reads[0].shape, [2, 4096], "one query each");
    assert_eq!(records.len(), 2 + 32 * 7 + 3 + 2, "seven ops a layer, three for its rows in the last");
}

#[test]
fn a_step_without_samples_ends_with_the_last_keys_and_values() {
    let step = Step { samples: Vec::new(), ..uniform::<Qwen35>(1, 512, 1024) };
    let records = record_step::<Qwen35>(&config(&SIZES[2]), (Activations::Rounded, 1), &step).unwrap();
    assert_eq!((records.len(), records.last().unwrap().op), (2 + 31 * 7 + 2, "gated_qk_norm_rope_write_kv"));
}

/// `config` with FP8 projections and, if `kv` asks for it, an FP8 KV cache.
fn fp8(config: &Config, kv: KvDType) -> Config {
    Config { quantization: Some(Quantization::every(&BF16_MODULES)), kv_dtype: kv, ..config.clone() }
}

#[test]
fn a_decode_step_in_fp8_reads_half_of_the_projections_and_of_the_cache() {
    for size in &SIZES {
        let (plain, batch, context) = (config(size), 8, 1024);
        let records = |config: &Config| record::<Qwen35>(config, 1, (batch, 1, context)).unwrap();
        let bytes = |config: &Config| total(&records(config), |r| r.bytes);
        // Activations rounded by their producer take one byte less per element, there and in the GEMM.
        let rounded = total(&records(&fp8(&plain, KvDType::Bf16)), |r| {
            let operands = r.reads.iter().chain(&r.writes).filter(|operand| operand.dtype == DType::E4m3);
            operands.map(|operand| operand.shape.iter().product::<usize>() as u64).sum()
        });
        assert!(rounded > 0);
        let (bf16, fp8_weights) = (bytes(&plain), bytes(&fp8(&plain, KvDType::Bf16)));
        let weights = bytes_of(&plain).weights;
        let saved = weights - bytes_of(&fp8(&plain, KvDType::Bf16)).weights;
        assert!(saved > weights / 4, "{saved}");
        assert_eq!(bf16 - fp8_weights, saved + rounded, "{} layers of {}", size.layers, size.hidden);
        let both = fp8(&plain, KvDType::Fp8);
        // One byte per element, and a four-byte scale for each 256; a step reads the context and writes a token.
        assert_eq!(bytes_of(&both).kv_per_token * 512, bytes_of(&plain).kv_per_token * 260);
        let kv = (batch * (context + 1)) as u64 * (bytes_of(&plain).kv_per_token - bytes_of(&both).kv_per_token);
        assert_eq!(fp8_weights - bytes(&both), kv);
    }
}

/// Memory use of an engine with the server's defaults on a GPU with `bytes` bytes.
fn fit(config: &Config, bytes: u64) -> Result<GpuFit, String> {
    let defaults = LoadOptions {
        model: (),
        model_path: "model".into(),
        overrides: Overrides::default(),
        dummy_seed: None,
        max_model_len: None,
        max_num_seqs: None,
        max_num_batched_tokens: None,
        max_num_mixed_tokens: 512,
        cuda_graph: true,
        lora: None,
        speculation: None,
        kv_cache_bytes: None,
        gpu_memory_utilization: 0.9,
        gpu_memory_limit: None,
        loop_back_ranks: None,
        check_ranks: false,
        state_cache_bytes: None,
        state_cache_interval: 256,
        kv_offloading_bytes: None,
        kv_disk: None,
    };
    let fit = GpuFit::new::<Qwen35>(config, &defaults, 1, bytes);
    // The flag on a larger GPU gives the same result.
    let limited = LoadOptions { gpu_memory_limit: Some(bytes), ..defaults };
    let limited = GpuFit::new::<Qwen35>(config, &limited, 1, 150_000_000_000);
    let (fit, limited) = (fit.map_err(|e| e.to_string()), limited.map_err(|e| e.to_string()));
    assert_eq!(fit, limited);
    fit
}

#[test]
fn the_defaults_fit_common_gpus() {
    let [small, large] = [&SIZES[2], &SIZES[4]].map(config);
    let gb = 1_000_000_000;
    // Minimum number of sequences, and of thousands of tokens in the KV cache.
    for (config, memory, sequences, kv) in [
        (&small, 16 * gb, 24, 24),
        (&small, 24 * gb, 64, 100),
        (&fp8(&large, KvDType::Bf16), 48 * gb, 16, 24),
        (&large, 80 * gb, 16, 24),
    ] {
        let fit = fit(config, memory).unwrap();
        println!("{fit}");
        let budget = (memory as f64 * 0.9) as u64;
        assert!(fit.used() <= budget && fit.used() > budget - budget / 50, "{fit}");
        assert!(fit.sequences >= sequences && fit.kv_tokens >= kv * 1000 && fit.snapshots >= 8, "{fit}");
        assert!(fit.step_tokens >= 2048 && fit.step_tokens >= fit.sequences, "{fit}");
    }
    let error = fit(&large, 48 * gb).unwrap_err();
    assert!(error.contains("53.8 GB for its weights") && error.contains("are missing"), "{error}");
    assert!(error.contains("; 2 such GPUs hold it (--tensor-parallel-size 2)"), "{error}");
    assert!(fit(&small, 8 * gb).is_err());
}
