//! Gated full attention over the paged KV cache: layers of the model, and the one that drafts.

use crate::config::Config;
use crate::pass::Pass;
use crate::weights::FullAttention;
use crate::workspace::Workspace;
use pegainfer_core::tensor::{DType, OpError, Tensor};
use pegainfer_kernels::ops::{self, Heads};
use pegainfer_kernels::runtime::{Inputs, SampledRows};

/// Layer `i` of full attention up to its output projection: `normed` becomes `attended`, in bf16 unless it `rounds` and the
/// projection takes FP8.
pub(crate) fn full_attention(
    pass: &mut Pass<'_>,
    layer: &FullAttention,
    i: usize,
    rounds: bool,
) -> Result<(), OpError> {
    if pass.step.queries().1 > 1 {
        project(pass, layer, i)?;
        return attend(pass, i, false);
    }
    let Pass { exec, config, cache, work, inputs, step, .. } = pass;
    let Workspace { rope, activations, qkv, q, attended, .. } = &mut **work;
    let (heads, kv) = (heads(config, layer, rope, inputs), cache[i].kv().both_mut());
    ops::linear(exec, &activations.normed, &layer.projection, qkv)?;
    let batch = inputs.attention(step);
    attended.set_dtype(DType::Bf16);
    if rounds {
        let format = (config.shape, config.kv_dtype);
        ops::choose_gated_attended_format(exec, attended, &layer.out, format, &batch)?;
    }
    ops::gated_decode_attention(exec, qkv, &heads, &batch, kv, q, attended)
}

/// As [`full_attention`] for the last layer, which goes on with the sampled rows only. Returns false if none is sampled.
pub(crate) fn last_attention(pass: &mut Pass<'_>, layer: &FullAttention, i: usize) -> Result<bool, OpError> {
    let rows = &pass.inputs.sample_rows;
    match SampledRows::of(pass.step, pass.inputs) {
        SampledRows::All => full_attention(pass, layer, i, true)?,
        SampledRows::None => {
            project(pass, layer, i)?;
            return Ok(false);
        }
        SampledRows::RowEnds => {
            project(pass, layer, i)?;
            pass.work.gather_queries(pass.exec, rows)?;
            attend(pass, i, true)?;
        }
        SampledRows::Some => {
            full_attention(pass, layer, i, false)?;
            pass.work.gather_outputs(pass.exec, rows)?;
        }
    }
    Ok(true)
}

/// The projections of layer `i`: `normed` becomes `q`, the gates in `qkv`, and keys and values in the cache.
fn project(pass: &mut Pass<'_>, layer: &FullAttention, i: usize) -> Result<(), OpError> {
    let Pass { exec, config, cache, work, inputs, .. } = pass;
    let Workspace { rope, activations, qkv, q, .. } = &mut **work;
    let (heads, kv) = (heads(config, layer, rope, inputs), cache[i].kv().both_mut());
    ops::linear(exec, &activations.normed, &layer.projection, qkv)?;
    ops::gated_qk_norm_rope_write_kv(exec, qkv, &heads, q, kv)
}

/// Attention of the queries of layer `i` over its cache: `q` becomes `attended`, of the sampled tokens or of all.
fn attend(pass: &mut Pass<'_>, i: usize, sampled: bool) -> Result<(), OpError> {
    let Pass { exec, config, cache, work, inputs, step, .. } = pass;
    let (shape, kv) = (config.shape, cache[i].kv());
    let Workspace { qkv, q, attended, .. } = &mut **work;
    let batch = if sampled { inputs.sampled_attention(step) } else { inputs.attention(step) };
    let scale = (shape.head_dim as f32).sqrt().recip();
    attended.set_dtype(DType::Bf16);
    ops::attention(exec, q, (&kv.k, &kv.v), &batch, shape, scale, attended)?;
    ops::attention_gate(exec, qkv, shape, attended)
}

/// The heads of a layer of full attention, for the tokens of a step.
fn heads<'a>(config: &Config, layer: &'a FullAttention, rope: &'a Tensor, inputs: &'a Inputs) -> Heads<'a> {
    let (shape, norms, eps) = (config.shape, (&layer.q_norm, &layer.k_norm), config.rms_norm_eps);
    Heads { shape, norms, eps, rope, positions: &inputs.positions, slots: &inputs.slots }
}
