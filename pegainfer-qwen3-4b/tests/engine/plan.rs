//! The recorded plan of the official sizes against their published totals: recording needs no weights.

use crate::support::options;
use pegainfer_core::exec::Activations;
use pegainfer_core::parallel::Shard;
use pegainfer_core::record::OpRecord;
use pegainfer_kernels::ops::{HeadShape, KvDType};
use pegainfer_qwen3_4b::Qwen3;
use pegainfer_qwen3_4b::Step;
use pegainfer_qwen3_4b::config::Config;
use pegainfer_runtime::{GpuFit, LoadOptions, Model, ModelBytes, rank_bytes, record, record_step, uniform};
use serde_json::{Value, json};

/// (hidden, intermediate, layers, heads, tied, parameters) of the official Qwen3 models.
const SIZES: [(usize, usize, usize, usize, bool, u64); 6] = [
    (1024, 3072, 28, 16, true, 596_049_920),
    (2048, 6144, 28, 16, true, 1_720_574_976),
    (2560, 9728, 36, 32, true, 4_022_468_096),
    (4096, 12_288, 36, 32, false, 8_190_735_360),
    (5120, 17_408, 40, 40, false, 14_768_307_200),
    (5120, 25_600, 64, 64, false, 32_762_123_264),
];

fn config((hidden, width, layers, heads, tied, _): (usize, usize, usize, usize, bool, u64)) -> Config {
    Config {
        vocab_size: 151_936,
        hidden_size: hidden,
        intermediate_size: width,
        moe: None,
        dense_layers: Vec::new(),
        layers,
        shape: HeadShape { heads, kv_heads: 8, head_dim: 128 },
        all_heads: HeadShape { heads, kv_heads: 8, head_dim: 128 },
        shard: Shard::WHOLE,
        rms_norm_eps: 1e-6,
        rope: 1e6.into(),
        max_position_embeddings: 40_960,
        tie_word_embeddings: tied,
        quantization: None,
        kv_dtype: KvDType::Bf16,
        initializer_range: 0.02,
        eos_token_ids: vec![151_645, 151_643],
    }
}

fn bytes_of(config: &Config) -> ModelBytes {
    ModelBytes::of::<Qwen3>(config).unwrap()
}

fn total(records: &[OpRecord], of: impl Fn(&OpRecord) -> u64) -> u64 {
    records.iter().map(of).sum()
}

#[test]
fn a_decode_step_reads_every_weight_once() {
    for (size, kv_dtype) in SIZES.into_iter().flat_map(|size| [KvDType::Bf16, KvDType::Fp8].map(|kv| (size, kv))) {
        let config = Config { kv_dtype, ..config(size) };
        assert_eq!(bytes_of(&config).weights, 2 * size.5);
        let records = record::<Qwen3>(&config, 1, (8, 1, 1024)).unwrap();
        let untied = if size.4 { 0 } else { (config.vocab_size * config.hidden_size) as u64 };
        let gemms = |r: &OpRecord| match r.op.starts_with("linear") {
            true => 2 * 8 * r.reads[1].shape.iter().product::<usize>() as u64,
            false => 0,
        };
        let linear = total(&records, gemms);
        let norms = (config.layers * (2 * config.hidden_size + 256) + config.hidden_size) as u64;
        assert_eq!(linear, 2 * 8 * (size.5 - untied - norms), "2 FLOPs per weight and row");
        let kv = 8 * 1024 * bytes_of(&config).kv_per_token;
        let bytes = total(&records, |r| r.bytes);
        let floor = 2 * (size.5 - untied) + kv;
        assert!(bytes >= floor && bytes < floor + floor / 20, "{bytes} bytes, floor {floor}");
    }
}

#[test]
fn a_token_takes_the_memory_that_is_in_use_at_once() {
    // Three rows of the residual stream's width, and three of the MLP's, which share memory with attention's scratch.
    assert_eq!(bytes_of(&config(SIZES[2])).workspace_per_token, 2 * (3 * 2560 + 3 * 9728));
}

#[test]
fn one_op_takes_all_layers_of_few_rows() {
    for (size, one) in SIZES.into_iter().zip([true, true, true, true, false, false]) {
        for rows in [1, 2, 3] {
            let config = config(size);
            let records = record::<Qwen3>(&config, 1, (rows, 1, 1024)).unwrap();
            let layers: Vec<_> = records.iter().filter(|r| r.op == "decode_layers").collect();
            let fp8 = Config { kv_dtype: KvDType::Fp8, ..config.clone() };
            let fp8 = record::<Qwen3>(&fp8, 1, (rows, 1, 1024)).unwrap();
            assert!(fp8.iter().all(|r| r.op != "decode_layers"), "its kernel reads a bf16 cache");
            if !one || rows > 2 {
                assert!(layers.is_empty(), "too wide, or too many rows");
                continue;
            }
            let ops: Vec<_> = records.iter().map(|r| r.op).collect();
            assert_eq!(ops, ["embedding", "decode_layers", "linear", "sample"]);
            assert_eq!(layers[0].kernel, "one_kernel");
            let ends = if size.4 { 1 } else { 2 } * config.vocab_size * config.hidden_size;
            let floor = 2 * (size.5 - ends as u64) + rows as u64 * 1024 * bytes_of(&config).kv_per_token;
            let bytes = layers[0].bytes;
            assert!(bytes >= floor && bytes < floor + floor / 100, "{bytes} bytes, floor {floor}");
            let apart = total(&record::<Qwen3>(&config, 1, (3, 1, 1024)).unwrap(), |r| r.flops) * rows as u64 / 3;
            let flops = total(&records, |r| r.flops);
            assert!(flops.abs_diff(apart) < apart / 10_000, "{flops} FLOPs, of separate ops {apart}");
        }
    }
}

#[test]
fn prefill_flops_are_dense_plus_causal_attention() {
    let config = config(SIZES[2]);
    let records = record::<Qwen3>(&config, 1, (1, 1024, 1024)).unwrap();
    let attention = total(&records, |r| if r.op == "attention" { r.flops } else { 0 });
    assert_eq!(attention, 4 * 4096 * (35 * 1024 * 1025 / 2 + 1024), "one query in the last layer");
    assert_eq!(
        records.len(),
        2 + 36 * 6 + 4,
        "embedding, norm, six ops a layer, two for its rows in the last, head, sampling"
    );
    let end = records.iter().rev().find(|r| r.op == "linear_swiglu").unwrap();
    assert_eq!(end.writes[0].shape, [1, 9728], "of the last layer only the sampled row is wanted");
}

#[test]
fn a_step_without_samples_ends_with_the_last_keys_and_values() {
    let step = Step { samples: Vec::new(), ..uniform::<Qwen3>(1, 1024, 2048) };
    let records = record_step::<Qwen3>(&config(SIZES[2]), (Activations::Rounded, 1), &step).unwrap();
    assert_eq!((records.len(), records.last().unwrap().op), (2 + 35 * 6 + 2, "qk_norm_rope_write_kv"));
}

#[test]
fn every_input_was_written_before_or_is_a_weight() {
    let records = record::<Qwen3>(&config(SIZES[0]), 1, (2, 3, 40)).unwrap();
    let mut written: Vec<u32> = Vec::new();
    for record in &records {
        for read in &record.reads {
            let given = read.name.starts_with("model.") || read.name.starts_with("kv.");
            let host = ["sampled", "tokens", "positions", "slots", "qo_indptr", "kv_lens", "block_tables", "rope"];
            let samples = ["sample_rows", "sampled_indptr", "draws"];
            let host = host.contains(&read.name.as_str()) || samples.contains(&read.name.as_str());
            let previous = read.name == "sampled";
            assert!(given || host || previous || written.contains(&read.id), "{}", read.name);
        }
        written.extend(record.writes.iter().map(|w| w.id));
    }
}

/// The number of GPUs that is chosen holds the model as it is loaded, and a smaller number leaves less than a request.
#[test]
fn the_chosen_number_of_gpus_holds_the_model() {
    let defaults = LoadOptions {
        max_model_len: None,
        max_num_seqs: None,
        max_num_batched_tokens: None,
        kv_cache_bytes: None,
        ..options()
    };
    let mut chosen = Vec::new();
    for (size, gigabytes) in SIZES.into_iter().flat_map(|size| [16, 24, 40, 48, 76, 80, 86, 141].map(|gb| (size, gb))) {
        let (config, memory) = (config(size), gigabytes * 1_000_000_000);
        let needs = rank_bytes::<Qwen3>(&config, &defaults).unwrap();
        let Some(need) = needs.iter().find(|need| need.bytes <= memory) else { continue };
        let fit = GpuFit::new::<Qwen3>(&config, &defaults, need.ranks, memory);
        let fit = fit.unwrap_or_else(|error| panic!("{} GPUs of {gigabytes} GB: {error}", need.ranks));
        assert!(fit.kv_tokens > 8000, "{} GPUs of {gigabytes} GB: {} tokens", need.ranks, fit.kv_tokens);
        chosen.push((config.hidden_size, gigabytes, need.ranks));
    }
    assert!(chosen.contains(&(5120, 80, 2)) && chosen.contains(&(2560, 24, 1)), "{chosen:?}");
}

/// (hidden, layers, heads, KV heads, experts, width, parameters) of the official models with experts, 8 of which a token
/// has: 30B-A3B, 235B-A22B and Coder-480B-A35B.
const WITH_EXPERTS: [(usize, usize, usize, usize, usize, usize, u64); 3] = [
    (2048, 48, 32, 4, 128, 768, 30_532_122_624),
    (4096, 94, 64, 4, 128, 1536, 235_093_634_560),
    (6144, 62, 96, 8, 160, 2560, 480_154_875_392),
];

/// config.json of such a model in the official layout.
fn with_experts(size: &(usize, usize, usize, usize, usize, usize, u64)) -> Value {
    let (hidden, layers, heads, kv_heads, experts, width, _) = *size;
    json!({
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": false, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": 6144, "max_position_embeddings": 40_960,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": width, "norm_topk_prob": true,
        "num_attention_heads": heads, "num_experts": experts, "num_experts_per_tok": 8, "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": false,
        "vocab_size": 151_936, "eos_token_id": 151_645,
    })
}

#[test]
fn official_sizes_with_experts_have_their_published_totals() {
    for size in &WITH_EXPERTS {
        let config = Qwen3::parse_config(&with_experts(size).to_string()).unwrap();
        assert_eq!(bytes_of(&config).weights, 2 * size.6);
        let records = record::<Qwen3>(&config, 1, (1, 1, 1024)).unwrap();
        let of_experts = |r: &OpRecord| if r.op == "experts" { r.bytes } else { 0 };
        let read = total(&records, of_experts) as f64 / (8 * config.layers * 3 * size.0 * size.5 * 2) as f64;
        assert!((1.0..1.001).contains(&read), "a step of one token reads 8 experts a layer once: {read}");
    }
}

/// At 1,024 tokens of context. A batch reads the experts that its tokens hit if they choose evenly, 51.6 of 128 with 8
/// sequences, and everything else once.
#[test]
fn a_decode_step_reads_the_experts_that_its_tokens_hit() {
    let size = &WITH_EXPERTS[0];
    let config = Qwen3::parse_config(&with_experts(size).to_string()).unwrap();
    let expert = (config.layers * 3 * size.0 * size.5 * 2) as f64;
    for (batch, hits, gigabytes) in [(1, 8.0, 6.18), (8, 51.6, 26.6), (32, 111.8, 56.3), (128, 128.0, 73.4)] {
        let records = record::<Qwen3>(&config, 1, (batch, 1, 1024)).unwrap();
        let read = total(&records, |r| if r.op == "experts" { r.bytes } else { 0 }) as f64 / expert;
        assert!((read / hits - 1.0).abs() < 0.005, "{batch} sequences: {read} experts, expected {hits}");
        let all = total(&records, |r| r.bytes) as f64 / 1e9;
        assert!((all / gigabytes - 1.0).abs() < 0.03, "{batch} sequences: {all} GB, expected {gigabytes}");
    }
}

#[test]
fn layers_without_experts_have_a_dense_mlp() {
    let mut json = with_experts(&WITH_EXPERTS[0]);
    json["decoder_sparse_step"] = json!(2);
    json["mlp_only_layers"] = json!([3, 5]);
    json["norm_topk_prob"] = Value::Null;
    let config = Qwen3::parse_config(&json.to_string()).unwrap();
    let sparse: Vec<usize> = (0..config.layers).filter(|i| config.sparse_number(*i).is_some()).collect();
    assert_eq!((sparse.len(), &sparse[..3]), (22, &[1, 7, 9][..]));
    assert_eq!((config.sparse_number(8), config.sparse_number(9), config.moe.unwrap().layers), (None, Some(2), 22));
    assert!(!config.moe.unwrap().route.normalize, "the default of transformers");
    let records = record::<Qwen3>(&config, 1, (1, 1, 8)).unwrap();
    let count = |op| records.iter().filter(|record| record.op == op).count();
    assert_eq!((count("experts"), count("linear_swiglu")), (22, 26));
}
