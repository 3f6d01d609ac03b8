//! Parts shared by dense decoders: shape, token embedding, output matrix, gated MLP.

use super::output_matrix::HEAD;
use super::quantization::{Quantization, load_projection};
use pegainfer_core::tensor::Tensor;
use pegainfer_core::weights::{Loader, SourceTensor, WeightsError};
use pegainfer_kernels::ops::HeadShape;
use pegainfer_kernels::ops::{Matrix, RopeSpec};

/// The numbers of a dense decoder with full attention.
#[derive(Debug, Clone, Copy)]
pub struct DecoderShape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of the MLP.
    pub intermediate: usize,
    /// Attention heads.
    pub heads: HeadShape,
    /// True if each head has a gate on its output (Qwen3.5).
    pub gated: bool,
    /// Columns of a head that are rotated.
    pub rotary_dim: usize,
    /// Rotary frequencies.
    pub rope: RopeSpec,
    /// Epsilon of every RMSNorm.
    pub eps: f32,
}

impl DecoderShape {
    /// Columns of the fused projection of queries, keys, values and optional gates.
    pub fn qkv_width(&self) -> usize {
        if self.gated { self.heads.gated_qkv_width() } else { self.heads.qkv_width() }
    }
}

/// The weights of a decoder whose layers are of type `L`.
#[derive(Debug)]
pub struct DecoderWeights<L> {
    /// `[vocab, hidden]`.
    pub embedding: Tensor,
    /// First to last.
    pub layers: Vec<L>,
    /// Weight of the final norm, `[hidden]`.
    pub norm: Tensor,
    /// Output matrix, `[vocab, hidden]`; `None` if it is the embedding.
    pub head: Option<Tensor>,
}

impl<L> DecoderWeights<L> {
    /// The matrix that makes logits.
    pub fn output(&self) -> &Tensor {
        self.head.as_ref().unwrap_or(&self.embedding)
    }
}

/// Loads the output matrix [`HEAD`], `[vocab, hidden]`, unless it is `tied` to the embedding; see
/// [`ConfigFile::ties_output`]. Small official checkpoints store a copy of the embedding, which is not loaded.
///
/// [`ConfigFile::ties_output`]: super::ConfigFile::ties_output
pub fn load_head(
    loader: &mut Loader<'_>,
    tied: bool,
    vocab: usize,
    hidden: usize,
) -> Result<Option<Tensor>, WeightsError> {
    if tied { Ok(None) } else { loader.matrix(HEAD.to_owned(), vocab, hidden).map(Some) }
}

/// Weights of the second half of a layer.
#[derive(Debug)]
pub struct Mlp {
    /// Weight of the norm before it, `[hidden]`.
    pub norm: Tensor,
    /// Gate, then up: `[2 * intermediate, hidden]`.
    pub gate_up: Matrix,
    /// `[hidden, intermediate]`.
    pub down: Matrix,
}

impl Mlp {
    /// Loads `mlp.gate_proj`, `mlp.up_proj` and `mlp.down_proj` of the layer with this tensor name `prefix`. `norm` is
    /// loaded first.
    pub fn load(
        loader: &mut Loader<'_>,
        prefix: &str,
        norm: Tensor,
        (hidden, intermediate): (usize, usize),
        quantization: Option<&Quantization>,
    ) -> Result<Self, WeightsError> {
        let name = |tail: &str| format!("{prefix}.mlp.{tail}.weight");
        let part = |tail: &str, rows| SourceTensor { name: name(tail), rows };
        let (first, down) =
            (["gate_proj", "up_proj"].map(|tail| part(tail, intermediate)), [part("down_proj", hidden)]);
        Ok(Self {
            norm,
            gate_up: load_projection(loader, quantization, &name("gate_up_proj"), &first, hidden)?,
            down: load_projection(loader, quantization, &down[0].name, &down, intermediate)?,
        })
    }
}
