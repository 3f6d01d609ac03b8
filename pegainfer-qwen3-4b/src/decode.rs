//! Steps of few rows with one token each: all layers as one op.

use crate::config::Config;
use crate::plan::Step;
use crate::state::KvLayer;
use crate::weights::{Layer, Weights};
use crate::workspace::Workspace;
use pegainfer_core::tensor::Tensor;
use pegainfer_kernels::ops::{DECODE_LAYERS_ROWS, DecodeLayer, DecodeModel, DecodeScratch};

/// Whether the op takes all layers of `step`.
pub(crate) fn takes(step: &Step) -> bool {
    step.rows.len() <= DECODE_LAYERS_ROWS && step.queries() == (1, 1) && step.samples_every_token()
}

/// The model as the op wants it.
pub(crate) fn model<'a>(
    config: &Config,
    weights: &'a Weights,
    kv: &'a mut [KvLayer],
    rope: &'a Tensor,
) -> DecodeModel<'a> {
    let layer = |(layer, kv): (&'a Layer, &'a mut KvLayer)| DecodeLayer {
        input_norm: &layer.input_norm,
        qkv: &layer.qkv,
        head_norms: (&layer.q_norm, &layer.k_norm),
        cache: (&mut kv.k, &mut kv.v),
        o: &layer.o,
        post_norm: &layer.post_norm,
        gate_up: &layer.gate_up,
        down: &layer.down,
    };
    DecodeModel {
        layers: weights.layers.iter().zip(kv).map(layer).collect(),
        final_norm: &weights.norm,
        rope,
        shape: config.shape,
        eps: config.rms_norm_eps,
    }
}

/// The op's room, and the tensors that it reads and writes: the residual stream and its normalised value.
pub(crate) fn room(work: &mut Workspace) -> (DecodeScratch<'_>, &mut Tensor, &mut Tensor) {
    let Workspace { residual, normed, delta, qkv, q, attended, gate_up, activated } = work;
    (DecodeScratch { delta, qkv, q, attended, gate_up, activated }, residual, normed)
}
