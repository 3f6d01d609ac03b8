//! The weights of a Qwen3.5 model on a device, projections that share an input fused.

use crate::config::{Config, EMBEDDING, LayerKind};
use pegainfer_core::tensor::Tensor;
use pegainfer_core::weights::{Columns, Loader, SourceTensor, WeightsError};
use pegainfer_kernels::ops::Matrix;
use pegainfer_runtime::{Attention, DecoderWeights, Mlp, load_head, load_projection};
use std::ops::Range;

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

/// Weights of a gated delta rule layer; shapes are those of `DeltaShape`.
#[derive(Debug)]
pub struct LinearAttention {
    /// q, k, v, z, b, a: `[projected_width, hidden]`.
    pub projection: Matrix,
    /// `[conv_width, channels]` f32.
    pub conv: Tensor,
    /// `[value_heads]` f32.
    pub a_log: Tensor,
    /// `[value_heads]` f32.
    pub dt_bias: Tensor,
    /// `[value_dim]` f32.
    pub norm: Tensor,
    /// `[hidden, v_width]`.
    pub out: Matrix,
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
}

/// Purpose of tensors that a text engine skips.
pub(crate) fn skipped(name: &str) -> Option<&'static str> {
    SKIPPED.iter().find(|(prefix, _)| name.starts_with(prefix)).map(|(_, purpose)| *purpose)
}

/// Loads every tensor of the text model.
pub(crate) fn load(loader: &mut Loader<'_>, config: &Config) -> Result<Weights, WeightsError> {
    let hidden = config.hidden_size;
    let layers = config.layers.iter().enumerate();
    let embedding = loader.matrix(EMBEDDING.to_owned(), config.vocab_size, hidden)?;
    let decoder = DecoderWeights {
        layers: layers.map(|(i, kind)| Layer::load(loader, config, &prefix(i), *kind)).collect::<Result<_, _>>()?,
        norm: scale(loader, "model.language_model.norm.weight".to_owned(), hidden)?,
        head: load_head(loader, config.quantization.as_ref(), config.tie_word_embeddings, &embedding, config.shard)?,
        embedding,
    };
    let mtp = if config.mtp { Some(Mtp::load(loader, config)?) } else { None };
    Ok(Weights { decoder, mtp })
}

/// The weight of a norm that is stored as its difference from 1. The sum is kept in f32: bf16 would round it.
fn scale(loader: &mut Loader<'_>, name: String, len: usize) -> Result<Tensor, WeightsError> {
    loader.converted(name, &[len], 0.0, &[len], |w| w.into_iter().map(|w| 1.0 + w).collect())
}

/// A part of a vector of `len` elements without conversion, in f32.
fn vector(loader: &mut Loader<'_>, name: String, len: usize, part: Range<usize>) -> Result<Tensor, WeightsError> {
    loader.converted(name, &[len], 1.0, &[part.len()], |values| values[part].to_vec())
}

fn prefix(i: usize) -> String {
    format!("model.language_model.layers.{i}")
}

impl Layer {
    /// The matrix that follows the input norm.
    pub(crate) fn projection(&self) -> &Matrix {
        match &self.mixer {
            Mixer::Linear(mixer) => &mixer.projection,
            Mixer::Full(mixer) => &mixer.qkv,
        }
    }

    fn load(loader: &mut Loader<'_>, config: &Config, prefix: &str, kind: LayerKind) -> Result<Self, WeightsError> {
        let (hidden, quantization, shape) = (config.hidden_size, config.quantization.as_ref(), config.decoder());
        Ok(Self {
            input_norm: scale(loader, format!("{prefix}.input_layernorm.weight"), hidden)?,
            mixer: match kind {
                LayerKind::Linear => Mixer::Linear(LinearAttention::load(loader, config, prefix)?),
                LayerKind::Full => Mixer::Full(Attention::load(loader, prefix, shape, quantization, scale)?),
            },
            mlp: {
                let norm = scale(loader, format!("{prefix}.post_attention_layernorm.weight"), hidden)?;
                Mlp::load(loader, prefix, norm, &shape, quantization)?
            },
        })
    }
}

impl LinearAttention {
    fn load(loader: &mut Loader<'_>, config: &Config, prefix: &str) -> Result<Self, WeightsError> {
        let (hidden, quantization) = (config.hidden_size, config.quantization.as_ref());
        let (shape, shard) = (config.delta, config.shard);
        let name = |tail: &str| format!("{prefix}.linear_attn.{tail}");
        let rows = |tail: &str, rows: usize, part: Range<usize>| SourceTensor {
            name: name(&format!("{tail}.weight")),
            rows,
            part,
        };
        // Of the whole model.
        let (k, v) = (shape.k_width() * shard.ranks, shape.v_width() * shard.ranks);
        let (channels, value_heads) = (2 * k + v, shape.value_heads * shard.ranks);
        let (held_k, held_v, held_heads) = (shard.part(k), shard.part(v), shard.part(value_heads));
        let after = |first: usize, part: &Range<usize>| first + part.start..first + part.end;
        // Queries, keys and values of the rank's heads.
        let held = [held_k.clone(), after(k, &held_k), after(2 * k, &held_v)];
        let [q_rows, k_rows, v_rows] = held.clone().map(|part| rows("in_proj_qkv", channels, part));
        let gates = [
            rows("in_proj_z", v, held_v.clone()),
            rows("in_proj_b", value_heads, held_heads.clone()),
            rows("in_proj_a", value_heads, held_heads.clone()),
        ];
        let qkv = match shard.ranks {
            1 => vec![rows("in_proj_qkv", channels, 0..channels)],
            _ => vec![q_rows, k_rows, v_rows],
        };
        let zeros = (shape.padding() > 0).then(|| SourceTensor::zeros(shape.padding()));
        let parts: Vec<SourceTensor> = qkv.into_iter().chain(gates).chain(zeros).collect();
        let out = [SourceTensor::whole(name("out_proj.weight"), hidden)];
        let width = shape.conv_width;
        // Stored by channel; the kernels read neighbouring channels of one of the `width` inputs at once.
        let transpose = |w: Vec<f32>| {
            let channels = || held.iter().cloned().flatten();
            (0..width)
                .flat_map(|at| channels().map(move |channel| (channel, at)))
                .map(|(c, at)| w[c * width + at])
                .collect()
        };
        let average = 1.0 / width as f32;
        Ok(Self {
            projection: load_projection(loader, quantization, &name("in_proj.weight"), &parts, hidden)?,
            conv: loader.converted(
                name("conv1d.weight"),
                &[channels, 1, width],
                average,
                &[width, shape.channels()],
                transpose,
            )?,
            a_log: vector(loader, name("A_log"), value_heads, held_heads.clone())?,
            dt_bias: vector(loader, name("dt_bias"), value_heads, held_heads)?,
            norm: vector(loader, name("norm.weight"), shape.value_dim, 0..shape.value_dim)?,
            out: load_projection(loader, quantization, &out[0].name, &out, Columns { stored: v, part: held_v })?,
        })
    }
}

impl Mtp {
    /// Loads the `mtp.*` tensors.
    fn load(loader: &mut Loader<'_>, config: &Config) -> Result<Self, WeightsError> {
        let hidden = config.hidden_size;
        let mut norm = |name: &str| scale(loader, format!("mtp.{name}.weight"), hidden);
        let (embedding_norm, hidden_norm) = (norm("pre_fc_norm_embedding")?, norm("pre_fc_norm_hidden")?);
        let norm = norm("norm")?;
        let name = "mtp.fc.weight".to_owned();
        let fc = [SourceTensor { name, rows: hidden, part: config.shard.part(hidden) }];
        let mut half = |first: usize| {
            let columns = Columns { stored: 2 * hidden, part: first..first + hidden };
            loader.stacked(&format!("mtp.fc.weight[{first}]"), &fc, columns)
        };
        let (embedding_projection, hidden_projection) = (half(0)?, half(hidden)?);
        let Layer { input_norm, mixer, mlp } = Layer::load(loader, config, MTP_PREFIX, LayerKind::Full)?;
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
