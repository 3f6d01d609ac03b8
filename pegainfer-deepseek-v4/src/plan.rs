//! The work of one step, as the scheduler of pegainfer-core hands it to the executor.

use crate::config::Config;
use crate::numerics::Numerics;
use crate::rank_config::{DeepSeekV4, Options, RankConfig};
use pegainfer_core::record::OpRecord;
use pegainfer_core::schedule;
pub use pegainfer_core::schedule::{NO_STATE, Outcome, SampleRow, Segment, StepRow};
pub use pegainfer_kernels::ops::deepseek_v4::PAGE_TOKENS;
use pegainfer_runtime::LoadError;

/// The work of one step. Its KV blocks are pages of compressed entries. Its `state` gives the slot in which each row's
/// sequence keeps its newest tokens; before the step, a row that changes its slot copies the old one.
pub type Step = schedule::Step<Segment>;

/// See [`pegainfer_runtime::uniform`].
pub fn uniform(batch: usize, tokens: usize, context: usize) -> Step {
    pegainfer_runtime::uniform::<DeepSeekV4>(batch, tokens, context)
}

/// See [`pegainfer_runtime::ragged`].
pub fn ragged(rows: &[(usize, usize)]) -> Step {
    pegainfer_runtime::ragged::<DeepSeekV4>(rows)
}

/// See [`pegainfer_runtime::record`].
pub fn record(
    config: &Config,
    numerics: Numerics,
    ranks: usize,
    step: (usize, usize, usize),
) -> Result<Vec<OpRecord>, LoadError> {
    pegainfer_runtime::record::<DeepSeekV4>(&whole(config, numerics), ranks, step)
}

/// See [`pegainfer_runtime::record_blocks`].
pub fn record_blocks(
    config: &Config,
    numerics: Numerics,
    ranks: usize,
    blocks: (usize, usize),
) -> Result<Vec<OpRecord>, LoadError> {
    pegainfer_runtime::record_blocks::<DeepSeekV4>(&whole(config, numerics), ranks, blocks)
}

fn whole(config: &Config, numerics: Numerics) -> RankConfig {
    RankConfig::new(config.clone(), Options { numerics, ..Options::default() })
}
