//! A checkpoint written as GGUF, in that format's own parametrisation, is the same model.

use crate::mtp_support::{Checkpoint, widened};
use crate::support::speculation::{by_model, few_tokens};
use crate::support::{
    Fixture, MOE, Target, best, bundled_model, e2e, engine, engine_on, fixture, greedy, options, run,
};
use half::{bf16, f16};
use pegainfer_core::engine::StepEngine;
use pegainfer_qwen35_4b::Qwen35;
use pegainfer_qwen35_4b::config::Config;
use pegainfer_runtime::{LoadOptions, Model, ModelBytes, load};
use pegainfer_testing::TempDir;
use pegainfer_testing::gguf::{Value, Writer};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::path::Path;

/// Types of tensors.
const F32: u32 = 0;
const Q8_0: u32 = 8;
const BF16: u32 = 30;

/// Beginning of a name of a layer's tensor in Hugging Face's checkpoints, and of the same in GGUF.
const NAMES: [(&str, &str); 33] = [
    ("input_layernorm.weight", "attn_norm.weight"),
    ("post_attention_layernorm.weight", "post_attention_norm.weight"),
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("mlp.gate_proj.weight", "ffn_gate.weight"),
    ("mlp.up_proj.weight", "ffn_up.weight"),
    ("mlp.down_proj.weight", "ffn_down.weight"),
    ("mlp.gate.weight", "ffn_gate_inp.weight"),
    ("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight"),
    ("mlp.shared_expert.gate_proj.weight", "ffn_gate_shexp.weight"),
    ("mlp.shared_expert.up_proj.weight", "ffn_up_shexp.weight"),
    ("mlp.shared_expert.down_proj.weight", "ffn_down_shexp.weight"),
    ("mlp.experts.down_proj", "ffn_down_exps.weight"),
    ("linear_attn.in_proj_qkv.weight", "attn_qkv.weight"),
    ("linear_attn.in_proj_z.weight", "attn_gate.weight"),
    ("linear_attn.in_proj_a.weight", "ssm_alpha.weight"),
    ("linear_attn.in_proj_b.weight", "ssm_beta.weight"),
    ("linear_attn.conv1d.weight", "ssm_conv1d.weight"),
    ("linear_attn.dt_bias", "ssm_dt.bias"),
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.norm.weight", "ssm_norm.weight"),
    ("linear_attn.out_proj.weight", "ssm_out.weight"),
    ("model.language_model.embed_tokens.weight", "token_embd.weight"),
    ("model.language_model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
    ("mtp.fc.weight", "blk.8.nextn.eh_proj.weight"),
    ("mtp.pre_fc_norm_embedding.weight", "blk.8.nextn.enorm.weight"),
    ("mtp.pre_fc_norm_hidden.weight", "blk.8.nextn.hnorm.weight"),
    ("mtp.norm.weight", "blk.8.nextn.shared_head_norm.weight"),
];

/// Name in GGUF; `None` for the image encoder.
fn gguf_name(name: &str) -> Option<String> {
    let of_layer = name.strip_prefix("model.language_model.layers.").and_then(|rest| rest.split_once('.'));
    let draft = || name.strip_prefix("mtp.layers.0.").map(|tail| ("8", tail));
    let (block, tail) = of_layer.or_else(draft).map_or((None, name), |(block, tail)| (Some(block), tail));
    let (_, to) = NAMES.iter().find(|(from, _)| *from == tail)?;
    Some(block.map_or_else(|| (*to).to_owned(), |block| format!("blk.{block}.{to}")))
}

/// The values of a tensor as the converter writes them.
struct Converter {
    config: Config,
}

impl Converter {
    /// `values` with heads of `width` values after the first `first` of each `row` in tiled order: place `j` has head
    /// `j mod nk · r + j / nk`.
    fn tiled(&self, values: &[f32], row: usize, first: usize, width: usize) -> Vec<f32> {
        let (nk, nv) = (self.config.delta.key_heads, self.config.delta.value_heads);
        let head = |j: usize| j % nk * (nv / nk) + j / nk;
        let rows = values.chunks(row).flat_map(|values| {
            let heads = (0..nv).flat_map(move |j| values[first + head(j) * width..][..width].iter().copied());
            values[..first].iter().copied().chain(heads)
        });
        rows.collect()
    }

    /// Shape, values, and true for a matrix that stays bf16.
    fn convert(&self, name: &str, shape: &[usize], values: Vec<f32>) -> (Vec<usize>, Vec<f32>, bool) {
        let delta = self.config.delta;
        let (hidden, all) = (self.config.hidden_size, values.len());
        let keys = 2 * delta.k_width();
        let (plain, tail) = (shape.to_vec(), name.rsplit_once("linear_attn.").map_or("", |(_, tail)| tail));
        match tail {
            "A_log" => {
                let rates: Vec<f32> = values.iter().map(|value| -value.exp()).collect();
                (plain, self.tiled(&rates, all, 0, 1), false)
            }
            "dt_bias" => (plain, self.tiled(&values, all, 0, 1), false),
            "norm.weight" => (plain, values, false),
            "conv1d.weight" => {
                let width = delta.conv_width;
                let values = self.tiled(&values, all, keys * width, delta.value_dim * width);
                (vec![shape[0], width], values, false)
            }
            "in_proj_qkv.weight" => (plain, self.tiled(&values, all, keys * hidden, delta.value_dim * hidden), true),
            "in_proj_z.weight" => (plain, self.tiled(&values, all, 0, delta.value_dim * hidden), true),
            "in_proj_a.weight" | "in_proj_b.weight" => (plain, self.tiled(&values, all, 0, hidden), true),
            "out_proj.weight" => (plain, self.tiled(&values, delta.v_width(), 0, delta.value_dim), true),
            // A vector in GGUF.
            _ if name.ends_with("shared_expert_gate.weight") => (vec![hidden], values, false),
            _ if shape.len() == 1 => (plain, values.iter().map(|value| 1.0 + value).collect(), false),
            _ => (plain, values, true),
        }
    }
}

/// The metadata of the checkpoint in `dir`, which has `drafts` layers that draft.
fn metadata(config: &Config, drafts: u32) -> Writer {
    let mut writer = Writer::default();
    let architecture = if config.moe.is_some() { "qwen35moe" } else { "qwen35" };
    writer.pair("general.architecture", architecture);
    let experts = config.moe.map_or(Vec::new(), |moe| {
        vec![
            ("expert_count", moe.route.experts),
            ("expert_used_count", moe.route.chosen),
            ("expert_feed_forward_length", moe.width),
            ("expert_shared_feed_forward_length", moe.width),
        ]
    });
    let delta = config.delta;
    let sizes = [
        ("block_count", config.layers.len() + drafts as usize),
        ("context_length", config.max_position_embeddings),
        ("embedding_length", config.hidden_size),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", config.shape.heads),
        ("attention.head_count_kv", config.shape.kv_heads),
        ("attention.key_length", config.shape.head_dim),
        ("attention.value_length", config.shape.head_dim),
        ("rope.dimension_count", config.rotary_dim),
        ("ssm.conv_kernel", delta.conv_width),
        ("ssm.state_size", delta.key_dim),
        ("ssm.group_count", delta.key_heads),
        ("ssm.time_step_rank", delta.value_heads),
        ("ssm.inner_size", delta.v_width()),
        ("full_attention_interval", 4),
        ("nextn_predict_layers", drafts as usize),
    ];
    for (key, size) in sizes.into_iter().chain(experts) {
        writer.pair(&format!("{architecture}.{key}"), size as u32);
    }
    writer.pair(&format!("{architecture}.attention.layer_norm_rms_epsilon"), config.rms_norm_eps);
    writer.pair(&format!("{architecture}.rope.freq_base"), config.rope.theta as f32);
    let ends = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(str::to_owned);
    let tokens = (0..4087).map(|id| format!("t{id}")).chain(ends);
    writer.pair("tokenizer.ggml.tokens", Value::Texts(tokens.collect()));
    writer.pair("tokenizer.ggml.eos_token_id", 4089u32);
    writer
}

/// Writes the gates of all experts of a layer as one tensor, and so the other rows of their first matrices.
fn write_first_matrices(writer: &mut Writer, layer: &str, view: &TensorView<'_>) {
    let &[experts, rows, columns] = view.shape() else { panic!("{:?}", view.shape()) };
    let values = widened(view);
    for (half, name) in ["ffn_gate_exps", "ffn_up_exps"].into_iter().enumerate() {
        let of_expert = |expert: &[f32]| expert[half * rows / 2 * columns..][..rows / 2 * columns].to_vec();
        let values: Vec<f32> = values.chunks(rows * columns).flat_map(of_expert).collect();
        writer.tensor(&format!("blk.{layer}.{name}.weight"), &[experts, rows / 2, columns], Q8_0, q8_0(&values));
    }
}

/// Values rounded to eight bits, with a scale for each 32.
fn q8_0(values: &[f32]) -> Vec<u8> {
    let block = |values: &[f32]| {
        let scale = f16::from_f32(values.iter().fold(0f32, |max, v| max.max(v.abs())) / 127.0);
        let code = |v: &f32| ((v / scale.to_f32()).round().clamp(-127.0, 127.0) as i8) as u8;
        scale.to_le_bytes().into_iter().chain(values.iter().map(code)).collect::<Vec<_>>()
    };
    values.chunks(32).flat_map(block).collect()
}

/// Writes the checkpoint in `dir` as a GGUF file.
fn write(dir: &Path, drafts: u32, to: &Path) {
    let config = Qwen35::load_config(dir).unwrap();
    let mut writer = metadata(&config, drafts);
    let file = std::fs::read(dir.join("model.safetensors")).unwrap();
    let converter = Converter { config };
    for (name, view) in SafeTensors::deserialize(&file).unwrap().iter() {
        if let Some(layer) = name.strip_suffix(".mlp.experts.gate_up_proj") {
            write_first_matrices(&mut writer, layer.rsplit_once('.').unwrap().1, &view);
            continue;
        }
        // Without its layer, the bundled checkpoint's `mtp.fc` drafts nothing.
        let Some(gguf) = gguf_name(name).filter(|gguf| drafts > 0 || !gguf.contains("nextn")) else { continue };
        let (shape, values, is_matrix) = converter.convert(name, view.shape(), widened(&view));
        if name.ends_with("experts.down_proj") {
            writer.tensor(&gguf, &shape, Q8_0, q8_0(&values));
            continue;
        }
        let bytes: Vec<u8> = match is_matrix && view.dtype() == Dtype::BF16 {
            true => values.iter().flat_map(|value| bf16::from_f32(*value).to_le_bytes()).collect(),
            false => values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        };
        writer.tensor(&gguf, &shape, if is_matrix { BF16 } else { F32 }, bytes);
    }
    std::fs::write(to, writer.bytes()).unwrap();
}

#[test]
fn a_gguf_file_agrees_with_the_reference_of_its_checkpoint() {
    let (dir, temporary) = (bundled_model("qwen35-tiny"), TempDir::new("qwen35-gguf"));
    let path = temporary.path().join("qwen35-tiny.gguf");
    write(&dir, 0, &path);
    let (config, original) = (Qwen35::load_config(&path).unwrap(), Qwen35::load_config(&dir).unwrap());
    assert!(config.gguf && config.delta.tiled_output && !original.gguf);
    let delta = pegainfer_kernels::ops::DeltaShape { tiled_output: false, ..config.delta };
    assert_eq!(Config { gguf: false, delta, ..config }, original);
    // The output projection adds its columns in another order, so not every bit is the same.
    let load = |target| engine(target, &LoadOptions { model_path: path.clone(), ..options() });
    e2e::greedy_text_equals_the_reference(&fixture(), load);
}

#[test]
fn a_gguf_file_drafts_as_its_checkpoint_drafts() {
    let (checkpoint, temporary) = (Checkpoint::repeating("gguf"), TempDir::new("qwen35-gguf-mtp"));
    let path = temporary.path().join("model.gguf");
    write(&checkpoint.path(), 1, &path);
    let requests = few_tokens(fixture().cases.iter().map(|case| greedy(&case.prompt_ids, 40)).collect());
    let run_with = |model_path: &Path, speculation| {
        let options = LoadOptions { model_path: model_path.to_owned(), speculation, ..options() };
        let mut engine = engine(best(), &options);
        let ids: Vec<_> = run(&mut engine, &requests).iter().map(|output| output.ids()).collect();
        (ids, engine.stats().speculation.accepted_tokens())
    };
    let (alone, (drafting, accepted)) = (run_with(&path, None), run_with(&path, by_model(2)));
    assert_eq!(drafting, alone.0);
    let (_, expected) = run_with(&checkpoint.path(), by_model(2));
    // Rounding may change a draft.
    assert!(
        expected > 0 && accepted.abs_diff(expected) <= expected / 4,
        "{accepted} drafts were taken, not {expected}"
    );
}

#[test]
fn several_ranks_share_tiled_heads() {
    let temporary = TempDir::new("qwen35-gguf-ranks");
    let path = temporary.path().join("model.gguf");
    write(&bundled_model("qwen35-tiny"), 0, &path);
    let options = LoadOptions { model_path: path, check_ranks: true, ..options() };
    e2e::greedy_text_equals_the_reference(&fixture(), |target| engine_on(2, target, &options));
}

/// Experts in groups of 32, the shared one in bf16, on two ranks.
#[test]
fn a_gguf_file_with_experts_agrees_with_the_reference_of_its_checkpoint() {
    if best() == Target::Cuda {
        println!("skipped: GPUs take experts in bf16 and FP8");
        return;
    }
    let temporary = TempDir::new("qwen35-gguf-moe");
    let path = temporary.path().join("model.gguf");
    write(&bundled_model(MOE[0]), 0, &path);
    let options = LoadOptions { model_path: path, ..options() };
    let mut loaded = 0;
    load::<Qwen35>(best().execs(1), &options, &mut |bytes, _| loaded += bytes).unwrap();
    let config = Qwen35::load_config(&options.model_path).unwrap();
    assert_eq!(loaded, ModelBytes::of::<Qwen35>(&config).unwrap().weights, "the plan");
    let fixture = Fixture { limits: crate::moe::LIMITS, ..Fixture::bundled(MOE[0]) };
    e2e::greedy_text_equals_the_reference(&fixture, |target| engine_on(2, target, &options));
}
