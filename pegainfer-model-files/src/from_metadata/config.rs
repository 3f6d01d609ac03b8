//! config.json from metadata.

use super::architecture::Architecture;
use crate::gguf::{Gguf, Metadata};
use serde_json::{Map, Value, json};

/// The numbers of one architecture in the metadata.
struct Numbers<'a> {
    metadata: &'a Metadata,
    prefix: &'static str,
}

impl Numbers<'_> {
    fn key(&self, tail: &str) -> String {
        format!("{}.{tail}", self.prefix)
    }

    fn size(&self, tail: &str) -> Result<Option<u64>, String> {
        self.metadata.unsigned(&self.key(tail))
    }

    fn number(&self, tail: &str) -> Result<Option<f64>, String> {
        self.metadata.number(&self.key(tail))
    }

    fn required<T>(&self, tail: &str, value: Option<T>) -> Result<T, String> {
        value.ok_or_else(|| format!("its metadata has no {}", self.key(tail)))
    }

    fn required_size(&self, tail: &str) -> Result<u64, String> {
        self.required(tail, self.size(tail)?)
    }
}

/// config.json of the model. The vocabulary's size is that of the embedding, and the output matrix is tied to it if the
/// file has none.
pub fn config(gguf: &Gguf, architecture: Architecture) -> Result<Value, String> {
    let metadata = &gguf.metadata;
    let numbers = Numbers { metadata, prefix: architecture.prefix() };
    let (layers, drafts) = architecture.layers(metadata)?;
    let heads = numbers.required_size("attention.head_count")?;
    let hidden = numbers.required_size("embedding_length")?;
    let head_dim = numbers.size("attention.key_length")?.or(hidden.checked_div(heads));
    let value_dim = numbers.size("attention.value_length")?.or(head_dim);
    if value_dim != head_dim {
        return Err(format!("{} differs from the width of keys", numbers.key("attention.value_length")));
    }
    let embedding = gguf.tensor("token_embd.weight").ok_or("it has no tensor token_embd.weight")?;
    let rope_theta = numbers.number("rope.freq_base")?;
    let epsilon = numbers.number("attention.layer_norm_rms_epsilon")?;
    let mut config = json!({
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": numbers.size("attention.head_count_kv")?.unwrap_or(heads),
        "head_dim": head_dim,
        "rms_norm_eps": numbers.required("attention.layer_norm_rms_epsilon", epsilon)?,
        "rope_theta": numbers.required("rope.freq_base", rope_theta)?,
        "rope_scaling": rope_scaling(&numbers)?,
        "max_position_embeddings": numbers.required_size("context_length")?,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": gguf.tensor("output.weight").is_none(),
        "eos_token_id": metadata.unsigned("tokenizer.ggml.eos_token_id")?,
        "bos_token_id": metadata.unsigned("tokenizer.ggml.bos_token_id")?,
    });
    let names = match architecture {
        Architecture::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
        Architecture::Qwen3Moe => ("Qwen3MoeForCausalLM", "qwen3_moe"),
        Architecture::Qwen35 => ("Qwen3_5ForConditionalGeneration", "qwen3_5"),
        Architecture::Qwen35Moe => ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
    };
    let mixer = match architecture {
        Architecture::Qwen3 | Architecture::Qwen3Moe => json!({}),
        Architecture::Qwen35 | Architecture::Qwen35Moe => qwen35(&numbers, head_dim, drafts)?,
    };
    let mlp = match architecture {
        Architecture::Qwen3 | Architecture::Qwen35 => {
            json!({"intermediate_size": numbers.required_size("feed_forward_length")?})
        }
        Architecture::Qwen3Moe | Architecture::Qwen35Moe => experts(&numbers, architecture)?,
    };
    for fields in [json!({"architectures": [names.0], "model_type": names.1}), mixer, mlp] {
        if let (Value::Object(config), Value::Object(fields)) = (&mut config, fields) {
            config.extend(fields);
        }
    }
    Ok(config)
}

/// The fields of a model with experts. The converter's models normalise the weights of a token's experts.
fn experts(numbers: &Numbers<'_>, architecture: Architecture) -> Result<Value, String> {
    let width = numbers.required_size("expert_feed_forward_length")?;
    let shared = match architecture {
        Architecture::Qwen35Moe => Some(numbers.size("expert_shared_feed_forward_length")?.unwrap_or(width)),
        _ => None,
    };
    Ok(json!({
        "num_experts": numbers.required_size("expert_count")?,
        "num_experts_per_tok": numbers.required_size("expert_used_count")?,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": shared,
        "norm_topk_prob": true,
    }))
}

/// The fields that only Qwen3.5 has. `gguf_parametrization` says that the weights are those of the GGUF converter.
fn qwen35(numbers: &Numbers<'_>, head_dim: Option<u64>, drafts: u64) -> Result<Value, String> {
    let value_heads = numbers.required_size("ssm.time_step_rank")?;
    let inner = numbers.required_size("ssm.inner_size")?;
    if value_heads == 0 || !inner.is_multiple_of(value_heads) {
        return Err(format!("{} is {inner}, for {value_heads} value heads", numbers.key("ssm.inner_size")));
    }
    if numbers.metadata.get(&numbers.key("attention.recurrent_layers")).is_some() {
        return Err(format!(
            "{} lists its layers, and a period in full_attention_interval is served",
            numbers.key("attention.recurrent_layers")
        ));
    }
    let rotated = numbers.required_size("rope.dimension_count")?;
    Ok(json!({
        "gguf_parametrization": true,
        "full_attention_interval": numbers.size("full_attention_interval")?.unwrap_or(4),
        "partial_rotary_factor": head_dim.map(|head_dim| rotated as f64 / head_dim as f64),
        "linear_conv_kernel_dim": numbers.required_size("ssm.conv_kernel")?,
        "linear_key_head_dim": numbers.required_size("ssm.state_size")?,
        "linear_num_key_heads": numbers.required_size("ssm.group_count")?,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": inner / value_heads,
        "mtp_num_hidden_layers": drafts,
    }))
}

/// `rope_scaling`; null for plain RoPE. The keys' `attn_factor` multiplies YaRN's own factor, and `attention_factor` of
/// config.json takes its place.
fn rope_scaling(numbers: &Numbers<'_>) -> Result<Value, String> {
    let kind = numbers.metadata.text(&numbers.key("rope.scaling.type"))?;
    let Some(kind) = kind.filter(|kind| kind != "none") else { return Ok(Value::Null) };
    let mut scaling = Map::from_iter([("rope_type".to_owned(), Value::from(kind))]);
    let fields = [
        ("factor", "factor"),
        ("original_context_length", "original_max_position_embeddings"),
        ("yarn_beta_fast", "beta_fast"),
        ("yarn_beta_slow", "beta_slow"),
    ];
    for (key, field) in fields {
        if let Some(value) = numbers.number(&format!("rope.scaling.{key}"))? {
            scaling.insert(field.to_owned(), value.into());
        }
    }
    let attention = numbers.number("rope.scaling.attn_factor")?.or(numbers.number("rope.scaling.yarn_attn_factor")?);
    if let (Some(attention), Some(factor)) = (attention, scaling.get("factor").and_then(Value::as_f64)) {
        scaling.insert("attention_factor".to_owned(), (attention * (0.1 * factor.ln() + 1.0)).into());
    }
    Ok(Value::Object(scaling))
}
