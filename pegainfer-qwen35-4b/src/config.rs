//! config.json of a Qwen3.5 checkpoint. Unsupported fields are refused by name, never ignored.

#[cfg(test)]
mod tests;

use crate::vision::config::VisionConfig;
use pegainfer_core::parallel::Shard;
use pegainfer_core::weights::SCALE_BLOCK;
use pegainfer_kernels::ops::{DeltaShape, HeadShape, KvDType, RopeSpec};
use pegainfer_runtime::{ConfigError, ConfigFile, DecoderShape, MoeShape, Quantization, unsupported};
use serde_json::{Value, json};

/// `<|endoftext|>` of the family's tokenizer, the one end-of-text id that its config.json names.
const END_OF_TEXT: u32 = 248_044;
/// `<|im_end|>`, which ends a chat turn.
const END_OF_TURN: u32 = 248_046;

/// Field of config.json that says that the weights are those of a GGUF file.
const GGUF: &str = "gguf_parametrization";

/// Name of the embedding table in checkpoints.
pub const EMBEDDING: &str = "model.language_model.embed_tokens.weight";
/// Width of a head if config.json does not give it, as in transformers.
const HEAD_DIM: usize = 256;

/// Projections that FP8 checkpoints keep in bf16.
pub const BF16_MODULES: [&str; 2] = ["in_proj_a", "in_proj_b"];

/// Token mixer of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// The gated delta rule: a state of fixed size.
    Linear,
    /// Gated softmax attention over the KV cache.
    Full,
}

/// The numbers of a Qwen3.5 model, its text part.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Rows of the embedding table.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of a dense MLP, 0 if the layers have experts; with several ranks the rank's share.
    pub intermediate_size: usize,
    /// The experts of a Qwen3.5-MoE; their width with several ranks is the rank's share.
    pub moe: Option<MoeShape>,
    /// Decoder layers, first to last; the last one is `Full`.
    pub layers: Vec<LayerKind>,
    /// Heads of full attention; with several ranks those of the rank.
    pub shape: HeadShape,
    /// Heads of full attention of the whole model.
    pub all_heads: HeadShape,
    /// The rank whose share these numbers are.
    pub shard: Shard,
    /// Leading elements of an attention head that RoPE rotates.
    pub rotary_dim: usize,
    /// Heads of the gated delta rule; with several ranks those of the rank.
    pub delta: DeltaShape,
    /// True if the weights are those of a GGUF file: norms are stored as `1 + w`, decay rates as `-exp(A_log)`, and value
    /// heads in the order of [`DeltaShape::output_head`].
    pub gguf: bool,
    /// Epsilon of every RMSNorm.
    pub rms_norm_eps: f32,
    /// Rotary frequencies.
    pub rope: RopeSpec,
    /// Context length the model was trained for, or that YaRN extends it to.
    pub max_position_embeddings: usize,
    /// The output matrix is the embedding table, see [`ConfigFile::ties_output`].
    pub tie_word_embeddings: bool,
    /// True if the layer that drafts is loaded (multi-token prediction).
    pub mtp: bool,
    /// The vision tower, if the model reads images.
    pub vision: Option<VisionConfig>,
    /// Quantised weights; `None` for bf16.
    pub quantization: Option<Quantization>,
    /// Element format of the KV cache.
    pub kv_dtype: KvDType,
    /// Standard deviation of dummy weights.
    pub initializer_range: f32,
    /// End-of-text ids, see [`ConfigFile::eos_token_ids`].
    pub eos_token_ids: Vec<u32>,
}

impl Config {
    /// Reads the fields of config.json.
    pub fn read(file: &ConfigFile) -> Result<Self, ConfigError> {
        file.require_served([
            ("attn_output_gate", json!(true), "gated attention"),
            // The gate of the delta rule's output; silu and swish are the same function.
            ("output_gate_type", json!("swish"), "swish"),
            ("attention_bias", json!(false), "projections without bias"),
            ("hidden_act", json!("silu"), "silu"),
        ])?;
        file.check_dtype()?;
        let (shape, rope) = (file.heads(HEAD_DIM)?, file.rope()?);
        let (layers, rotary_dim) = (layers(file)?, rotary_dim(file, shape.head_dim)?);
        let moe = moe(file, layers.len())?;
        let mut eos_token_ids = file.eos_token_ids()?;
        // The official checkpoints have no generation_config.json, and their config.json does not name the end of a
        // turn.
        if eos_token_ids == [END_OF_TEXT] {
            eos_token_ids.push(END_OF_TURN);
        }
        Ok(Self {
            vocab_size: file.size("vocab_size")?,
            hidden_size: file.size("hidden_size")?,
            intermediate_size: if moe.is_some() { 0 } else { file.size("intermediate_size")? },
            moe,
            layers,
            shape,
            all_heads: shape,
            shard: Shard::WHOLE,
            rotary_dim,
            delta: delta_shape(file)?,
            gguf: file.flag(GGUF)?,
            rms_norm_eps: file.positive("rms_norm_eps")? as f32,
            rope,
            max_position_embeddings: file.context(&rope)?,
            tie_word_embeddings: file.ties_output(EMBEDDING)?,
            kv_dtype: file.kv_dtype(),
            mtp: mtp(file)?,
            vision: file.reads_images().then(|| VisionConfig::read(file, rotary_dim)).transpose()?,
            quantization: file.quantization(&BF16_MODULES)?,
            initializer_range: file.initializer_range(),
            eos_token_ids,
        })
    }

    /// The numbers of rank `shard`. Ranks share key heads and value heads of the delta rule, so that each has whole
    /// groups.
    pub(crate) fn shard(&self, shard: Shard) -> Result<Self, String> {
        let fp8 = self.quantization.as_ref().is_some_and(Quantization::has_blocks);
        let ranks = shard.ranks;
        let DecoderShape { heads: shape, intermediate: intermediate_size, moe, .. } =
            self.decoder().share(shard, fp8)?;
        let DeltaShape { key_heads, value_heads, .. } = self.delta;
        // Where key heads can be shared, value heads can: each key head has the same number of them.
        if !key_heads.is_multiple_of(ranks) {
            return Err(format!("{ranks} ranks cannot share {key_heads} key heads of the delta rule"));
        }
        // The layer that drafts gathers pairs of bf16 values.
        if self.mtp && ranks > 1 && !self.hidden_size.is_multiple_of(2 * ranks) {
            return Err(format!("{ranks} ranks cannot share a residual stream of {} columns", self.hidden_size));
        }
        let delta = DeltaShape { key_heads: key_heads / ranks, value_heads: value_heads / ranks, ..self.delta };
        let blocks = [delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim];
        if fp8 && ranks > 1 && !blocks.iter().all(|rows| rows.is_multiple_of(SCALE_BLOCK)) {
            return Err(format!("{ranks} ranks cannot share FP8 weights of {key_heads} key heads in whole blocks"));
        }
        Ok(Self { shape, intermediate_size, moe, delta, shard, ..self.clone() })
    }

    /// The numbers that the runtime's parts of a decoder take.
    pub fn decoder(&self) -> DecoderShape {
        DecoderShape {
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            moe: self.moe,
            heads: self.shape,
            all_heads: self.all_heads,
            shard: self.shard,
            gated: true,
            rotary_dim: self.rotary_dim,
            rope: self.rope,
            eps: self.rms_norm_eps,
        }
    }

    /// Layers of this kind.
    pub fn count(&self, kind: LayerKind) -> usize {
        self.layers.iter().filter(|layer| **layer == kind).count()
    }

    /// Parameters that are loaded.
    pub fn parameters(&self) -> u64 {
        (self.tables() + self.matrices() + self.small()) as u64
    }

    /// Number of parameters of the embedding table, and of the output matrix if it is separate.
    fn tables(&self) -> usize {
        let tables = if self.tie_word_embeddings { 1 } else { 2 };
        tables * self.vocab_size * self.hidden_size
    }

    /// Parameters of the matrices of all layers.
    fn matrices(&self) -> usize {
        let (hidden, delta, shape) = (self.hidden_size, self.delta, self.shape);
        let linear = hidden * (delta.projected_width() + delta.v_width());
        let full = hidden * (shape.gated_qkv_width() + shape.q_width());
        let mlp = match self.moe {
            // Each expert has a row of the router, the shared one a row of its own.
            Some(MoeShape { route, width, .. }) => route.count() * hidden * (3 * width + 1),
            None => 3 * hidden * self.intermediate_size,
        };
        let mtp = if self.mtp { self.mtp_projection() + full + mlp } else { 0 };
        self.count(LayerKind::Linear) * linear + self.count(LayerKind::Full) * full + self.layers.len() * mlp + mtp
    }

    /// Parameters of the matrix that joins the inputs of the layer that drafts, `mtp.fc`.
    fn mtp_projection(&self) -> usize {
        2 * self.hidden_size * self.hidden_size
    }

    /// Parameters that are not in matrices.
    fn small(&self) -> usize {
        let delta = self.delta;
        let linear = delta.conv_width * delta.channels() + 2 * delta.value_heads + delta.value_dim;
        let full = 2 * self.shape.head_dim;
        let norms = (2 * self.layers.len() + 1) * self.hidden_size;
        // Parameters of a layer, of the projection of both inputs, and of the norms of inputs and output.
        let mtp = if self.mtp { full + 5 * self.hidden_size } else { 0 };
        self.count(LayerKind::Linear) * linear + self.count(LayerKind::Full) * full + norms + mtp
    }
}

/// The experts of all `layers` layers, without which a Qwen3.5-MoE is refused.
fn moe(file: &ConfigFile, layers: usize) -> Result<Option<MoeShape>, ConfigError> {
    let moe = file.moe(true, layers)?;
    if moe.is_none() && file.get("model_type").as_str().is_some_and(|name| name.starts_with("qwen3_5_moe")) {
        return Err(file.invalid("num_experts is missing"));
    }
    Ok(moe)
}

/// The kind of each layer: as listed, or full attention in every `full_attention_interval`th.
fn layers(file: &ConfigFile) -> Result<Vec<LayerKind>, ConfigError> {
    let count = file.size("num_hidden_layers")?;
    let layers: Vec<LayerKind> = match file.get("layer_types") {
        Value::Array(types) if types.len() != count => {
            return Err(file.invalid(format!("layer_types has {} of {count} layers", types.len())));
        }
        Value::Array(types) => {
            let kind = |name: &Value| match name.as_str() {
                Some("linear_attention") => Ok(LayerKind::Linear),
                Some("full_attention") => Ok(LayerKind::Full),
                _ => Err(file.invalid(format!("layer_types has {name}, which is no kind of layer"))),
            };
            types.iter().map(kind).collect::<Result<_, _>>()?
        }
        _ => {
            let interval = file.size_or("full_attention_interval", 4)?;
            let kind = |i: usize| if i.is_multiple_of(interval) { LayerKind::Full } else { LayerKind::Linear };
            (1..=count).map(kind).collect()
        }
    };
    match layers.last() {
        Some(LayerKind::Full) => Ok(layers),
        _ => Err(unsupported("the last of layer_types", "linear_attention", "models that end with full_attention")),
    }
}

/// True if the layer that drafts is requested. The checkpoint must have exactly one, without its own embedding.
fn mtp(file: &ConfigFile) -> Result<bool, ConfigError> {
    let wanted = file.drafts_by_model();
    if wanted {
        file.require_served([
            ("mtp_num_hidden_layers", json!(1), "drafts by one layer; choose another method of --speculative-config"),
            ("mtp_use_dedicated_embeddings", json!(false), "drafts that share the embedding of the model"),
        ])?;
    }
    Ok(wanted)
}

/// Leading elements of a head that RoPE rotates.
fn rotary_dim(file: &ConfigFile, head_dim: usize) -> Result<usize, ConfigError> {
    let field = "partial_rotary_factor";
    let factor = file.get("rope_parameters.partial_rotary_factor").as_f64().or(file.get(field).as_f64());
    let factor = factor.unwrap_or(0.25);
    let dim = (head_dim as f64 * factor) as usize;
    if dim == 0 || !dim.is_multiple_of(32) || dim > head_dim {
        return Err(unsupported(field, factor, "rotations of multiples of 32 elements"));
    }
    Ok(dim)
}

/// Heads of the gated delta rule.
fn delta_shape(file: &ConfigFile) -> Result<DeltaShape, ConfigError> {
    let (key_heads, value_heads) = (file.size("linear_num_key_heads")?, file.size("linear_num_value_heads")?);
    let shape = DeltaShape {
        key_heads,
        value_heads,
        tiled_output: file.flag(GGUF)? && key_heads != value_heads,
        key_dim: file.size("linear_key_head_dim")?,
        value_dim: file.size("linear_value_head_dim")?,
        conv_width: file.size("linear_conv_kernel_dim")?,
    };
    if !shape.value_heads.is_multiple_of(shape.key_heads) {
        return Err(file.invalid("linear_num_value_heads is not a multiple of linear_num_key_heads"));
    }
    if !shape.is_supported() {
        let value = format!("{} x {}", shape.key_dim, shape.value_dim);
        let field = "linear_key_head_dim x linear_value_head_dim";
        return Err(unsupported(field, value, "multiples of 16, a convolution of width 2 to 8"));
    }
    Ok(shape)
}
