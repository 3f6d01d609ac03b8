//! Passes as CUDA graphs on all ranks.

use super::Executor;
use super::rank::{GraphKey, PassKind};
use crate::graph_shape::{padded, padded_blocks};
use crate::plan::Step;
use pegainfer_core::tensor::OpError;
use std::sync::Arc;

/// Passes that ran as CUDA graphs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GraphReplays {
    /// Steps with one token per row.
    pub decode: u64,
    /// Steps with several tokens per row, which verify drafts.
    pub verify: u64,
    /// Passes of the layer for multi-token prediction over the tokens of a step.
    pub first_drafts: u64,
    /// Passes of that layer over its own drafts.
    pub next_drafts: u64,
    /// Passes of DSpark's stages over blocks.
    pub blocks: u64,
}

impl Executor {
    /// Enqueues a pass of kind `part` over `step` on all ranks, as a CUDA graph if there is one of its shape.
    pub(super) fn enqueue(&mut self, part: PassKind, step: &Step) -> Result<(), OpError> {
        let (config, numerics, rank) = (self.config.clone(), self.numerics, self.ranks.first());
        let key = rank.graph_shape(part, step).map(|shape| GraphKey { part, shape });
        let captures = rank.graphs.should_capture(key);
        let step = Arc::new(match (key, part) {
            (None, _) => step.clone(),
            (Some(key), PassKind::Blocks) => padded_blocks(step, key.shape),
            (Some(key), _) => padded(step, key.shape),
        });
        if captures {
            // All ranks capture before any of them runs: a running rank waits on its device for the others, and
            // capturing waits for the device.
            let (config, step) = (config.clone(), step.clone());
            self.ranks.run(move |rank| {
                rank.begin(part, &step)?;
                rank.on_device((&config, numerics, part), &step, |graphs, launches| graphs.capture(key, launches))
            })?;
        }
        self.ranks.run(move |rank| {
            if !captures {
                rank.begin(part, &step)?;
            }
            rank.on_device((&config, numerics, part), &step, |graphs, launches| graphs.run(key, launches))
        })
    }

    /// Enqueues the draws of a pass through `part` over `step` on all ranks. Passes over blocks draw within
    /// [`enqueue`](Self::enqueue).
    pub(super) fn draw(&mut self, part: PassKind, step: &Step) -> Result<(), OpError> {
        let (config, numerics, step) = (self.config.clone(), self.numerics, Arc::new(step.clone()));
        self.ranks.run(move |rank| rank.on_device((&config, numerics, part), &step, |_, launches| launches.sample()))
    }

    /// Passes that ran as a CUDA graph so far.
    pub fn graph_replays(&self) -> GraphReplays {
        let graphs = &self.ranks.first().graphs;
        let of = |part: PassKind| graphs.replays_of(|key| key.part == part);
        let is_decode = |key: &GraphKey| key.part == PassKind::Layers && key.shape.tokens == key.shape.rows;
        let decode = graphs.replays_of(is_decode);
        GraphReplays {
            decode,
            verify: of(PassKind::Layers) - decode,
            first_drafts: of(PassKind::Draft { again: false }),
            next_drafts: of(PassKind::Draft { again: true }),
            blocks: of(PassKind::Blocks),
        }
    }

    /// Pads later steps of up to `rows` rows as for CUDA graphs, but runs them launch by launch, for tests on devices
    /// without graphs.
    pub fn only_pad(&mut self, rows: usize) -> Result<(), OpError> {
        self.ranks.run(move |rank| {
            rank.only_pad(rows);
            Ok(())
        })
    }
}
