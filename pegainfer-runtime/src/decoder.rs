//! Parts shared by decoders: shape, token embedding, output matrix.

use super::moe_shape::MoeShape;
use super::output_matrix::HEAD;
use super::quantization::{Quantization, load_quantized_head};
use super::vocab_padding::table_rows;
use pegainfer_core::parallel::Shard;
use pegainfer_core::tensor::Tensor;
use pegainfer_core::weights::{Loader, SCALE_BLOCK, WeightsError};
use pegainfer_kernels::ops::HeadShape;
use pegainfer_kernels::ops::{Matrix, RopeSpec};

/// The numbers of a decoder with full attention.
#[derive(Debug, Clone, Copy)]
pub struct DecoderShape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of a dense MLP, 0 if no layer has one; with several ranks the rank's share.
    pub intermediate: usize,
    /// Experts of the layers that have them instead of a dense MLP.
    pub moe: Option<MoeShape>,
    /// Attention heads; with several ranks those of the rank.
    pub heads: HeadShape,
    /// Attention heads of the whole model.
    pub all_heads: HeadShape,
    /// True if each head has a gate on its output (Qwen3.5).
    pub gated: bool,
    /// Columns of a head that are rotated.
    pub rotary_dim: usize,
    /// Rotary frequencies.
    pub rope: RopeSpec,
    /// Epsilon of every RMSNorm.
    pub eps: f32,
    /// The rank whose share of heads and of the MLP these numbers are.
    pub shard: Shard,
}

impl DecoderShape {
    /// Columns of the fused projection of queries, keys, values and optional gates.
    pub fn qkv_width(&self) -> usize {
        if self.gated { self.heads.gated_qkv_width() } else { self.heads.qkv_width() }
    }
}

impl DecoderShape {
    /// The numbers of rank `shard`: its share of the heads and of the width of each MLP. KV heads are held by several
    /// ranks if there are fewer of them than ranks. Parts of FP8 weights are whole blocks. The error says what the ranks
    /// cannot share.
    pub fn share(&self, shard: Shard, fp8: bool) -> Result<Self, String> {
        let (HeadShape { heads, kv_heads, head_dim }, ranks) = (self.all_heads, shard.ranks);
        let block = if fp8 { SCALE_BLOCK } else { 1 };
        let share = |n: usize, width: usize| n.is_multiple_of(ranks) && (n / ranks * width).is_multiple_of(block);
        let own_kv = shard.part_or_copy(kv_heads).len();
        let shares_kv = kv_heads.is_multiple_of(ranks) || ranks.is_multiple_of(kv_heads);
        let expert_width = self.moe.map_or(0, |moe| moe.width);
        let parts = [
            (share(heads, head_dim), heads, "attention heads"),
            (shares_kv && (own_kv * head_dim).is_multiple_of(block), kv_heads, "KV heads"),
            (self.intermediate.is_multiple_of(ranks), self.intermediate, "columns of the MLP"),
            (share(expert_width, 1), expert_width, "columns of an expert"),
        ];
        if let Some((_, n, what)) = parts.iter().find(|(fits, ..)| !fits) {
            return Err(format!("{ranks} ranks cannot share {n} {what}"));
        }
        Ok(Self {
            heads: HeadShape { heads: heads / ranks, kv_heads: own_kv, head_dim },
            intermediate: self.intermediate / ranks,
            moe: self.moe.map(|moe| MoeShape { width: moe.width / ranks, ..moe }),
            shard,
            ..*self
        })
    }
}

/// The weights of a decoder whose layers are of type `L`.
#[derive(Debug)]
pub struct DecoderWeights<L> {
    /// `[padded_vocab, hidden]`; see [`padded_vocab`](super::padded_vocab).
    pub embedding: Tensor,
    /// First to last.
    pub layers: Vec<L>,
    /// Weight of the final norm, `[hidden]`.
    pub norm: Tensor,
    /// The rank's rows of the output matrix, `[padded_vocab / ranks, hidden]`.
    pub head: Matrix,
}

/// Loads a rank's rows of the output matrix [`HEAD`], `[padded_vocab / ranks, hidden]`. If it is `tied` to `embedding`,
/// `[padded_vocab, hidden]`, these are rows of that; see [`ConfigFile::ties_output`]. Small official checkpoints store a
/// copy of the embedding, which is not loaded. A quantised output matrix, or a quantised embedding that it is tied to,
/// stays quantised.
///
/// [`ConfigFile::ties_output`]: super::ConfigFile::ties_output
pub fn load_head(
    loader: &mut Loader<'_>,
    quantization: Option<&Quantization>,
    tied: bool,
    (embedding, vocab): (&Tensor, usize),
    shard: Shard,
) -> Result<Matrix, WeightsError> {
    let (padded, hidden) = embedding.rows_cols();
    let rows = table_rows(if tied { embedding.name() } else { HEAD }, vocab, shard);
    if let Some(head) = load_quantized_head(loader, quantization, &rows, hidden)? {
        return Ok(head);
    }
    if tied {
        return Ok(Matrix::Bf16(embedding.row_range(shard.part(padded))));
    }
    loader.stacked(HEAD, &rows, hidden).map(Matrix::Bf16)
}
