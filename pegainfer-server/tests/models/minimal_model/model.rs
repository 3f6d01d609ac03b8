//! A dense decoder without QK norm, the smallest model that the runtime serves. docs/internals/adding-a-model.md walks
//! through it.

use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::Shard;
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_core::weights::{Loader, SourceTensor, WeightsError};
use pegainfer_kernels::ops::{self, HeadShape, KvDType, Matrix, RopeHeads, RopeSpec};
use pegainfer_runtime::{
    Activations, AttentionScratch, Bounds, ConfigError, ConfigFile, DecoderShape, DecoderWeights, DecoderWorkspace,
    KvLayer, LoadError, Mlp, Model, ModelInfo, Parts, Pass, Quantization, gather_rows, load_embedding, load_head,
    load_projection,
};
use serde_json::json;

/// Name of the embedding table in checkpoints.
const EMBEDDING: &str = "model.embed_tokens.weight";

/// The model family.
#[derive(Debug)]
pub struct Minimal;

/// The numbers of config.json.
#[derive(Debug, Clone)]
pub struct Config {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub layers: usize,
    pub shape: HeadShape,
    pub rms_norm_eps: f32,
    pub rope: RopeSpec,
    pub max_position_embeddings: usize,
    pub tie_word_embeddings: bool,
    pub quantization: Option<Quantization>,
    pub initializer_range: f32,
    pub eos_token_ids: Vec<u32>,
}

impl Config {
    /// The shape of the runtime's decoder parts.
    fn decoder(&self) -> DecoderShape {
        DecoderShape {
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            moe: None,
            heads: self.shape,
            all_heads: self.shape,
            shard: Shard::WHOLE,
            gated: false,
            rotary_dim: self.shape.head_dim,
            rope: self.rope,
            eps: self.rms_norm_eps,
        }
    }
}

/// Weights of one layer.
#[derive(Debug)]
pub struct Layer {
    /// `[hidden]`.
    input_norm: Tensor,
    /// Queries, keys, values: `[(heads + 2 kv_heads) * head_dim, hidden]`.
    qkv: Matrix,
    /// `[hidden, heads * head_dim]`.
    o: Matrix,
    /// The second half.
    mlp: Mlp,
}

impl Layer {
    fn load(loader: &mut Loader<'_>, config: &Config, i: usize) -> Result<Self, WeightsError> {
        let prefix = format!("model.layers.{i}");
        let name = |tail: &str| format!("{prefix}.{tail}.weight");
        let part = |tail: &str, heads: usize| SourceTensor::whole(name(tail), heads * config.shape.head_dim);
        let HeadShape { heads, kv_heads, .. } = config.shape;
        let projections =
            [part("self_attn.q_proj", heads), part("self_attn.k_proj", kv_heads), part("self_attn.v_proj", kv_heads)];
        let o = [SourceTensor::whole(name("self_attn.o_proj"), config.hidden_size)];
        let (hidden, quantization) = (config.hidden_size, config.quantization.as_ref());
        let post_norm = loader.vector(name("post_attention_layernorm"), hidden)?;
        Ok(Self {
            input_norm: loader.vector(name("input_layernorm"), hidden)?,
            qkv: load_projection(loader, quantization, &name("self_attn.qkv_proj"), &projections, hidden)?,
            o: load_projection(loader, quantization, &o[0].name, &o, config.shape.q_width())?,
            mlp: Mlp::load(loader, &prefix, (post_norm, None), &config.decoder(), quantization)?,
        })
    }
}

impl Model for Minimal {
    const NAME: &'static str = "Minimal";
    const ARCHITECTURES: &'static [(&'static str, &'static str)] = &[("MinimalForCausalLM", "minimal")];

    type Config = Config;
    type Options = ();
    type Weights = DecoderWeights<Layer>;
    type Workspace = DecoderWorkspace;
    type Cache = Vec<KvLayer>;
    type State = ();

    fn config(file: ConfigFile) -> Result<Config, ConfigError> {
        file.require_served([
            ("attention_bias", json!(false), "projections without bias"),
            ("hidden_act", json!("silu"), "silu"),
            ("torch_dtype", json!("bfloat16"), "bfloat16"),
        ])?;
        let rope = file.rope()?;
        Ok(Config {
            vocab_size: file.size("vocab_size")?,
            hidden_size: file.size("hidden_size")?,
            intermediate_size: file.size("intermediate_size")?,
            layers: file.size("num_hidden_layers")?,
            shape: file.heads(64)?,
            rms_norm_eps: file.positive("rms_norm_eps")? as f32,
            rope,
            max_position_embeddings: file.context(&rope)?,
            tie_word_embeddings: file.ties_output(EMBEDDING)?,
            quantization: file.quantization(&[])?,
            initializer_range: file.initializer_range(),
            eos_token_ids: file.eos_token_ids()?,
        })
    }

    fn info(config: &Config) -> ModelInfo {
        ModelInfo {
            vocab_size: config.vocab_size,
            max_position_embeddings: config.max_position_embeddings,
            eos_token_ids: config.eos_token_ids.clone(),
            initializer_range: config.initializer_range,
            fp8_weights: config.quantization.is_some(),
            drafts: false,
            draft_block: None,
            image_token: None,
            max_default_tokens: usize::MAX,
        }
    }

    fn weights(loader: &mut Loader<'_>, config: &Config) -> Result<Self::Weights, WeightsError> {
        let hidden = config.hidden_size;
        let embedding = load_embedding(loader, EMBEDDING, (config.vocab_size, hidden), Shard::WHOLE)?;
        Ok(DecoderWeights {
            layers: (0..config.layers).map(|i| Layer::load(loader, config, i)).collect::<Result<_, _>>()?,
            norm: loader.vector("model.norm.weight".to_owned(), hidden)?,
            head: {
                let (tied, table) = (config.tie_word_embeddings, (&embedding, config.vocab_size));
                load_head(loader, config.quantization.as_ref(), tied, table, Shard::WHOLE)?
            },
            embedding,
        })
    }

    fn workspace(exec: &mut Exec, config: &Config, bounds: &Bounds) -> std::io::Result<DecoderWorkspace> {
        Ok(DecoderWorkspace::new(exec, &config.decoder(), bounds.size, [])?.0)
    }

    fn cache(parts: Parts<'_, Self>, _bounds: &Bounds, blocks: usize) -> Result<Vec<KvLayer>, LoadError> {
        let Parts { exec, config, .. } = parts;
        let layers = (0..config.layers).map(|_| KvLayer::new(exec, config.shape, KvDType::Bf16, blocks));
        layers.collect::<Result<_, _>>().map_err(LoadError::State)
    }

    fn state(_config: &Config, _bounds: &Bounds) {}

    fn begin(pass: &mut Pass<'_, Self>) -> Result<(), OpError> {
        pass.work.set_rows(pass.step.tokens.len());
        Ok(())
    }

    fn forward(pass: &mut Pass<'_, Self>) -> Result<(), OpError> {
        let Pass { exec, config, weights, cache, work, inputs, previous, step, communicator, .. } = pass;
        let (first, shape, eps) = (&weights.layers[0], config.shape, config.rms_norm_eps);
        let scale = (shape.head_dim as f32).sqrt().recip();
        let DecoderWorkspace { activations, attention } = &mut **work;
        let AttentionScratch { rope, qkv, q, attended, .. } = attention;
        let heads = RopeHeads { shape, rope, positions: &inputs.positions, slots: &inputs.slots };
        ops::embedding(exec, &inputs.tokens, previous, &weights.embedding, &mut activations.residual)?;
        let normed = activations.normed.input_of(&first.qkv);
        ops::rms_norm(exec, &activations.residual, &first.input_norm, eps, normed)?;
        for (i, (layer, kv)) in weights.layers.iter().zip(cache.iter_mut()).enumerate() {
            let (batch, out) = (inputs.attention(step), attended.input_of(&layer.o));
            ops::linear(exec, &activations.normed, &layer.qkv, qkv)?;
            ops::rope_write_kv(exec, qkv, &heads, q, kv.both_mut())?;
            ops::attention(exec, q, (&kv.k, &kv.v), &batch, shape, scale, out)?;
            let next = weights.layers.get(i + 1).map(|next| (&next.input_norm, Some(&next.qkv)));
            let next = next.unwrap_or((&weights.norm, None));
            activations.finish_layer(exec, (attended, &layer.o), &layer.mlp, next, eps, (*communicator, None))?;
        }
        if step.samples_every_token() {
            return Ok(());
        }
        // Only the sampled rows need logits.
        let Activations { normed, delta, .. } = activations;
        gather_rows(exec, &inputs.sample_rows, [(normed.bf16(), delta)])
    }

    fn output<'a>(work: &'a mut DecoderWorkspace, weights: &'a Self::Weights) -> (&'a mut Tensor, &'a Matrix) {
        (work.activations.normed.bf16(), &weights.head)
    }
}
