//! The second half of a layer: a gated MLP, or a mixture of experts.

use super::decoder::DecoderShape;
use super::lora::{Adapters, Projection, adapted_linear};
use super::mlp_scratch::MlpScratch;
use super::moe::Moe;
use super::projection_source::ProjectionSource;
use super::quantization::{Quantization, load_projection};
use pegainfer_core::exec::Exec;
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_core::weights::{Columns, Loader, SourceTensor, WeightsError};
use pegainfer_kernels::ops::{self, Activation, Matrix};

/// Weights of the second half of a layer.
#[derive(Debug)]
pub struct Mlp {
    /// Weight of the norm before it, `[hidden]`.
    pub norm: Tensor,
    /// What follows the norm.
    pub kind: MlpKind,
}

/// The weights of an MLP after its norm.
#[derive(Debug)]
pub enum MlpKind {
    /// One MLP for all tokens.
    Dense(DenseMlp),
    /// An MLP of several experts.
    Moe(Moe),
}

/// `down · (silu(gate · x) * (up · x))`. With several ranks, `intermediate` is the rank's share.
#[derive(Debug)]
pub struct DenseMlp {
    /// Gate, then up: `[2 * intermediate, hidden]`.
    pub gate_up: Matrix,
    /// `[hidden, intermediate]`.
    pub down: Matrix,
}

impl Mlp {
    /// Loads the `mlp.*` tensors of the layer with this tensor name `prefix`. `sparse`: its number among the layers with
    /// experts, if it has them. `norm` is loaded first.
    pub fn load(
        loader: &mut Loader<'_>,
        prefix: &str,
        (norm, sparse): (Tensor, Option<usize>),
        shape: &DecoderShape,
        quantization: Option<&Quantization>,
    ) -> Result<Self, WeightsError> {
        let kind = match sparse.zip(shape.moe) {
            Some(moe) => MlpKind::Moe(Moe::load(loader, prefix, moe, shape, quantization)?),
            None => MlpKind::Dense(DenseMlp::load(loader, prefix, shape, quantization)?),
        };
        Ok(Self { norm, kind })
    }

    /// The MLP if it is dense.
    pub fn dense(&self) -> Option<&DenseMlp> {
        match &self.kind {
            MlpKind::Dense(mlp) => Some(mlp),
            MlpKind::Moe(_) => None,
        }
    }

    /// The matrix that alone reads the output of the norm; `None` if there are several.
    pub(super) fn reader(&self) -> Option<&Matrix> {
        self.dense().map(|mlp| &mlp.gate_up)
    }
}

impl DenseMlp {
    /// Loads `mlp.gate_proj`, `mlp.up_proj` and `mlp.down_proj`.
    fn load(
        loader: &mut Loader<'_>,
        prefix: &str,
        shape: &DecoderShape,
        quantization: Option<&Quantization>,
    ) -> Result<Self, WeightsError> {
        let [gate_up, down] = Self::sources(prefix, shape);
        let (title, own) = (format!("{prefix}.mlp.gate_up_proj.weight"), &down.parts[0].name);
        Ok(Self {
            gate_up: load_projection(loader, quantization, &title, &gate_up.parts, gate_up.columns)?,
            down: load_projection(loader, quantization, own, &down.parts, down.columns.clone())?,
        })
    }

    /// Where the rows of `gate_up` and `down` are in the checkpoint, for the layer with this tensor name `prefix`.
    pub fn sources(prefix: &str, shape: &DecoderShape) -> [ProjectionSource; 2] {
        let name = |tail: &str| format!("{prefix}.mlp.{tail}.weight");
        let stored = shape.intermediate * shape.shard.ranks;
        let part = shape.shard.part(stored);
        let rows = |tail: &str| SourceTensor { name: name(tail), rows: stored, part: part.clone() };
        let first = ["gate_proj", "up_proj"].map(rows).to_vec();
        let down = vec![SourceTensor::whole(name("down_proj"), shape.hidden)];
        let columns = Columns { stored, part: part.clone() };
        [ProjectionSource { parts: first, columns: shape.hidden.into() }, ProjectionSource { parts: down, columns }]
    }

    /// Computes the input of `down`, from `normed` to `scratch.activated`.
    pub(super) fn activate(
        &self,
        exec: &mut Exec,
        normed: &Activation,
        scratch: &mut MlpScratch,
        adapters: Option<&mut Adapters<'_>>,
    ) -> Result<(), OpError> {
        let MlpScratch { gate_up, activated, .. } = scratch;
        if adapters.is_some() {
            adapted_linear(exec, (normed, &self.gate_up), Projection::GateUp, adapters, gate_up)?;
            return ops::swiglu(exec, gate_up, activated.bf16());
        }
        ops::linear_swiglu(exec, normed, &self.gate_up, gate_up, activated.input_of(&self.down))
    }
}
