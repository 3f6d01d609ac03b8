//! Multi-token prediction: the layer of the checkpoint that drafts.
//!
//! `u[t] = fc · concat(norm(embed(token t + 1)), norm(h[t]))`, where `h[t]` is the output of the model's final norm for
//! token `t`, goes through one layer of full attention with its own keys and values, and through `mtp.norm`. The
//! model's output matrix then gives the token at `t + 2`. For further drafts the layer runs again with its own output
//! in place of `h` and the draft as the token. All norms are `1 + w`.
//!
//! The entry of a token in the layer's cache depends on the token after it. After a prefix that another request
//! computed, the last entry belongs to that request's text; at worst a draft is refused.

use crate::pass::Pass;
use crate::weights::Mtp;
use crate::workspace::Workspace;
use pegainfer_core::tensor::OpError;
use pegainfer_kernels::ops;
use pegainfer_runtime::{Activations, DecoderWorkspace, SampledRows};

/// Copies the rows of the sampled tokens after the last layer: logits are computed from these, drafts from all rows.
pub(crate) fn gather_sampled(pass: &mut Pass<'_>) -> Result<(), OpError> {
    let (Workspace { decoder, sampled: Some(sampled), .. }, rows) = (&mut *pass.work, &pass.inputs.sample_rows) else {
        return Ok(());
    };
    sampled.set_rows(rows.elements());
    if rows.elements() == 0 { Ok(()) } else { ops::gather_rows(pass.exec, &decoder.activations.normed, rows, sampled) }
}

/// Runs a pass of the layer: from `normed`, the hidden states of the step's tokens, to the output of `mtp.norm` for the
/// sampled ones.
pub(crate) fn draft(pass: &mut Pass<'_>) -> Result<(), OpError> {
    let (weights, eps) = (pass.weights, pass.config.rms_norm_eps);
    let Some(mtp) = &weights.mtp else {
        return Err(OpError { op: "draft", message: "the layer that drafts is not loaded".to_owned() });
    };
    join_inputs(pass, mtp)?;
    let Pass { exec, config, cache, work, inputs, step, .. } = pass;
    let (rows, kv) = (SampledRows::of(step, inputs), cache[config.layers.len()].kv());
    mtp.attention.forward(exec, &mut work.decoder, kv, (inputs, step), rows)?;
    if rows == SampledRows::None {
        return Ok(());
    }
    let DecoderWorkspace { activations, attention } = &mut work.decoder;
    activations.finish_layer(exec, (&attention.attended, &mtp.attention.o), &mtp.mlp, (&mtp.norm, None), eps)
}

/// The residual stream of the layer, and in `normed` its input: `fc` is applied to embeddings and hidden states one
/// after the other, and the sum is rounded to bf16 twice.
fn join_inputs(pass: &mut Pass<'_>, mtp: &Mtp) -> Result<(), OpError> {
    let (weights, eps) = (pass.weights, pass.config.rms_norm_eps);
    let Pass { exec, work, inputs, previous, .. } = pass;
    let Workspace { decoder, sampled: Some(scratch), .. } = &mut **work else { return Ok(()) };
    let Activations { residual, normed, delta, .. } = &mut decoder.activations;
    ops::embedding(exec, &inputs.tokens, previous, &weights.decoder.embedding, residual)?;
    ops::rms_norm(exec, residual, &mtp.embedding_norm, eps, &mut *delta)?;
    ops::linear(exec, delta, &mtp.embedding_projection, residual)?;
    ops::rms_norm(exec, normed, &mtp.hidden_norm, eps, &mut *scratch)?;
    ops::linear_add_norm(exec, scratch, &mtp.hidden_projection, residual, &mtp.input_norm, eps, delta, normed.bf16())
}
