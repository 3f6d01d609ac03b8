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
use pegainfer_core::exec::Exec;
use pegainfer_core::parallel::Communicator;
use pegainfer_core::tensor::{DType, OpError, Tensor};
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
    let Pass { exec, config, cache, work, inputs, step, communicator, .. } = pass;
    let inputs = &**inputs;
    let (rows, kv) = (SampledRows::of(step, inputs), cache[config.layers.len()].kv());
    mtp.attention.forward(exec, &mut work.decoder, kv, (inputs, step), rows, None)?;
    if rows == SampledRows::None {
        return Ok(());
    }
    let DecoderWorkspace { activations, attention } = &mut work.decoder;
    let mixed = (&*attention.attended, &mtp.attention.o);
    activations.finish_layer(exec, mixed, &mtp.mlp, (&mtp.norm, None), eps, (*communicator, None))
}

/// The residual stream of the layer, and in `normed` its input: `fc` is applied to embeddings and hidden states one
/// after the other, and the sum is rounded to bf16 twice. Several ranks compute and gather columns of both GEMMs.
fn join_inputs(pass: &mut Pass<'_>, mtp: &Mtp) -> Result<(), OpError> {
    let (weights, eps) = (pass.weights, pass.config.rms_norm_eps);
    let Pass { exec, work, inputs, step, previous, communicator, .. } = pass;
    let Workspace { decoder, sampled: Some(scratch), images, .. } = &mut **work else { return Ok(()) };
    let Activations { residual, normed, delta, .. } = &mut decoder.activations;
    // As wide as the residual stream at least, and not in use yet.
    let part = &mut decoder.attention.qkv;
    ops::embedding(exec, &inputs.tokens, previous, &weights.decoder.embedding, residual)?;
    if let Some(images) = images.as_ref().filter(|_| !step.images.is_empty()) {
        images.replace(exec, &step.images, residual)?;
    }
    ops::rms_norm(exec, residual, &mtp.embedding_norm, eps, &mut *delta)?;
    let Some(communicator) = communicator else {
        ops::linear(exec, delta, &mtp.embedding_projection, residual)?;
        ops::rms_norm(exec, normed, &mtp.hidden_norm, eps, &mut *scratch)?;
        let (w, norm) = (&mtp.hidden_projection, &mtp.input_norm);
        return ops::linear_add_norm(exec, scratch, w, residual, norm, eps, delta, normed.bf16());
    };
    gathered(exec, *communicator, delta, &mtp.embedding_projection, part, residual)?;
    ops::rms_norm(exec, normed, &mtp.hidden_norm, eps, &mut *scratch)?;
    gathered(exec, *communicator, scratch, &mtp.hidden_projection, part, delta)?;
    ops::add_rms_norm(exec, delta, residual, &mtp.input_norm, eps, normed.bf16())
}

/// `out = x · wᵀ`, `[rows, hidden]` bf16, where `w` has the rank's rows of the matrix. `scratch` takes the rank's columns
/// of the output. They are gathered rather than computed on every rank, because ranks may choose different algorithms.
fn gathered(
    exec: &mut Exec,
    communicator: &dyn Communicator,
    x: &Tensor,
    w: &Tensor,
    scratch: &mut Tensor,
    out: &mut Tensor,
) -> Result<(), OpError> {
    let ((rows, hidden), part) = (x.rows_cols(), w.rows_cols().0);
    scratch.as_shape(&[rows, part], DType::Bf16, |own| {
        ops::linear(exec, x, w, &mut *own)?;
        // Pairs of bf16 values as four-byte words.
        own.as_shape(&[rows, part / 2], DType::F32, |words| {
            out.as_shape(&[rows, hidden / 2], DType::F32, |whole| communicator.all_gather(exec, words, whole))
        })
    })
}
