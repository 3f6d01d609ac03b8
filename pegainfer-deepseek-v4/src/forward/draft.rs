//! Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): the layer of the April checkpoint that drafts.
//!
//! For a token `t` with residual streams `X[j]` after the last layer, `j` from 0 to 3, before they are mixed: `X'[j] =
//! h_proj · norm(X[j]) + e_proj · norm(embed(token t + 1))`. The streams `X'` go through a window layer with its own
//! keys, then with its own mixing of streams and norm through the model's output matrix, which gives the token at `t +
//! 2`. For further drafts the layer runs again with its own streams in place of `X` and the draft as the token.
//!
//! The key of a token depends on the token after it. If a prefix comes from the cache, the key of its last token was
//! computed with the next token of another request. That makes a draft worse and changes no output.

use super::Pass;
use crate::config::{LayerKind, STREAMS};
use crate::draft_workspace::DraftWorkspace;
use crate::state::LayerState;
use crate::weights::Mtp;
use crate::workspace::Workspace;
use pegainfer_core::tensor::{OpError, Tensor};
use pegainfer_kernels::ops::deepseek_v4 as ops;

impl Pass<'_> {
    /// A pass of the layer, whose state is the only one in `state`, up to `last_normed`. Input: `streams` after the
    /// last layer, for all tokens of the step; with `again`, `last_streams` of the tokens that the previous pass
    /// sampled.
    pub fn draft(&mut self, state: &mut [LayerState], again: bool) -> Result<(), OpError> {
        let (Some(mtp), [state]) = (&self.weights.mtp, state) else { return Err(not_loaded()) };
        if again {
            let Self { exec, inputs, work, .. } = self;
            // As many rows as any previous pass may have sampled, because a graph keeps the length.
            work.last_streams.set_rows(work.last_streams.max_rows());
            ops::pick_rows(exec, &work.last_streams, &inputs.common.sample_rows, &mut work.streams)?;
        }
        self.join_inputs(mtp)?;
        self.enter_layer(&mtp.layer, true)?;
        self.layer(&mtp.layer, (self.draft_number(), LayerKind::Window), state)?;
        self.leave()?;
        self.sampled_rows(&mtp.head_hyper, &mtp.norm)
    }

    /// Replaces `streams` by the layer's input: their projections plus that of the token's embedding.
    fn join_inputs(&mut self, mtp: &Mtp) -> Result<(), OpError> {
        self.embed()?;
        let eps = self.config.rms_norm_eps;
        let Self { exec, work, .. } = self;
        let Workspace { embedded, streams, normed, draft: Some(draft), .. } = &mut **work else {
            return Err(not_loaded());
        };
        normed.norm(exec, embedded, &mtp.embedding_norm, eps)?;
        ops::matmul(exec, normed.input(&mtp.embedding_projection), &mtp.embedding_projection, embedded)?;
        let DraftWorkspace { streams: normed, add, keep } = draft;
        let hidden = embedded.rows_cols().1;
        streams.as_rows_of(hidden, |rows: &mut Tensor| {
            let (all, max_rows) = (rows.rows_cols().0, normed.exact.max_rows());
            for first in (0..all).step_by(max_rows) {
                let count = max_rows.min(all - first);
                rows.set_range(first, count);
                normed.set_rows(count);
                normed.norm(exec, rows, &mtp.stream_norm, eps)?;
                ops::matmul(exec, normed.input(&mtp.stream_projection), &mtp.stream_projection, rows)?;
            }
            Ok(())
        })?;
        debug_assert_eq!(streams.shape(), [embedded.shape()[0], STREAMS, hidden]);
        ops::hyper_merge(exec, embedded, (&*add, &*keep), streams)
    }
}

fn not_loaded() -> OpError {
    OpError { op: "draft", message: "the layer that drafts is not loaded".to_owned() }
}
