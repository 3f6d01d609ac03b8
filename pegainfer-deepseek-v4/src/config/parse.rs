//! Parses the files of a checkpoint into a [`Config`].

mod dspark;
#[cfg(test)]
mod tests;

use super::{Config, Drafts, LayerKind, STREAMS, WINDOW, Yarn};
use crate::rank_config::DeepSeekV4;
use pegainfer_runtime::{ConfigError, ConfigFile, MAX_CONTEXT, Model, unsupported};
use serde::Deserialize;
use serde_json::Value;
use std::path::Path;

/// Maximum number of parts with tensors of their own, such as heads and experts: the list of tensors is made before the
/// weights are opened.
const MAX_PARTS: usize = 1 << 14;
/// Maximum number of decoder layers.
const MAX_LAYERS: usize = 1 << 12;
/// Maximum number of draft layers.
const MAX_DRAFT_LAYERS: usize = 64;
/// Maximum number of rounds of the Sinkhorn normalisation, which runs for every token.
const MAX_SINKHORN_ITERS: usize = 1000;
/// Widest matrix.
const MAX_WIDTH: usize = 1 << 20;
/// Widest head.
const MAX_HEAD_DIM: usize = 1 << 12;
/// Largest vocabulary.
const MAX_VOCAB: usize = 1 << 24;

impl Config {
    /// Reads `config.json`, and the end-of-text ids of `generation_config.json` and of the tokenizer, if they exist.
    pub fn load(dir: &Path) -> Result<Self, ConfigError> {
        Self::read(&ConfigFile::read(dir, DeepSeekV4::NAME)?)
    }

    /// Parses the text of a config.json.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        Self::read(&ConfigFile::parse(text, DeepSeekV4::NAME)?)
    }

    /// The numbers of a config.json.
    pub(crate) fn read(file: &ConfigFile) -> Result<Self, ConfigError> {
        refuse_unsupported(&file.fields()?)?;
        file.fields::<Raw>()?.config(file)
    }
}

#[derive(Deserialize)]
struct Raw {
    vocab_size: usize,
    hidden_size: usize,
    num_hidden_layers: usize,
    compress_ratios: Vec<usize>,
    num_attention_heads: usize,
    head_dim: usize,
    qk_rope_head_dim: usize,
    q_lora_rank: usize,
    o_groups: usize,
    o_lora_rank: usize,
    index_n_heads: usize,
    index_head_dim: usize,
    index_topk: usize,
    num_hash_layers: usize,
    n_routed_experts: usize,
    num_experts_per_tok: usize,
    moe_intermediate_size: usize,
    routed_scaling_factor: f32,
    swiglu_limit: f32,
    hc_sinkhorn_iters: usize,
    hc_eps: f32,
    rms_norm_eps: f32,
    rope_theta: f64,
    compress_rope_theta: f64,
    rope_scaling: RawYarn,
    max_position_embeddings: usize,
    #[serde(default)]
    num_nextn_predict_layers: usize,
    dspark_block_size: Option<usize>,
    dspark_noise_token_id: Option<u32>,
    #[serde(default)]
    dspark_markov_rank: usize,
    #[serde(default)]
    dspark_target_layer_ids: Vec<usize>,
    #[serde(default)]
    quantization_config: Value,
    initializer_range: Option<f32>,
}

#[derive(Deserialize)]
struct RawYarn {
    factor: f64,
    beta_fast: f64,
    beta_slow: f64,
    original_max_position_embeddings: f64,
}

impl Raw {
    /// The numbers of the model; refuses impossible ones.
    fn config(self, file: &ConfigFile) -> Result<Config, ConfigError> {
        self.check(file)?;
        let kind = |&ratio: &usize| match ratio {
            0 => Ok(LayerKind::Window),
            4 => Ok(LayerKind::Sparse),
            128 => Ok(LayerKind::Heavy),
            _ => Err(unsupported("compress_ratios", ratio, "0, 4 and 128")),
        };
        let layers: Vec<LayerKind> = self.compress_ratios.iter().map(kind).collect::<Result<_, _>>()?;
        // The entries after those of the model are those of the draft layers.
        let layers = layers.get(..self.num_hidden_layers).ok_or_else(|| {
            file.invalid(format!("compress_ratios has {} entries for {} layers", layers.len(), self.num_hidden_layers))
        })?;
        let drafts = match (self.dspark_block_size, self.num_nextn_predict_layers) {
            // DSpark's config still counts one MTP layer.
            (Some(tokens), _) => Drafts::DSpark(self.dspark(tokens, file)?),
            (None, 0) => Drafts::None,
            (None, layers) => Drafts::Mtp { layers },
        };
        let yarn = &self.rope_scaling;
        Ok(Config {
            vocab_size: self.vocab_size,
            hidden_size: self.hidden_size,
            layers: layers.to_vec(),
            drafts,
            loads_drafts: false,
            heads: self.num_attention_heads,
            head_dim: self.head_dim,
            rope_dim: self.qk_rope_head_dim,
            q_lora_rank: self.q_lora_rank,
            o_groups: self.o_groups,
            o_lora_rank: self.o_lora_rank,
            index_heads: self.index_n_heads,
            index_head_dim: self.index_head_dim,
            index_topk: self.index_topk,
            hash_layers: self.num_hash_layers,
            experts: self.n_routed_experts,
            experts_per_token: self.num_experts_per_tok,
            expert_width: self.moe_intermediate_size,
            routed_scaling: self.routed_scaling_factor,
            swiglu_limit: self.swiglu_limit,
            sinkhorn_iters: self.hc_sinkhorn_iters,
            hc_eps: self.hc_eps,
            rms_norm_eps: self.rms_norm_eps,
            rope_theta: self.rope_theta,
            compress_rope_theta: self.compress_rope_theta,
            yarn: Yarn {
                factor: yarn.factor,
                beta_fast: yarn.beta_fast,
                beta_slow: yarn.beta_slow,
                original_context: yarn.original_max_position_embeddings,
            },
            max_position_embeddings: self.max_position_embeddings,
            quantized: !is_empty(&self.quantization_config),
            initializer_range: self.initializer_range.unwrap_or(0.02),
            eos_token_ids: file.eos_token_ids()?,
        })
    }

    fn check(&self, file: &ConfigFile) -> Result<(), ConfigError> {
        for (field, value, unit, max) in [
            ("vocab_size", self.vocab_size, 1, MAX_VOCAB),
            ("hidden_size", self.hidden_size, 128, MAX_WIDTH),
            ("num_hidden_layers", self.num_hidden_layers, 1, MAX_LAYERS),
            ("num_attention_heads", self.num_attention_heads, 1, MAX_PARTS),
            ("head_dim", self.head_dim, 128, MAX_HEAD_DIM),
            ("qk_rope_head_dim", self.qk_rope_head_dim, 64, MAX_HEAD_DIM),
            ("q_lora_rank", self.q_lora_rank, 128, MAX_WIDTH),
            ("o_groups", self.o_groups, 1, MAX_PARTS),
            ("o_lora_rank", self.o_lora_rank, 128, MAX_WIDTH),
            ("index_n_heads", self.index_n_heads, 1, MAX_PARTS),
            ("index_head_dim", self.index_head_dim, 128, MAX_HEAD_DIM),
            ("index_topk", self.index_topk, 1, MAX_WIDTH),
            ("n_routed_experts", self.n_routed_experts, 1, MAX_PARTS),
            ("num_experts_per_tok", self.num_experts_per_tok, 1, MAX_PARTS),
            ("moe_intermediate_size", self.moe_intermediate_size, 128, MAX_WIDTH),
            ("hc_sinkhorn_iters", self.hc_sinkhorn_iters, 1, MAX_SINKHORN_ITERS),
            ("max_position_embeddings", self.max_position_embeddings, 1, MAX_CONTEXT),
        ] {
            if value == 0 || !value.is_multiple_of(unit) {
                return Err(file.invalid(format!("{field} is {value}; it must be a multiple of {unit}")));
            }
            if value > max {
                return Err(file.invalid(format!("{field} is {value}; it must be at most {max}")));
            }
        }
        let drafts = self.num_nextn_predict_layers;
        if drafts > MAX_DRAFT_LAYERS {
            return Err(
                file.invalid(format!("num_nextn_predict_layers is {drafts}; it must be at most {MAX_DRAFT_LAYERS}"))
            );
        }
        let yarn = &self.rope_scaling;
        for (wrong, message) in [
            (!self.num_attention_heads.is_multiple_of(self.o_groups), "num_attention_heads is no multiple of o_groups"),
            (self.qk_rope_head_dim >= self.head_dim, "qk_rope_head_dim leaves nothing of head_dim"),
            (self.qk_rope_head_dim >= self.index_head_dim, "qk_rope_head_dim leaves nothing of index_head_dim"),
            (!self.index_head_dim.is_power_of_two(), "index_head_dim is no power of two"),
            (self.num_experts_per_tok > self.n_routed_experts, "num_experts_per_tok exceeds n_routed_experts"),
            (self.num_hash_layers > self.num_hidden_layers, "num_hash_layers exceeds num_hidden_layers"),
            (!(self.rms_norm_eps > 0.0 && self.hc_eps > 0.0), "rms_norm_eps and hc_eps must be positive"),
            (!(self.rope_theta > 1.0 && self.compress_rope_theta > 1.0), "the rope thetas must exceed 1"),
            (!(yarn.factor >= 1.0 && yarn.beta_fast > yarn.beta_slow), "rope_scaling cannot be used"),
            (self.swiglu_limit <= 0.0, "swiglu_limit must be positive"),
        ] {
            if wrong {
                return Err(file.invalid(message.to_owned()));
            }
        }
        Ok(())
    }
}

/// True if there is no quantization; some exports have an empty object.
fn is_empty(quantization: &Value) -> bool {
    quantization.is_null() || quantization.as_object().is_some_and(serde_json::Map::is_empty)
}

/// Refuses fields with a value other than the supported one.
fn refuse_unsupported(json: &Value) -> Result<(), ConfigError> {
    let quantization = &json["quantization_config"];
    let given = |value: &Value, served: Value| (!value.is_null() && *value != served).then(|| value.to_string());
    let quantized =
        |field: &str, served: Value| (!is_empty(quantization)).then(|| given(&quantization[field], served)).flatten();
    let rules: [(&'static str, Option<String>, &'static str); 20] = [
        ("model_type", given(&json["model_type"], "deepseek_v4".into()), "deepseek_v4 (V4-Flash), not V4.1"),
        ("vision_config", given(&json["vision_config"], Value::Null), "text models"),
        ("num_key_value_heads", given(&json["num_key_value_heads"], 1.into()), "one key-value head"),
        ("n_shared_experts", given(&json["n_shared_experts"], 1.into()), "one shared expert"),
        ("hc_mult", given(&json["hc_mult"], STREAMS.into()), "4 residual streams"),
        ("sliding_window", given(&json["sliding_window"], WINDOW.into()), "a window of 128 tokens"),
        ("attention_bias", given(&json["attention_bias"], false.into()), "projections without bias"),
        ("tie_word_embeddings", given(&json["tie_word_embeddings"], false.into()), "a separate output matrix"),
        ("hidden_act", given(&json["hidden_act"], "silu".into()), "silu"),
        ("scoring_func", given(&json["scoring_func"], "sqrtsoftplus".into()), "sqrtsoftplus"),
        ("topk_method", given(&json["topk_method"], "noaux_tc".into()), "noaux_tc"),
        ("norm_topk_prob", given(&json["norm_topk_prob"], true.into()), "normalised routing weights"),
        ("rope_scaling.type", given(&json["rope_scaling"]["type"], "yarn".into()), "yarn"),
        ("torch_dtype", given(&json["torch_dtype"], "bfloat16".into()), "bfloat16"),
        ("quantization_config.quant_method", quantized("quant_method", "fp8".into()), "fp8"),
        ("quantization_config.fmt", quantized("fmt", "e4m3".into()), "e4m3"),
        ("quantization_config.scale_fmt", quantized("scale_fmt", "ue8m0".into()), "ue8m0 scales"),
        (
            "quantization_config.weight_block_size",
            quantized("weight_block_size", vec![128, 128].into()),
            "blocks of 128 x 128",
        ),
        ("expert_dtype", given(&json["expert_dtype"], "fp4".into()), "fp4 experts"),
        ("engram_config", given(&json["engram_config"], Value::Null), "models without engram tables (not V4.1)"),
    ];
    for (field, value, served) in rules {
        if let Some(value) = value {
            return Err(unsupported(field, value, served));
        }
    }
    Ok(())
}
