//! Records of steps.

use anyhow::{Context, Result};
use pegainfer_core::engine::MAX_LOGPROBS;
use pegainfer_core::exec::Activations;
use pegainfer_core::images::{Image, StepImage};
use pegainfer_core::logits_processors::{CountUpdate, CountedPenalties, LogitEdit, LogitsUpdate, Penalties, TokenMask};
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule;
use std::sync::Arc;

/// Activations of the GPU that is checked.
pub const ACTIVATIONS: Activations = Activations::RoundedPrompts;

/// Records the ops of a step with this number of rows, new tokens per row and context tokens.
pub type StepRecords = Box<dyn Fn(usize, usize, usize) -> Result<Vec<OpRecord>>>;

/// Records the ops of one model's step, then of the other's.
pub fn both(one: StepRecords, other: StepRecords) -> StepRecords {
    Box::new(move |batch, tokens, context| {
        let mut records = one(batch, tokens, context)?;
        records.extend(other(batch, tokens, context)?);
        Ok(records)
    })
}

/// Records steps of rank 0 of `ranks` of a model whose rows all have log-probabilities and a logits update, without the
/// exchanges between ranks.
pub fn records<M: pegainfer_runtime::Model>(config: M::Config, ranks: usize) -> StepRecords {
    Box::new(move |batch, tokens, context| {
        let mut step = pegainfer_runtime::uniform::<M>(batch, tokens, context);
        ask_for_all(&mut step, M::info(&config).vocab_size);
        let mut records = pegainfer_runtime::record_step::<M>(&config, (ACTIVATIONS, ranks), &step)?;
        records.retain(|record| record.sent == 0);
        Ok(records)
    })
}

/// Records the ops of a tower, and those that take its rows and positions, in steps of one prompt that has an image of
/// most of its tokens. None for other steps.
pub fn image_records<M: pegainfer_runtime::Model>(config: M::Config) -> StepRecords {
    Box::new(move |batch, tokens, context| {
        let side = tokens.isqrt();
        if batch != 1 || !(8..=32).contains(&side) {
            return Ok(Vec::new());
        }
        let mut step = pegainfer_runtime::uniform::<M>(batch, tokens, context);
        let (grid, pixels) = (2 * side, vec![0; (32 * side).pow(2) * 3]);
        let image = Image::new((grid, grid), pixels).map(Arc::new).context("an image of another size than its grid")?;
        step.images.push(StepImage { first: 0, rows: 0..image.tokens(), image });
        step.rope_positions.extend(step.positions.iter().map(|at| [*at, at.saturating_sub(1), at / 2]));
        let mut records = pegainfer_runtime::record_step::<M>(&config, (ACTIVATIONS, 1), &step)?;
        let rows = records.iter().position(|record| record.op == "embedding").unwrap_or(records.len());
        let rest = records.split_off(rows).into_iter().filter(|record| record.op.starts_with("gated_qk"));
        records.extend(rest.collect::<Vec<_>>());
        Ok(records)
    })
}

/// Requests log-probabilities and all logits processors for every row.
fn ask_for_all<R>(step: &mut schedule::Step<R>, vocab: usize) {
    let edit = |token: usize| LogitEdit { token: token as u32, scale: 1.0, add: 0.0 };
    let edits: Vec<LogitEdit> = (0..vocab.min(1000)).map(edit).collect();
    let allowed = Some(Arc::new(TokenMask::new(&[0], vocab)));
    let penalties = Penalties { presence: 1.5, frequency: 0.5, repetition: 1.1 };
    for (row, slot) in step.samples.iter_mut().zip(0..) {
        row.logprobs = Some(MAX_LOGPROBS);
        let penalties = Some(CountedPenalties { penalties, slot, drafts: vec![0, 1, 0] });
        row.logits_update = Some(LogitsUpdate { penalties, edits: edits.clone(), allowed: allowed.clone() });
        step.counts.push(CountUpdate { slot, starts: true, prompt: [0; 500].into(), generated: vec![0; 500] });
    }
}
