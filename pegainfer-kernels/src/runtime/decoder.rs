//! What dense decoders share: token embedding and output matrix, the residual stream, the gated MLP, and the paged cache of
//! a layer of full attention.

use super::output_matrix::HEAD;
use super::quantization::{Quantization, load_projection, projection_bytes};
use crate::heads::{HeadShape, KvDType};
use crate::ops::{self, Matrix};
use pegainfer_core::exec::{AliasedTensor, Exec, aliased_bytes};
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_core::weights::{Loader, Part, WeightsError};

/// The weights of a decoder whose layers are of type `L`.
#[derive(Debug)]
pub struct DecoderWeights<L> {
    /// `[vocab, hidden]`.
    pub embedding: Tensor,
    /// First to last.
    pub layers: Vec<L>,
    /// Weight of the final norm, `[hidden]`.
    pub norm: Tensor,
    /// Output matrix, `[vocab, hidden]`; `None` when it is the embedding.
    pub head: Option<Tensor>,
}

impl<L> DecoderWeights<L> {
    /// The matrix that makes logits.
    pub fn output(&self) -> &Tensor {
        self.head.as_ref().unwrap_or(&self.embedding)
    }
}

/// Loads the output matrix [`HEAD`], `[vocab, hidden]`, unless it is `tied` to the embedding, see
/// [`ConfigFile::ties_output`]. Small official checkpoints store a copy of the embedding: it is not loaded.
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
    /// Loads `mlp.gate_proj`, `mlp.up_proj` and `mlp.down_proj` of the layer whose tensors begin with `prefix`, behind a
    /// norm that is loaded.
    pub fn load(
        loader: &mut Loader<'_>,
        prefix: &str,
        norm: Tensor,
        (hidden, intermediate): (usize, usize),
        quantization: Option<&Quantization>,
    ) -> Result<Self, WeightsError> {
        let name = |tail: &str| format!("{prefix}.mlp.{tail}.weight");
        let part = |tail: &str, rows| Part { name: name(tail), rows };
        let (first, down) =
            (["gate_proj", "up_proj"].map(|tail| part(tail, intermediate)), [part("down_proj", hidden)]);
        Ok(Self {
            norm,
            gate_up: load_projection(loader, quantization, &name("gate_up_proj"), &first, hidden)?,
            down: load_projection(loader, quantization, &down[0].name, &down, intermediate)?,
        })
    }
}

impl Mlp {
    /// Bytes of the matrices of [`load`](Self::load).
    pub fn bytes(prefix: &str, (hidden, intermediate): (usize, usize), quantization: Option<&Quantization>) -> u64 {
        let bytes =
            |tail, rows, cols| projection_bytes(quantization, &format!("{prefix}.mlp.{tail}.weight"), rows, cols);
        let first = ["gate_proj", "up_proj"].map(|tail| bytes(tail, intermediate, hidden));
        first.iter().sum::<u64>() + bytes("down_proj", hidden, intermediate)
    }
}

/// Activations of a step around the token mixer of each layer, all bf16.
#[derive(Debug)]
pub struct Activations {
    /// The residual stream, `[tokens, hidden]`.
    pub residual: Tensor,
    /// Its normalised value, input of the projections, `[tokens, hidden]`.
    pub normed: Tensor,
    /// Scratch for the output of a block before it is added to the residual, `[tokens, hidden]`.
    pub delta: Tensor,
    /// Scratch for the MLP's first GEMM, `[tokens, 2 * intermediate]`.
    pub gate_up: Tensor,
    /// `[tokens, intermediate]`.
    pub activated: Tensor,
}

impl Activations {
    /// For `tokens` tokens of `hidden` elements and an MLP of `intermediate`, and the `N` scratch tensors of the model's
    /// token mixers, one group for each kind of mixer. No two mixers run at once, nor a mixer beside the MLP: the groups
    /// and the MLP's scratch alias one buffer.
    pub fn new<const N: usize>(
        exec: &mut Exec,
        (hidden, intermediate): (usize, usize),
        tokens: usize,
        mixers: &[&[AliasedTensor<'_>]],
    ) -> std::io::Result<(Self, [Tensor; N])> {
        let mut wide = |name: &str| exec.tensor(name, &[tokens, hidden], DType::Bf16);
        let (residual, normed, delta) = (wide("residual")?, wide("normed")?, wide("delta")?);
        let mlp = mlp_scratch(intermediate, tokens);
        let groups: Vec<&[AliasedTensor<'_>]> = mixers.iter().copied().chain([&mlp[..]]).collect();
        let mut tensors = exec.aliased(&groups)?;
        let [gate_up, activated] = array(tensors.split_off(tensors.len() - mlp.len()))?;
        Ok((Self { residual, normed, delta, gate_up, activated }, array(tensors)?))
    }

    /// Bytes of [`new`](Self::new) for each token on a GPU, where `mixers` are the groups for one token.
    pub fn bytes_per_token((hidden, intermediate): (usize, usize), mixers: &[&[AliasedTensor<'_>]]) -> u64 {
        let mlp = mlp_scratch(intermediate, 1);
        let groups: Vec<&[AliasedTensor<'_>]> = mixers.iter().copied().chain([&mlp[..]]).collect();
        (3 * hidden * DType::Bf16.size() + aliased_bytes(&groups)) as u64
    }

    /// Narrows all of them to `tokens` rows, in bf16.
    pub fn set_rows(&mut self, tokens: usize) {
        let Self { residual, normed, delta, gate_up, activated } = self;
        for tensor in [residual, normed, delta, gate_up, activated] {
            tensor.set_rows(tokens);
            tensor.set_dtype(DType::Bf16);
        }
    }

    /// The rest of a layer after its token mixer: `mixed`, `[tokens, width]`, goes through the output projection `out`,
    /// `[hidden, width]`, into the residual stream, and so does the MLP; `normed` becomes the stream under `next`, the
    /// weight of the next layer's input norm or of the final one, in the format that `projection` takes: the matrix that multiplies
    /// it next, `None` for the output matrix.
    pub fn finish_layer(
        &mut self,
        exec: &mut Exec,
        (mixed, out): (&Tensor, &Matrix),
        mlp: &Mlp,
        (next, projection): (&Tensor, Option<&Matrix>),
        eps: f32,
    ) -> Result<(), OpError> {
        let Self { residual, normed, delta, gate_up, activated } = self;
        ops::choose_format(exec, normed, &mlp.gate_up)?;
        ops::linear_add_norm(exec, mixed, out, residual, &mlp.norm, eps, delta, normed)?;
        ops::choose_gated_format(exec, activated, &mlp.gate_up, &mlp.down)?;
        ops::linear_swiglu(exec, normed, &mlp.gate_up, gate_up, activated)?;
        match projection {
            Some(projection) => ops::choose_format(exec, normed, projection)?,
            None => normed.set_dtype(DType::Bf16),
        }
        ops::linear_add_norm(exec, activated, &mlp.down, residual, next, eps, delta, normed)
    }
}

fn mlp_scratch(intermediate: usize, tokens: usize) -> [AliasedTensor<'static>; 2] {
    [("gate_up", [tokens, 2 * intermediate], DType::Bf16), ("activated", [tokens, intermediate], DType::Bf16)]
}

fn array<const N: usize>(tensors: Vec<Tensor>) -> std::io::Result<[Tensor; N]> {
    let wrong = |tensors: Vec<Tensor>| std::io::Error::other(format!("{} tensors for {N} names", tensors.len()));
    tensors.try_into().map_err(wrong)
}

/// The paged cache of one layer of full attention; see [`HeadShape::cache`] for the layout.
#[derive(Debug)]
pub struct KvLayer {
    /// Keys.
    pub k: Tensor,
    /// Values.
    pub v: Tensor,
}

impl KvLayer {
    /// A cache of `blocks` blocks. On the CPU a page costs memory when it is first written.
    pub fn new(exec: &mut Exec, shape: HeadShape, dtype: KvDType, blocks: usize) -> std::io::Result<Self> {
        let [k, v] = shape.cache(exec.device(), dtype, blocks);
        Ok(Self { k: exec.tensor("kv.k", &k, dtype.dtype())?, v: exec.tensor("kv.v", &v, dtype.dtype())? })
    }

    /// Keys and values, to be written.
    pub fn both_mut(&mut self) -> (&mut Tensor, &mut Tensor) {
        (&mut self.k, &mut self.v)
    }
}
