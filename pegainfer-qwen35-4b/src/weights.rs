//! The weights of a Qwen3.5 model on a device, projections that share an input fused.

mod linear_attention;

pub use linear_attention::LinearAttention;

use crate::config::{Config, EMBEDDING, LayerKind};
use crate::vision::weights::VisionWeights;
use pegainfer_core::tensor::Tensor;
use pegainfer_core::weights::{Columns, Loader, SourceTensor, WeightsError};
use pegainfer_kernels::ops::Matrix;
use pegainfer_runtime::{Attention, DecoderWeights, DenseMlp, LayerSources, Mlp, MoeShape, load_embedding, load_head};

/// Prefixes of tensor names that a text engine skips, and their purpose.
const SKIPPED: [(&str, &str); 2] = [("model.visual.", "the image encoder"), ("mtp.", "multi-token prediction")];

/// Beginning of the names of the tensors of the layer that drafts.
const MTP_PREFIX: &str = "mtp.layers.0";

/// Token mixer of a layer.
#[derive(Debug)]
pub enum Mixer {
    /// The gated delta rule.
    Linear(LinearAttention),
    /// Gated softmax attention; norms are `1 + w`, f32.
    Full(Attention),
}

/// One decoder layer.
#[derive(Debug)]
pub struct Layer {
    /// `1 + w`, `[hidden]` f32.
    pub input_norm: Tensor,
    /// The first half.
    pub mixer: Mixer,
    /// The second half; its norm is `1 + w`, f32.
    pub mlp: Mlp,
}

/// Weights of the layer that drafts; norms are `1 + w`, f32.
#[derive(Debug)]
pub struct Mtp {
    /// `[hidden]`.
    pub embedding_norm: Tensor,
    /// `[hidden]`.
    pub hidden_norm: Tensor,
    /// The columns of `mtp.fc` for the embedding, the rank's rows of it, `[hidden / ranks, hidden]` bf16.
    pub embedding_projection: Tensor,
    /// Columns of the hidden state, `[hidden / ranks, hidden]` bf16.
    pub hidden_projection: Tensor,
    /// `[hidden]`.
    pub input_norm: Tensor,
    /// The first half of the layer.
    pub attention: Attention,
    /// The second half.
    pub mlp: Mlp,
    /// `[hidden]`.
    pub norm: Tensor,
}

/// All weights.
#[derive(Debug)]
pub struct Weights {
    /// The decoder; the final norm is `1 + w`, f32.
    pub decoder: DecoderWeights<Layer>,
    /// The layer that drafts, if requested.
    pub mtp: Option<Mtp>,
    /// The vision tower, if the model reads images; every rank has the whole.
    pub vision: Option<VisionWeights>,
}

/// Purpose of tensors that a text engine skips.
pub(crate) fn skipped(name: &str) -> Option<&'static str> {
    SKIPPED.iter().find(|(prefix, _)| name.starts_with(prefix)).map(|(_, purpose)| *purpose)
}

/// Loads every tensor of the text model, and of the layer that drafts and the vision tower if `config` has them.
pub(crate) fn load(loader: &mut Loader<'_>, config: &Config) -> Result<Weights, WeightsError> {
    let hidden = config.hidden_size;
    let layers = config.layers.iter().enumerate();
    let mut embedding = load_embedding(loader, EMBEDDING, (config.vocab_size, hidden), config.shard)?;
    if config.moe.is_some() {
        MoeShape::scale_embedding(loader, (EMBEDDING, config.vocab_size), config.initializer_range, &mut embedding)?;
    }
    let decoder = DecoderWeights {
        layers: layers
            .map(|(i, kind)| Layer::load(loader, config, (&prefix(i), i), *kind))
            .collect::<Result<_, _>>()?,
        norm: scale(config.gguf)(loader, "model.language_model.norm.weight".to_owned(), hidden)?,
        head: {
            let (tied, table) = (config.tie_word_embeddings, (&embedding, config.vocab_size));
            load_head(loader, config.quantization.as_ref(), tied, table, config.shard)?
        },
        embedding,
    };
    let mtp = if config.mtp { Some(Mtp::load(loader, config)?) } else { None };
    let vision = config.vision.as_ref().map(|vision| VisionWeights::load(loader, vision)).transpose()?;
    Ok(Weights { decoder, mtp, vision })
}

/// Loads the weight of a norm by name and length. It is stored as its difference from 1, and in GGUF as the sum. The sum
/// is kept in f32: bf16 would round it.
fn scale(gguf: bool) -> impl Fn(&mut Loader<'_>, String, usize) -> Result<Tensor, WeightsError> + Copy {
    move |loader, name, len| {
        let one = if gguf { 0.0 } else { 1.0 };
        loader.converted(name, &[len], 1.0 - one, &[len], |w| w.into_iter().map(|w| one + w).collect())
    }
}

fn prefix(i: usize) -> String {
    format!("model.language_model.layers.{i}")
}

/// Where the projections of the layers that adapters may change are in the checkpoint: no experts. The error says why
/// there are none.
pub(crate) fn sources(config: &Config) -> Result<Vec<LayerSources>, String> {
    if config.delta.tiled_output {
        return Err("a GGUF file of Qwen3.5 takes no LoRA adapters; use the checkpoint in safetensors".to_owned());
    }
    let layer = |(i, kind): (usize, &LayerKind)| {
        let (prefix, shape) = (prefix(i), config.decoder());
        let [input, output] = match kind {
            LayerKind::Linear => LinearAttention::sources(config, &prefix).map(Some),
            LayerKind::Full => Attention::sources(&prefix, &shape).map(Some),
        };
        let [gate_up, down] = match config.moe {
            Some(_) => [None, None],
            None => DenseMlp::sources(&prefix, &shape).map(Some),
        };
        LayerSources { input, output, gate_up, down }
    };
    Ok(config.layers.iter().enumerate().map(layer).collect())
}

impl Layer {
    /// The matrix that follows the input norm.
    pub(crate) fn projection(&self) -> &Matrix {
        match &self.mixer {
            Mixer::Linear(mixer) => &mixer.projection,
            Mixer::Full(mixer) => &mixer.qkv,
        }
    }

    /// Loads layer number `i`, with this tensor name `prefix`.
    fn load(
        loader: &mut Loader<'_>,
        config: &Config,
        (prefix, i): (&str, usize),
        kind: LayerKind,
    ) -> Result<Self, WeightsError> {
        let (hidden, quantization, shape) = (config.hidden_size, config.quantization.as_ref(), config.decoder());
        let scale = scale(config.gguf);
        Ok(Self {
            input_norm: scale(loader, format!("{prefix}.input_layernorm.weight"), hidden)?,
            mixer: match kind {
                LayerKind::Linear => Mixer::Linear(LinearAttention::load(loader, config, prefix)?),
                LayerKind::Full => Mixer::Full(Attention::load(loader, prefix, shape, quantization, scale)?),
            },
            mlp: {
                let norm = scale(loader, format!("{prefix}.post_attention_layernorm.weight"), hidden)?;
                Mlp::load(loader, prefix, (norm, config.moe.map(|_| i)), &shape, quantization)?
            },
        })
    }
}

impl Mtp {
    /// Loads the `mtp.*` tensors.
    fn load(loader: &mut Loader<'_>, config: &Config) -> Result<Self, WeightsError> {
        let hidden = config.hidden_size;
        let mut norm = |name: &str| scale(config.gguf)(loader, format!("mtp.{name}.weight"), hidden);
        let (embedding_norm, hidden_norm) = (norm("pre_fc_norm_embedding")?, norm("pre_fc_norm_hidden")?);
        let norm = norm("norm")?;
        let name = "mtp.fc.weight".to_owned();
        let fc = [SourceTensor { name, rows: hidden, part: config.shard.part(hidden) }];
        let mut half = |first: usize| {
            let columns = Columns { stored: 2 * hidden, part: first..first + hidden };
            loader.stacked(&format!("mtp.fc.weight[{first}]"), &fc, columns)
        };
        let (embedding_projection, hidden_projection) = (half(0)?, half(hidden)?);
        // Nobody reads the experts that the last layer chose, whose memory it shares.
        let last = config.layers.len() - 1;
        let Layer { input_norm, mixer, mlp } = Layer::load(loader, config, (MTP_PREFIX, last), LayerKind::Full)?;
        let Mixer::Full(attention) = mixer else { unreachable!("a layer of another kind") };
        Ok(Self {
            embedding_norm,
            hidden_norm,
            embedding_projection,
            hidden_projection,
            input_norm,
            attention,
            mlp,
            norm,
        })
    }
}
